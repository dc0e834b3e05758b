"""What the server promises beside pictures: refusals by name, limits, a bounded queue, cancellation, recovery."""

from __future__ import annotations

import base64
import contextlib
import http.client
import io
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from live_server import STRATEGIES, Live, serving, until
from PIL import Image
from starlette.datastructures import UploadFile

from greenroom import Omni
from greenroom.demo import checkpoint_path
from greenroom.serving import ServerSettings

BODY = {"prompt": "a handwritten seven", "seed": 7, "num_inference_steps": 3}
ROUTE = "/v1/images/generations"


def drawn(answer: httpx.Response) -> np.ndarray:
    assert answer.status_code == 200, answer.text
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"]))))


def png(side: int = 32) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (side, side), (20, 90, 160)).save(out, "PNG")
    return out.getvalue()


@pytest.fixture
def own(emu: Any) -> Iterator[Callable[..., Live]]:
    """Starts a server of the test's own, with its own limits."""
    with contextlib.ExitStack() as stack:

        def begin(*, max_queue: int = 2, **settings: Any) -> Live:
            omni = Omni(checkpoint_path(), device="emu", max_queue=max_queue, **STRATEGIES["layer"])
            return stack.enter_context(serving(omni, ServerSettings(shutdown_timeout=5, **settings)))

        yield begin


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": "  "}, "prompt"),
        ({"prompt": "x" * 9000}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"unheard_of": 1}, "unheard_of"),
        ({"size": "32"}, "size"),
        ({"size": "32x32", "width": 64}, "size"),
        ({"size": "0x0"}, "size"),
        ({"size": "32x0"}, "size"),
        ({"n": True}, "n"),
        ({"seed": True}, "seed"),
        ({"guidance_scale": False}, "guidance_scale"),
        ({"size": "8192x8192"}, "size"),
        ({"height": 33}, "height"),
        ({"height": 0}, "height"),
        ({"width": -16}, "width"),
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"num_inference_steps": 100000}, "num_inference_steps"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"guidance_scale": "much"}, "guidance_scale"),
        ({"guidance_scale": -1}, "guidance_scale"),
        ({"guidance_scale_2": 1.0}, "guidance_scale_2"),
        ({"n": 0}, "n"),
        ({"n": 99}, "n"),
        ({"response_format": "url"}, "response_format"),
        ({"output_format": "tiff"}, "output_format"),
        ({"generator_device": "cuda"}, "generator_device"),
        ({"strength": 0.5}, "strength"),
        ({"max_sequence_length": 4096}, "max_sequence_length"),
        ({"model": "another"}, "model"),
    ],
)
def test_wrong_input_is_refused_by_field(live: Live, change: dict[str, Any], field: str) -> None:
    body = {k: v for k, v in {**BODY, **change}.items() if v is not None}
    with live.client() as client:
        answer = client.post(ROUTE, json=body)
        error = answer.json()["error"]
        assert 400 <= answer.status_code < 500 and error["param"] == field and field in error["message"]
        assert drawn(client.post(ROUTE, json=BODY)).shape == (32, 32, 3)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'{"prompt": NaN}', b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_json_object_is_refused(live: Live, content: bytes) -> None:
    with live.client() as client:
        for route in (ROUTE, "/v1/images/edits", "/v1/videos", "/v1/offload/memory"):
            answer = client.post(route, content=content, headers={"Content-Type": "application/json"})
            assert 400 <= answer.status_code < 500 and "error" in answer.json(), answer.text


