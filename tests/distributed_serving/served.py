"""Ranks behind a server in this process, faults planted in them, and what is left behind on this machine."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from greenroom.engine import OmniRanks
from greenroom.serving import ServerSettings
from greenroom.serving.main import make_server

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

    def rank_of(self, job_count: int = 1) -> int:
        """The rank that serves a request now, once `job_count` are being served."""
        until(lambda: sum(r.running is not None for r in self.omni.status.ranks) == job_count)
        return next(r.rank for r in self.omni.status.ranks if r.running is not None)


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

    def planted(self, rank: int) -> bool:
        return (self.folder / str(rank)).exists()

    def clear(self) -> None:
        for file in self.folder.iterdir():
            file.unlink()


@contextlib.contextmanager
def planted(folder: Path) -> Iterator[Faults]:
    """Ranks that are started inside the block look for faults in `folder`."""
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "FAULTS")}
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(FAULTS), before["PYTHONPATH"])))
    os.environ["FAULTS"] = str(folder)
    try:
        yield Faults(folder)
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def serving(omni: OmniRanks, settings: ServerSettings | None = None) -> Iterator[Served]:
    """Serves `omni` on 127.0.0.1 until the block ends."""
    server = make_server(omni, settings or ServerSettings(shutdown_timeout=10), log_level="error")
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        until(lambda: server.started, 30)
        yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}", omni)
    finally:
        server.should_exit = True
        thread.join(60)
        stopped = not thread.is_alive()
        listener.close()
        omni.shutdown(timeout_s=10)
        assert stopped, "the server did not stop"


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.02)


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
