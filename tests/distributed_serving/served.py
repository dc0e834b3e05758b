"""Ranks behind a server in this process, faults planted in them, and what is left behind on this machine."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import live_server
import numpy as np
import pytest
from PIL import Image

from greenroom.engine import OmniRanks
from greenroom.serving import ServerSettings
from ports import free_port

PROMPT = "a handwritten seven"
BODY = {"prompt": PROMPT, "seed": 7, "num_inference_steps": 3}
ROUTE = "/v1/images/generations"
FAULTS = Path(__file__).with_name("faults")


@dataclass
class Served:
    """A running server in front of ranks."""

    url: str
    omni: OmniRanks

    def client(self, **words: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, trust_env=False, **{"timeout": 60, **words})

    def post(self, **changes: Any) -> Future:
        """Posts from a thread of its own; `.answer` waits for it."""
        return Future(lambda: self._post({**BODY, **changes}))

    def _post(self, body: dict[str, Any]) -> httpx.Response:
        with self.client() as client:
            return client.post(ROUTE, json=body)

    def pids(self) -> list[int]:
        return [link.process.pid for link in self.omni._links if link.process is not None]

    def wait_for(self, job_count: int) -> None:
        """Until `job_count` ranks serve a request each."""
        until(lambda: sum(r.running is not None for r in self.omni.status.ranks) == job_count)


class Future:
    """What a function gives that runs on a thread of its own."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._found: list[Any] = []
        self._thread = threading.Thread(target=lambda: self._found.append(function()), daemon=True)
        self._thread.start()

    @property
    def answer(self) -> Any:
        self._thread.join(60)
        assert self._found, "no answer within a minute"
        return self._found[0]


class Faults:
    """Has ranks do something bad in a block; see faults/sitecustomize.py."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def plant(self, rank: int, word: str) -> None:
        file = self.folder / str(rank)
        file.with_suffix(".new").write_text(word)
        file.with_suffix(".new").rename(file)

    def clear(self) -> None:
        for file in self.folder.iterdir():
            file.unlink()


@contextlib.contextmanager
def planted(folder: Path) -> Iterator[Faults]:
    """Ranks that are started inside the block look for faults in `folder`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(FAULTS), prepend=os.pathsep)
        patch.setenv("FAULTS", str(folder))
        yield Faults(folder)


@contextlib.contextmanager
def serving(omni: OmniRanks, settings: ServerSettings | None = None) -> Iterator[Served]:
    """Serves `omni` on 127.0.0.1 until the block ends."""
    with live_server.running(omni, settings or ServerSettings(shutdown_timeout=10), stops_within=60) as (url, _):
        yield Served(url, omni)


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    """With the patience that several processes need."""
    live_server.until(condition, seconds)


def torchrun(*arguments: Any, script: Path, per_machine: int = 2, machines: int = 1, seconds: float = 300) -> str:
    """Runs torchrun once on each "machine", an address of the loopback interface, and returns what was printed.

    A hang is an error.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(per_machine)]
    port = free_port()
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "EMU_DEVICE_COUNT": str(per_machine),
        "GREENROOM_RANKS_TIMEOUT": "60",
    }
    started = []
    for machine in range(machines):
        words = ["--nnodes", str(machines), "--node-rank", str(machine), "--local-addr", f"127.0.0.{1 + machine}"]
        words += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        started.append(
            subprocess.Popen(
                [*command, *words, str(script), *map(str, arguments)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
    outputs = []
    try:
        for process in started:
            outputs.append(process.communicate(timeout=seconds)[0])
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                outputs.append(process.communicate()[0])
    for process, output in zip(started, outputs, strict=True):
        assert process.returncode == 0, output
    return "".join(outputs)


def drawn(answer: httpx.Response) -> np.ndarray:
    assert answer.status_code == 200, answer.text
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"]))))


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def shared_memory() -> set[str]:
    """Names in /dev/shm."""
    return set(os.listdir("/dev/shm"))
