"""Starts ranks as processes of their own, and never waits for them for longer than it says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ports import free_port

HERE = Path(__file__).parent


@dataclass
class Ended:
    """How a rank ended.

    Attributes:
        code: of its process; negative for the number of a signal.
        text: everything that it printed.
        result: what it reported, None if it reported nothing.
    """

    code: int
    text: str
    result: Any


class Started:
    """Ranks that run `script`, a path or the name of a file in tests/distributed."""

    def __init__(
        self,
        script: str | Path,
        size: int,
        *args: str,
        folder: Path,
        env: dict[str, str] | None = None,
    ) -> None:
        self.started = time.monotonic()
        port = str(free_port())
        self.processes: list[subprocess.Popen[str]] = []
        self.outputs = [folder / f"rank{r}.txt" for r in range(size)]
        self.results = [folder / f"rank{r}.json" for r in range(size)]
        for rank in range(size):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "EMU_DEVICE_COUNT": str(size),
                "PYTHONPATH": str(HERE / "core"),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "GREENROOM_RANKS_TIMEOUT": "30",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
                "RESULT": str(self.results[rank]),
                **(env or {}),
            }
            with open(self.outputs[rank], "w") as out:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-u", str(HERE / "distributed" / script), *args],
                        env=environment,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        text=True,
                    )
                )

    def kill(self, rank: int, with_signal: int = signal.SIGKILL) -> None:
        self.processes[rank].send_signal(with_signal)

    def wait_for(self, rank: int, text: str, seconds: float = 60) -> None:
        """Until a rank has printed `text`."""
        limit = time.monotonic() + seconds
        while text not in self.outputs[rank].read_text():
            if time.monotonic() > limit or self.processes[rank].poll() is not None:
                raise AssertionError(f"rank {rank} never said {text!r}:\n{self.outputs[rank].read_text()}")
            time.sleep(0.02)

    def end(self, seconds: float = 100) -> list[Ended]:
        """Waits for all of them; those that are not done in time are killed, which fails the test."""
        limit = self.started + seconds
        ended = []
        late = []
        try:
            for rank, process in enumerate(self.processes):
                try:
                    code = process.wait(max(0.1, limit - time.monotonic()))
                except subprocess.TimeoutExpired:
                    late.append(rank)
                    process.send_signal(signal.SIGABRT)  # faulthandler prints where it was
                    code = process.wait(10)
                result = json.loads(self.results[rank].read_text()) if self.results[rank].exists() else None
                ended.append(Ended(code, self.outputs[rank].read_text(), result))
        finally:
            for process in self.processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        text = "\n".join(f"--- rank {r}: {e.code}\n{e.text}" for r, e in enumerate(ended))
        assert not late, f"ranks {late} hung:\n{text}"
        return ended


def run(script: str | Path, size: int, *args: str, folder: Path, seconds: float = 100, **more: Any) -> list[Any]:
    """Runs ranks that are all expected to succeed; what each reported."""
    ended = Started(script, size, *args, folder=folder, **more).end(seconds)
    text = "\n".join(f"--- rank {r}: {e.code}\n{e.text}" for r, e in enumerate(ended))
    assert all(e.code == 0 for e in ended), text
    return [e.result for e in ended]