@pytest.mark.parametrize(
    ("files", "data", "field"),
    [
        ({}, {}, "image"),
        ({"image": b"no picture"}, {}, "image"),
        ({"image": png()[:60]}, {}, "image"),
        ({"image": png(), "mask": b"no picture"}, {}, "mask"),
        ({"image": png()}, {"strength": "2"}, "strength"),
        ({"image": png()}, {"bogus": "1"}, "bogus"),
        ({"picture": png()}, {}, "picture"),
        ({}, {"image": "http://127.0.0.1:1/x.png"}, "image"),
    ],
)
def test_wrong_edits_are_refused_by_field(live: Live, files: Any, data: Any, field: str) -> None:
    with live.client() as client:
        answer = client.post(
            "/v1/images/edits",
            files={
                **{k: (None, v) for k, v in {"prompt": "a three", **data}.items()},
                **{k: ("f", v) for k, v in files.items()},
            },
        )
        assert answer.status_code == 400 and answer.json()["error"]["param"] == field, answer.text


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("size", "4096x4096", "--max-pixels"),
        ("num_inference_steps", 201, "--max-steps"),
    ],
)
def test_a_limit_is_told_by_its_flag(live: Live, field: str, value: Any, flag: str) -> None:
    with live.client() as client:
        message = client.post(ROUTE, json={**BODY, field: value}).json()["error"]["message"]
    assert message.startswith(f"{field} = {value}") and flag in message and "at most" in message


@pytest.mark.parametrize("image", [None, {"url": "x"}, [1, 2], 7, True, "", []])
def test_what_is_no_picture_in_json_is_refused(live: Live, image: Any) -> None:
    with live.client() as client:
        answer = client.post("/v1/images/edits", json={"prompt": "x", "image": image})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "image"


def test_pictures_that_a_pipeline_takes_for_several_requests_are_refused(live: Live) -> None:
    with live.client() as client:
        answer = client.post(
            "/v1/images/edits",
            files=[("image[]", ("a.png", png())), ("image[]", ("b.png", png()))],
            data={"prompt": "a three", "num_inference_steps": "3"},
        )
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "image", answer.text
        assert drawn(client.post(ROUTE, json=BODY)).shape == (32, 32, 3)


def test_half_a_character_is_refused_wherever_it_stands(live: Live) -> None:
    with live.client() as client:
        for body in (b'{"prompt": "\\ud800"}', b'{"prompt": "x", "\\ud800": 1}', b'{"prompt": "x", "seed": "\\ud800"}'):
            answer = client.post(ROUTE, content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_a_connection_outlives_an_error(live: Live) -> None:
    """One connection throughout: a client that reuses it must not find it closed behind a 500."""
    address = live.url.removeprefix("http://").split(":")
    handle = live.omni.pipeline.transformer.transformer_blocks[0].register_forward_pre_hook(_planted)
    connection = http.client.HTTPConnection(address[0], int(address[1]), timeout=30)
    try:
        for expected in (500, 500):
            connection.request("POST", ROUTE, json.dumps(BODY), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == expected and "planted" in json.loads(answer.read())["error"]["message"]
            assert not answer.will_close
            sock = connection.sock
        connection.request("HEAD", "/health")
        assert connection.getresponse().status == 200 and connection.sock is sock
    finally:
        handle.remove()
        connection.close()


@pytest.mark.parametrize(
    "data",
    [
        b"GET",
        b"\x00\xff" * 100,
        b"POST /v1/images/generations HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{",
        b"POST /v1/images/edits HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc",
        b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 100_000 + b"\r\n\r\n",
    ],
)
def test_half_a_request_harms_nobody(live: Live, data: bytes) -> None:
    address = live.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1]))) as half, contextlib.suppress(ConnectionError):
        half.sendall(data)
    with live.client() as client:
        assert client.get("/health").status_code == 200
        assert drawn(client.post(ROUTE, json=BODY)).shape == (32, 32, 3)


def test_edits_take_json_and_masks(live: Live) -> None:
    image = base64.b64encode(png()).decode()
    body = {"prompt": "a three", "seed": 1, "num_inference_steps": 4, "strength": 0.9, "image": image}
    with live.client() as client:
        plain = drawn(client.post("/v1/images/edits", json=body))
        masked = drawn(client.post("/v1/images/edits", json={**body, "mask": f"data:image/png;base64,{image}"}))
        assert plain.shape == masked.shape == (32, 32, 3)


