"""Processes of ranks: nothing of them stays, however the front or torchrun ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from served import BODY, PROMPT, ROUTE, alive, drawn, shared_memory, until

from greenroom.demo import checkpoint_path
from greenroom.engine import OmniRanks, WorkerDied
from ports import free_port

GATHER = {"enable_distributed_layerwise_offload": True}


@pytest.mark.slow
def test_ranks_start_and_stop_in_a_row_without_leaving_anything(emu: Any) -> None:
    before = shared_memory()
    for _ in range(2):
        omni = OmniRanks(checkpoint_path(), data_parallel_size=2, device="emu", **GATHER)
        pids = [link.process.pid for link in omni._links if link.process is not None]
        job = omni.generate(PROMPT, {"seed": 7, "num_inference_steps": 1})
        assert len(job) == 1
        assert omni.shutdown(timeout_s=20)
        assert not any(alive(pid) for pid in pids) and shared_memory() <= before
        with pytest.raises(WorkerDied):
            omni.generate(PROMPT)


class Cli:
    """`greenroom serve` as a process, with two ranks, possibly inside torchrun."""

    def __init__(self, folder: Path, *words: str, before: tuple[str, ...] = ()) -> None:
        self.port = free_port()
        program = str(Path(sys.executable).with_name("greenroom"))
        command = [*before, program, "serve", str(checkpoint_path()), "--omni", "--device", "emu"]
        self.log = folder / "log.txt"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port), *words], stdout=log, stderr=log, start_new_session=True
            )

    def wait(self) -> Cli:
        until(lambda: self.process.poll() is not None or self.health() is not None, 90)
        assert self.process.poll() is None, self.log.read_text()
        return self

    def health(self) -> int | None:
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/health", trust_env=False, timeout=10).status_code
        except httpx.TransportError:
            return None

    def post(self) -> httpx.Response:
        url = f"http://127.0.0.1:{self.port}{ROUTE}"
        return httpx.post(url, json=BODY, trust_env=False, timeout=60)

    def ranks(self) -> list[int]:
        """Processes of this session, the front excepted."""
        found = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if os.getsid(int(folder.name)) == self.process.pid != int(folder.name):
                    found.append(int(folder.name))
        return [pid for pid in found if alive(pid)]

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)

    def __enter__(self) -> Cli:
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


@pytest.mark.slow
def test_the_command_line_serves_with_ranks_and_leaves_nothing(tmp_path: Path, expected: Any) -> None:
    before = shared_memory()
    words = ("--data-parallel-size", "2", "--enable-distributed-layerwise-offload")
    with Cli(tmp_path, *words).wait() as cli:
        assert np.array_equal(drawn(cli.post()), expected(7))
        ranks = cli.ranks()
        assert len(ranks) == 2
        assert cli.end(signal.SIGTERM) == 0, cli.log.read_text()
        until(lambda: not any(alive(pid) for pid in ranks), 5)
    assert shared_memory() <= before


@pytest.mark.slow
def test_a_server_that_ends_without_one_of_its_ranks_says_so(tmp_path: Path) -> None:
    with Cli(tmp_path, "--data-parallel-size", "2", "--enable-layerwise-offload").wait() as cli:
        os.kill(cli.ranks()[0], signal.SIGKILL)
        until(lambda: cli.health() == 503)
        assert cli.end(signal.SIGTERM) == 1
        assert "killed by signal 9" in cli.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_ranks_go_with_a_front_that_is_killed(tmp_path: Path, stopped: bool) -> None:
    before = shared_memory()
    words = ("--data-parallel-size", "2", "--enable-distributed-layerwise-offload")
    with Cli(tmp_path, *words).wait() as cli:
        ranks = cli.ranks()
        assert len(ranks) == 2
        if stopped:  # a process that can neither read nor run
            os.kill(ranks[1], signal.SIGSTOP)
        assert cli.end(signal.SIGKILL) == -signal.SIGKILL
        until(lambda: not any(alive(pid) for pid in ranks), 15)
    assert shared_memory() <= before


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--enable-distributed-layerwise-offload",)], ids=["resident", "allgather"])
def test_the_command_line_serves_inside_torchrun(tmp_path: Path, expected: Any, words: tuple[str, ...]) -> None:
    before = shared_memory()
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python")
    with Cli(tmp_path, *words, before=torchrun).wait() as cli:
        answers = [cli.post() for _ in range(2)]
        assert all(np.array_equal(drawn(answer), expected(7)) for answer in answers)
        ranks = cli.ranks()
        cli.end(signal.SIGTERM)
        until(lambda: not any(alive(pid) for pid in ranks), 30)
    assert shared_memory() <= before


@pytest.mark.slow
def test_wrong_words_end_a_torchrun_job_with_an_error(tmp_path: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python")
    with Cli(tmp_path, "--data-parallel-size", "3", before=torchrun) as cli:
        assert cli.process.wait(120) != 0
        assert "data-parallel-size" in cli.log.read_text()
