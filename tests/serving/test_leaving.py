"""How a server ends: requests are given up, everybody is told so in OpenAI's shape, and the process is gone."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from command_line import command
from live_server import STRATEGIES, running, serving, until
from test_http import BODY, ROUTE, Blocked

from greenroom import Omni
from greenroom.demo import checkpoint_path
from greenroom.serving import ServerSettings

LONG = {**BODY, "num_inference_steps": 30_000}


class Clients:
    """Clients on threads of their own, and what they were answered."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers: dict[str, httpx.Response] = {}
        self.events: list[dict[str, Any]] = []
        self._threads: list[threading.Thread] = []

    def post(self, name: str, path: str = ROUTE, **body: Any) -> None:
        def ask() -> None:
            self.answers[name] = httpx.post(f"{self.url}{path}", json=body, timeout=60, trust_env=False)

        self._start(ask)

    def listen(self, method: str, path: str, **words: Any) -> None:
        def follow() -> None:
            with httpx.stream(method, f"{self.url}{path}", timeout=60, trust_env=False, **words) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        self.events.append(json.loads(line[6:]))

        self._start(follow)

    def _start(self, what: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=what))
        self._threads[-1].start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()

    def assert_told(self, *names: str) -> None:
        assert {*names} == {*self.answers}
        for answer in self.answers.values():
            error = answer.json()["error"]
            assert answer.status_code == 503 and error["code"] == "shutting_down", answer.text
            assert error["type"] == "server_error" and "shutting down" in error["message"]


def test_what_runs_and_what_waits_is_given_up_and_told_so(emu: Any) -> None:
    omni = Omni(checkpoint_path(), device="emu", **STRATEGIES["layer"])
    with serving(omni, ServerSettings(max_steps=100_000)) as live:
        clients = Clients(live.url)
        clients.post("running", **LONG)
        until(lambda: omni.status.running is not None)
        clients.post("waiting", **LONG)
        clients.listen("POST", ROUTE, json={**LONG, "stream": True})
        until(lambda: omni.status.waiting == 2 and bool(clients.events))
    clients.join()
    clients.assert_told("running", "waiting")
    assert clients.events[-1]["type"] == "error" and clients.events[-1]["error"]["code"] == "shutting_down"


def test_a_video_on_its_way_ends_in_an_event(emu: Any, checkpoints: Any) -> None:
    omni = Omni(checkpoints["wan22_t2v"], device="emu", **STRATEGIES["layer"])
    with serving(omni, ServerSettings(max_steps=100_000)) as live, live.client() as client:
        words = {"prompt": "a red cube", "size": "32x32", "num_frames": 5, "num_inference_steps": 30_000}
        video = client.post("/v1/videos", json=words).json()
        clients = Clients(live.url)
        clients.listen("GET", f"/v1/videos/{video['id']}/events")
        until(lambda: bool(clients.events) and omni.status.running is not None)
    clients.join()
    assert clients.events[-1]["type"] == "video.failed" and clients.events[-1]["error"]["code"] == "shutting_down"


def test_a_step_that_does_not_end_keeps_nobody_waiting(emu: Any) -> None:
    omni = Omni(checkpoint_path(), device="emu", **STRATEGIES["layer"])
    with Blocked(omni):
        with running(omni, ServerSettings(shutdown_timeout=3), stops_within=20) as (url, _):
            clients = Clients(url)
            clients.post("picture", **BODY)
            clients.post("sleep", "/v1/sleep")
            clients.listen("POST", ROUTE, json={**BODY, "stream": True})
            until(lambda: omni.status.waiting == 2 and bool(clients.events))
        clients.join()
        clients.assert_told("picture", "sleep")
        assert clients.events[-1]["type"] == "error"
    assert omni.shutdown(timeout_s=10)


def test_half_a_body_is_told_that_the_server_is_gone(emu: Any) -> None:
    omni = Omni(checkpoint_path(), device="emu", **STRATEGIES["layer"])
    sent, go_on = threading.Event(), threading.Event()

    def pieces() -> Any:
        yield b'{"prompt": '
        sent.set()
        go_on.wait(30)

    answers: list[httpx.Response] = []
    with serving(omni, ServerSettings(shutdown_timeout=3)) as live:

        def post() -> None:
            answers.append(httpx.post(f"{live.url}{ROUTE}", content=pieces(), trust_env=False, timeout=60))

        thread = threading.Thread(target=post)
        thread.start()
        assert sent.wait(20)
    go_on.set()
    thread.join(30)
    assert [a.status_code for a in answers] == [503] and answers[0].json()["error"]["code"] == "shutting_down"


@pytest.mark.parametrize(
    "words",
    [pytest.param((), id="omni"), pytest.param(("--data-parallel-size", "2"), id="ranks", marks=pytest.mark.slow)],
)
def test_a_signal_ends_the_command(emu: Any, tmp_path: Path, words: tuple[str, ...]) -> None:
    output = tmp_path / "output"
    line = (str(checkpoint_path()), "--device", "emu", "--max-steps", "100000", *words)
    with command(*line, output=output) as (url, process):
        clients = Clients(url)
        for name in ("first", "second", "third"):
            clients.post(name, **LONG)
        until(lambda: httpx.get(f"{url}/health", trust_env=False).json()["waiting"] >= 1)
        offspring = process.children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        clients.join()
        clients.assert_told("first", "second", "third")
        until(lambda: not any(child.is_running() for child in offspring))
    assert "Traceback" not in output.read_text()


def test_a_second_signal_ends_the_command_at_once(emu: Any, tmp_path: Path) -> None:
    # One step of this takes far longer than anybody waits.
    words = {**BODY, "size": "1024x1024"}
    with command(str(checkpoint_path()), "--device", "emu") as (url, process):
        threading.Thread(target=_ignored, args=(url, words)).start()
        until(lambda: httpx.get(f"{url}/health", trust_env=False).json()["running"] is not None)
        process.send_signal(signal.SIGINT)
        until(lambda: _refuses(url))
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGINT


def _ignored(url: str, words: dict[str, Any]) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.post(f"{url}{ROUTE}", json=words, timeout=60, trust_env=False)


def _refuses(url: str) -> bool:
    return httpx.get(f"{url}/health", trust_env=False).status_code == 503