@pytest.mark.parametrize("format", ["png", "jpeg", "webp"])
def test_output_formats(live: Live, format: str) -> None:
    with live.client() as client:
        answer = client.post(ROUTE, json={**BODY, "output_format": format}).json()
    assert Image.open(io.BytesIO(base64.b64decode(answer["data"][0]["b64_json"]))).format == format.upper()


def test_pictures_are_no_videos(live: Live) -> None:
    with live.client() as client:
        assert client.post("/v1/videos", json={"prompt": "x"}).status_code == 400
        assert client.get("/v1/videos").json()["data"] == []
        for method, path in (("GET", ""), ("GET", "/content"), ("GET", "/events"), ("DELETE", "")):
            assert client.request(method, f"/v1/videos/none{path}").status_code == 404
        assert client.get("/v1/nothing").json()["error"]["type"] == "invalid_request_error"
        assert client.put(ROUTE).status_code == 405


def test_a_key_is_asked_for_everywhere_but_at_the_door(own: Any) -> None:
    live = own(api_key="open sesame")
    with live.client() as client:
        assert client.get("/health").status_code == 200 and client.get("/").status_code == 200
        for path in ("/v1/models", "/v1/offload", "/v1/offload/live", "/metrics"):
            assert client.get(path).status_code == 401
            assert client.get(path, headers={"Authorization": "Bearer wrong"}).status_code == 401
            assert client.get(path, headers={"Authorization": "Bearer open sesame"}).status_code == 200
        assert client.post(ROUTE, json=BODY).status_code == 401
    assert live.openai("open sesame").models.list().data


def test_pages_of_other_sites_may_not_post(live: Live) -> None:
    with live.client() as client:
        assert client.post("/v1/sleep", headers={"Origin": "http://evil.example"}).status_code == 403
        assert client.get("/health", headers={"Origin": "http://evil.example"}).status_code == 200
        assert client.post(ROUTE, json=BODY, headers={"Origin": live.url}).status_code == 200


def test_bodies_have_a_limit(own: Any) -> None:
    live = own(max_body=10_000)

    def pieces() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(100):
            yield b"x" * 1000

    with live.client() as client:
        assert client.post(ROUTE, content=b"x" * 20_000).status_code == 413
        assert client.post(ROUTE, content=pieces()).status_code == 413
        assert client.post(ROUTE, json=BODY).status_code == 200


class Blocked:
    """Keeps the worker from taking requests until the block ends."""

    def __init__(self, omni: Omni) -> None:
        self._event = threading.Event()
        omni._worker.order(lambda: self._event.wait(30))

    def __enter__(self) -> Blocked:
        return self

    def __exit__(self, *exc: object) -> None:
        self._event.set()


def test_the_queue_is_bounded(own: Any) -> None:
    live = own(max_queue=2)
    answers: list[httpx.Response] = []

    def post() -> None:
        with live.client() as client:
            answers.append(client.post(ROUTE, json=BODY))

    threads = [threading.Thread(target=post) for _ in range(5)]
    with Blocked(live.omni):
        for thread in threads:
            thread.start()
        until(lambda: len(answers) == 3)
        assert live.omni.status.waiting == 2
        assert [a.status_code for a in answers] == [429] * 3
        assert all(int(a.headers["Retry-After"]) >= 1 for a in answers)
        assert answers[0].json()["error"]["type"] == "rate_limit_error"
    for thread in threads:
        thread.join()
    assert sorted(a.status_code for a in answers) == [200, 200, 429, 429, 429]


def test_a_client_that_goes_away_frees_its_place(own: Any) -> None:
    live = own(max_queue=1)
    with Blocked(live.omni):
        with live.client() as client, pytest.raises(httpx.ReadTimeout):
            client.post(ROUTE, json=BODY, timeout=0.3)
        until(lambda: live.omni.status.waiting == 0)
    with live.client() as client:
        first = drawn(client.post(ROUTE, json=BODY))
        with pytest.raises(httpx.ReadTimeout):
            client.post(ROUTE, json={**BODY, "num_inference_steps": 200}, timeout=0.5)
        until(lambda: live.omni.status.running is None, 3)
        with client.stream("POST", ROUTE, json={**BODY, "num_inference_steps": 200, "stream": True}) as answer:
            assert next(answer.iter_lines()).startswith("event: ")
        until(lambda: live.omni.status.running is None, 3)
        assert np.array_equal(drawn(client.post(ROUTE, json=BODY)), first)


