"""A server on a free port of the loopback interface, in this process, always stopped."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from greenroom import Omni
from greenroom.serving import ServerSettings
from greenroom.serving.main import make_server

STRATEGIES: dict[str, Any] = {
    "resident": {},
    "module": {"diffusion_offload_config": {"mode": "module", "components": ["dit", "text_encoder", "vae"]}},
    "layer": {"diffusion_offload_config": {"mode": "layer", "components": ["dit", "text_encoder"]}},
}


@dataclass
class Live:
    """A running server."""

    url: str
    omni: Omni
    app: Any

    def client(self, **words: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False, **words)

    def openai(self, key: str = "none") -> Any:
        import openai

        client: Any = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)
        return client


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.01)


@contextlib.contextmanager
def serving(omni: Omni, settings: ServerSettings | None = None) -> Iterator[Live]:
    """Serves `omni` on 127.0.0.1 until the block ends."""
    with running(omni, settings or ServerSettings(shutdown_timeout=5), stops_within=30) as (url, app):
        yield Live(url, omni, app)
    # Or what it draws holds the device's memory through the files that follow.
    assert omni.shutdown(timeout_s=10), "the engine did not stop"


@contextlib.contextmanager
def running(omni: Any, settings: ServerSettings, *, stops_within: float) -> Iterator[tuple[str, Any]]:
    """A server in front of an `Omni` or `OmniRanks`, until the block ends; both are shut down.

    Yields:
        Its address, and the application.
    """
    server = make_server(omni, settings, log_level="error")
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        limit = time.monotonic() + 30
        while not server.started:
            assert thread.is_alive() and time.monotonic() < limit, "the server did not start"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", server.config.app
    finally:
        server.should_exit = True
        thread.join(stops_within)
        stopped = not thread.is_alive()
        listener.close()
        omni.shutdown(timeout_s=10)
        assert stopped, "the server did not stop"
