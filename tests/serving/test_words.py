"""What the words of a request may be: OpenAI's, null where nothing is said; and what is told of those that may not."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
from fastapi.testclient import TestClient
from live_server import Live
from test_http import BODY, ROUTE, drawn, png

from greenroom import ConfigError
from greenroom.serving import ServerSettings, create_app
from greenroom.serving.main import known_hosts

EDITS = "/v1/images/edits"
VIDEO = {"prompt": "a red cube", "size": "32x32", "num_frames": 5, "num_inference_steps": 2}


def refusal(answer: Any, status: int = 400) -> Any:
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


# ---------------------------------------------------------------------- OpenAI's words


def test_null_is_what_is_not_said(live: Live) -> None:
    fields = live.app.openapi()["paths"][ROUTE]["post"]["requestBody"]["content"]["application/json"]["schema"]
    nulls = {name: None for name in fields["properties"] if name not in BODY}
    assert {"n", "stream", "output_format", "size", "quality"} <= set(nulls)
    with live.client() as client:
        assert (drawn(client.post(ROUTE, json={**BODY, **nulls})) == drawn(client.post(ROUTE, json=BODY))).all()
        assert refusal(client.post(ROUTE, json={**BODY, "prompt": None}))["message"] == "prompt is missing"
        assert refusal(client.post(ROUTE, json={**BODY, "sed": None}))["param"] == "sed"


@pytest.mark.parametrize("partial", [0, 1, 3])
def test_openais_client_streams_with_partial_images(live: Live, partial: int) -> None:
    events = live.openai().images.generate(
        prompt="a seven", stream=True, partial_images=partial, extra_body={"num_inference_steps": 2}
    )
    kinds = [event.type for event in events]
    assert kinds[-1] == "image_generation.completed" and "image_generation.partial_image" not in kinds


def test_openais_words_are_taken_or_refused_and_never_ignored(live: Live) -> None:
    taken = {"quality": "high", "style": "vivid", "background": "opaque", "moderation": "low", "user": "me"}
    with live.client() as client:
        drawn(client.post(ROUTE, json={**BODY, **taken, "response_format": "b64_json"}))
        for field, value, told in (
            ("quality", "x", "'high'"),
            ("background", "transparent", '"opaque" and "auto"'),
            ("response_format", "url", '"b64_json"'),
            ("partial_images", 4, "3"),
            ("moderation", "high", "'low'"),
        ):
            error = refusal(client.post(ROUTE, json={**BODY, field: value}))
            assert error["param"] == field and told in error["message"], error


# ---------------------------------------------------------------------- what is told


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b'{"prompt": "x",}', "line 1, column"),
        (b"{", "line 1, column 2"),
        (b"", "line 1, column 1"),
        (b'{"prompt": "\xff"}', "byte 13 is not UTF-8"),
        (b'{"prompt": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"seed": NaN}', "NaN"),
        (b"[]", "not an object"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_body_that_is_no_json_is_told_where(live: Live, content: bytes, told: str) -> None:
    with live.client() as client:
        for route in (ROUTE, EDITS, "/v1/videos", "/v1/offload/memory"):
            error = refusal(client.post(route, content=content, headers={"Content-Type": "application/json"}))
            assert error["param"] is None and error["message"].startswith("the body is not"), error
            assert told in error["message"] and len(error["message"]) < 200


def test_an_unknown_field_is_told_with_those_that_are_accepted_here(live: Live) -> None:
    with live.client() as client:
        error = refusal(client.post(ROUTE, json={**BODY, "sed": 1}))
        assert error["param"] == "sed" and "did you mean seed" in error["message"]
        accepted = error["message"].partition("accepted: ")[2].split(", ")
        assert {"prompt", "seed", "size", "n", "num_inference_steps"} <= set(accepted)
        # The model draws from text: what it takes for edits only is not accepted here, and said so in the same way.
        refused = refusal(client.post(ROUTE, json={**BODY, "strength": 0.5}))
        assert refused["param"] == "strength" and refused["message"].startswith("strength = 0.5 is not accepted")
        assert refused["message"].partition("accepted: ")[2].split(", ") == accepted
        error = refusal(client.post(EDITS, files={"image": png()}, data={"prompt": "x", "sed": "1"}))
        assert {"image", "mask", "strength"} <= set(error["message"].partition("accepted: ")[2].split(", "))
        # Each field that is told of is taken, or at least known.
        for field in accepted:
            answer = client.post(ROUTE, json={**BODY, field: {}})
            assert "known field" not in refusal(answer)["message"]


@pytest.mark.parametrize(
    ("words", "field", "told"),
    [
        ({"size": "33x32"}, "size", "size = 33x32 is not accepted; accepted: for the width, multiples of 8"),
        ({"size": "32x33"}, "size", "for the height"),
        ({"width": 33}, "width", "width = 33"),
        ({"generator_device": "foo"}, "generator_device", '"cpu" or "emu"'),
    ],
)
def test_the_field_that_was_sent_is_named(live: Live, words: dict[str, Any], field: str, told: str) -> None:
    with live.client() as client:
        error = refusal(client.post(ROUTE, json={**BODY, **words}))
    assert error["param"] == field and told in error["message"], error


def test_a_strength_that_leaves_no_step_is_named(live: Live) -> None:
    with live.client() as client:
        error = refusal(client.post(EDITS, files={"image": png()}, data={"prompt": "x", "strength": "0"}))
    assert error["param"] == "strength"


@pytest.mark.parametrize("value", [None, True, [], {}])
def test_what_is_no_budget_is_told_with_what_is(live: Live, value: Any) -> None:
    with live.client() as client:
        error = refusal(client.post("/v1/offload/memory", json={"memory_budget": value}))
    assert error["param"] == "memory_budget" and '"12GiB"' in error["message"] and "integer" not in error["message"]


@pytest.mark.parametrize(
    ("words", "field", "told"),
    [
        ({"strength": 0.5}, "strength", "strength = 0.5"),
        ({"true_cfg_scale": 2}, "true_cfg_scale", "true_cfg_scale = 2"),
        ({"generator_device": "foo"}, "generator_device", '"foo"'),
        *(({"num_frames": n}, "num_frames", "such as 5 or 9") for n in (6, 7, 8)),
        ({"size": "33x32"}, "size", "33x32"),
    ],
)
def test_a_video_that_cannot_be_made_is_not_begun(start: Any, words: dict[str, Any], field: str, told: str) -> None:
    with start("wan22_t2v").client() as client:
        error = refusal(client.post("/v1/videos", json={**VIDEO, **words}))
        assert error["param"] == field and told in error["message"], error
        assert client.get("/v1/videos").json()["data"] == []


# ---------------------------------------------------------------------- files


def test_a_file_is_bytes_and_text_is_base64(live: Live) -> None:
    text = base64.b64encode(png())
    words = {"prompt": "a three", "num_inference_steps": "2"}
    with live.client() as client:
        for upload in (text, b"garbage", b"", b"data:image/png;base64," + text):
            error = refusal(client.post(EDITS, files={"image": ("in.png", upload)}, data=words))
            assert error["param"] == "image" and "is not a picture that can be read" in error["message"]
            assert "base64" not in error["message"] and "BytesIO" not in error["message"]
        drawn(client.post(EDITS, files={"image": ("in.png", io.BytesIO(png()))}, data=words))
        drawn(client.post(EDITS, data={**words, "image": text.decode()}))
        assert "base64" in refusal(client.post(EDITS, data={**words, "image": "garbage!"}))["message"]


# ---------------------------------------------------------------------- keys and names


@pytest.mark.parametrize("key", ["", "schlüssel", " open", "a\nb"])
def test_a_key_that_nobody_can_send_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=r"api_key = .* is not accepted") as refused:
        ServerSettings(api_key=key)
    assert key == "" or key not in str(refused.value)


def asked(settings: ServerSettings, host: str | None, origin: str | None = None) -> int:
    """What a request addressed to `host` is answered."""
    engine: Any = type(
        "Engine", (), {"model": "x", "figures": list, "cancel_swept": int, "shutdown": lambda *_: True}
    )()
    headers = {k: v for k, v in (("Host", host), ("Origin", origin)) if v is not None}
    client = TestClient(create_app(engine, settings), base_url="http://127.0.0.1:8131")
    return int(client.get("/v1/models", headers=headers).status_code)


def test_only_names_of_this_machine_are_answered_where_no_key_is_asked_for() -> None:
    local = known_hosts(ServerSettings(), "127.0.0.1")
    for host in ("localhost", "localhost:8131", "LOCALHOST:1", "127.0.0.1:8131", "[::1]:8131"):
        assert asked(local, host) == 200, host
    for host in ("evil.example:8131", "127.0.0.1.evil.example", "localhost.evil.example", "x:y:z", "[", ""):
        assert asked(local, host, origin=f"http://{host}") == 403, host


def test_further_names_are_allowed_by_name() -> None:
    behind = known_hosts(ServerSettings(allowed_hosts=("pictures.example",)), "127.0.0.1")
    assert (
        asked(behind, "pictures.example") == asked(behind, "Pictures.Example:443") == asked(behind, "localhost") == 200
    )
    assert asked(behind, "evil.example") == 403
    public = known_hosts(ServerSettings(allowed_hosts=("pictures.example",)), "0.0.0.0")
    assert asked(public, "pictures.example") == 200 and asked(public, "evil.example") == 403


@pytest.mark.parametrize(
    ("settings", "host"),
    [
        (ServerSettings(), "0.0.0.0"),
        (ServerSettings(api_key="a key"), "127.0.0.1"),
        (ServerSettings(allowed_hosts=("*",)), "127.0.0.1"),
    ],
    ids=["another address", "a key", "any"],
)
def test_any_name_is_answered_elsewhere(settings: ServerSettings, host: str) -> None:
    assert known_hosts(settings, host).allowed_hosts is None