def test_a_request_has_a_time_limit(own: Any) -> None:
    live = own(request_timeout=0.3)
    with live.client() as client:
        answer = client.post(ROUTE, json={**BODY, "num_inference_steps": 200})
        assert answer.status_code == 408 and answer.json()["error"]["code"] == "timeout"
        with Blocked(live.omni):
            assert client.post(ROUTE, json=BODY).status_code == 408
        assert drawn(client.post(ROUTE, json=BODY)).shape == (32, 32, 3)


def test_health_turns_red_with_the_worker_and_green_again(own: Any) -> None:
    live = own()
    with live.client() as client:
        first = drawn(client.post(ROUTE, json=BODY))

        def die() -> None:
            raise SystemExit("killed")

        live.omni._worker.order(die)
        until(lambda: not live.omni.status.alive)
        health = client.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "dead" and "killed" in health.json()["cause"]
        assert client.get("/metrics").text.count("greenroom_worker_alive 0.0") == 1
        refused = client.post(ROUTE, json=BODY)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "worker_dead"
        assert client.post("/v1/restart").json() == {"status": "ok"}
        assert client.get("/health").status_code == 200
        assert np.array_equal(drawn(client.post(ROUTE, json=BODY)), first)


def test_injected_faults_harm_one_request_at_most(own: Any, emu: Any) -> None:
    live = own()
    block = live.omni.pipeline.transformer.transformer_blocks[0]
    with live.client() as client:
        first = drawn(client.post(ROUTE, json=BODY))
        emu.fail_allocation(30)
        assert np.array_equal(drawn(client.post(ROUTE, json=BODY)), first)
        handle = block.register_forward_pre_hook(_planted)
        failed = client.post(ROUTE, json=BODY)
        handle.remove()
        assert failed.status_code == 500 and failed.json()["error"]["type"] == "server_error"
        assert np.array_equal(drawn(client.post(ROUTE, json=BODY)), first)
        assert client.get("/health").status_code == 200


def _planted(module: Any, args: Any) -> None:
    raise RuntimeError("planted")


def test_what_does_not_fit_is_told_with_what_would(own: Any, emu: Any) -> None:
    live = own()
    with live.client() as client:
        peak = client.post(ROUTE, json=BODY).json()["metrics"]["peak_bytes"]
        emu.set_capacity(peak + 200_000)
        answer = client.post(ROUTE, json={**BODY, "size": "512x512"})
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "does_not_fit"
        assert "32x32" in answer.json()["error"]["message"]
        assert client.post(ROUTE, json=BODY).status_code == 200


def test_what_the_budget_cannot_hold_is_told_with_what_would(emu: Any) -> None:
    omni = Omni(checkpoint_path(), device="emu", memory_budget=6 * 2**20 + emu.memory_allocated())
    with serving(omni) as live, live.client() as client:
        first = drawn(client.post(ROUTE, json=BODY))
        error = client.post(ROUTE, json={**BODY, "size": "640x480"})
        assert error.status_code == 400 and error.json()["error"]["code"] == "does_not_fit"
        assert "memory budget" in error.json()["error"]["message"] and "32x32" in error.json()["error"]["message"]
        assert np.array_equal(drawn(client.post(ROUTE, json=BODY)), first)


def test_sleep_and_wake(own: Any, emu: Any) -> None:
    live = own()
    with live.client() as client:
        first = drawn(client.post(ROUTE, json=BODY))
        awake = emu.memory_allocated()

        def resident() -> float:
            (line,) = (x for x in client.get("/metrics").text.splitlines() if x.startswith("greenroom_resident_bytes "))
            return float(line.split()[1])

        before = resident()
        assert client.post("/v1/sleep").json() == {"status": "asleep"}
        assert emu.memory_allocated() < awake
        assert client.get("/health").json()["status"] == "asleep"
        assert client.get("/v1/offload").json()["asleep"] is True
        assert resident() == 0
        assert client.post("/v1/wake").json() == {"status": "ok"}
        assert resident() == before > 0
        assert np.array_equal(drawn(client.post(ROUTE, json=BODY)), first)


def test_sleep_waits_for_the_running_request_and_operators_keep_nobody_waiting(own: Any) -> None:
    live = own(max_queue=4)
    answers: dict[str, httpx.Response] = {}

    def post(name: str, path: str, **body: Any) -> threading.Thread:
        def ask() -> None:
            with live.client() as client:
                answers[name] = client.post(path, json=body)

        thread = threading.Thread(target=ask)
        thread.start()
        return thread

    with live.client() as client:
        first = drawn(client.post(ROUTE, json=BODY))
        with Blocked(live.omni):
            # Many more than there are threads for encoding pictures.
            threads = [post(f"memory {i}", "/v1/offload/memory", memory_budget="1GiB") for i in range(40)]
            threads.append(post("sleep", "/v1/sleep"))
            time.sleep(0.3)
            refused = client.post("/v1/images/edits", files={"image": b"no picture"}, data={"prompt": "x"}, timeout=5)
            assert refused.status_code == 400
            assert client.get("/health", timeout=5).status_code == 200
        for thread in threads:
            thread.join(60)
        assert answers["sleep"].status_code == 200 and client.get("/health").json()["status"] == "asleep"
        waiting = post("waiting", ROUTE, **BODY)
        until(lambda: live.omni.status.waiting == 1)
        assert client.post("/v1/offload/memory", json={"memory_budget": "1GiB"}).status_code == 400
        assert client.get("/v1/offload").json()["report"]["asleep"] is True
        assert client.post("/v1/restart").json() == {"status": "ok"}  # the worker lives: nothing to do
        assert client.post("/v1/wake").status_code == 200
        waiting.join(60)
        assert np.array_equal(drawn(answers["waiting"]), first)


def test_the_report_and_the_metrics(own: Any) -> None:
    live = own()
    with live.client() as client:
        client.post(ROUTE, json=BODY)
        client.post(ROUTE, json={**BODY, "height": 33})
        report = client.get("/v1/offload").json()
        assert report["offloaded"] and report["report"]["strategy"] == "layerwise" and report["report"]["pinned"] > 0
        assert {c["name"] for c in report["report"]["components"]} >= {"transformer", "text_encoder", "vae"}
        assert report["loading"]["components"]
        text = client.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values['greenroom_requests_total{kind="image",outcome="completed"}']) == 1
    assert float(values['greenroom_requests_total{kind="image",outcome="refused"}']) == 1
    assert float(values['greenroom_copied_bytes_total{direction="to_device"}']) > 1_000_000
    assert float(values['greenroom_copied_bytes_total{direction="from_device"}']) == 32 * 32 * 3
    assert float(values["greenroom_pinned_bytes"]) == report["report"]["pinned"]
    assert float(values["greenroom_steps_total"]) == 3
    assert float(values['greenroom_phase_seconds_count{phase="denoise"}']) == 1


def test_files_of_a_form_are_closed_when_they_were_read(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str | None] = []
    close = UploadFile.close

    async def noted(file: UploadFile) -> None:
        closed.append(file.filename)
        await close(file)

    monkeypatch.setattr(UploadFile, "close", noted)
    with live.client() as client:
        for field in ("image", "picture"):  # the second is refused before it is read
            answer = client.post("/v1/images/edits", files={field: (f"{field}.png", b"no")}, data={"prompt": "x"})
            assert answer.status_code == 400
    assert closed == ["image.png", "picture.png"]
