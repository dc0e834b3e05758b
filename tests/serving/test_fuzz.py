"""Random requests after the server's own OpenAPI schema: refused or served, never a 500."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from live_server import Live

from greenroom.bounds import MAX_PIXELS
from greenroom.serving import ServerSettings

schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis")

# Restarting and sleeping are for operators; a sleeping server keeps every request waiting.
_SKIPPED = ("/v1/sleep", "/v1/restart", "/v1/offload/memory")
_QUIET = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "phases": (Phase.generate,),
    "derandomize": True,
    "database": None,
}
# Field -> what is quickly drawn, and the most that the server takes, which may well be drawn for minutes.
_DRAWN = {
    "num_inference_steps": (2, ServerSettings.max_steps),
    "num_frames": (5, ServerSettings.max_frames),
    "n": (1, ServerSettings.max_outputs),
    "height": (64, MAX_PIXELS),
    "width": (64, MAX_PIXELS),
}


def operations(live: Live) -> list[Any]:
    schema = schemathesis.openapi.from_dict(live.app.openapi())
    return [result.ok() for result in schema.get_all_operations() if result.ok().path not in _SKIPPED]


def calm(body: Any) -> Any:
    """The same request with little to compute, where it would be accepted at all."""
    if isinstance(body, dict):
        for name in ("size", "width", "height", "num_inference_steps", "num_frames", "seconds"):
            if body.get(name, 0) is None:  # a default, which is large
                del body[name]
        for name, (least, most) in _DRAWN.items():
            value = body.get(name)
            # JSON may write a whole number with a point; what is refused is left as it is.
            if isinstance(value, (int, float)) and least < value <= most and value == int(value):
                body[name] = least
        if "size" not in body and not {"width", "height"} & set(body):
            body["size"] = "32x32"
        body.setdefault("num_inference_steps", 2)
        if "fps" in body or "seconds" in body:
            body.setdefault("num_frames", 5)
    return body


def hammer(live: Live, examples: int) -> dict[int, int]:
    """Sends `examples` random cases to each route; returns how often each status came."""
    statuses: dict[int, int] = {}
    with live.client() as client:
        for operation in operations(live):

            @settings(max_examples=examples, **_QUIET)  # type: ignore[arg-type]
            @given(case=operation.as_strategy())
            def one(case: Any) -> None:
                case.body = calm(case.body)
                answer = case.call(base_url=live.url, timeout=60)  # a valid request may well draw for a while
                statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
                assert answer.status_code < 500, (case.as_curl_command(), answer.text)
                if answer.status_code >= 400:
                    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

            one()
        assert client.get("/health").status_code == 200
    return statuses


def test_no_500_for_pictures(live: Live) -> None:
    statuses = hammer(live, 8)
    assert 200 in statuses and 400 in statuses


def test_no_500_for_videos(start: Any) -> None:
    statuses = hammer(start("wan22_t2v", "layer"), 8)
    assert 200 in statuses and 400 in statuses


@pytest.mark.slow
@pytest.mark.parametrize("model", ["demo", "wan22_t2v", "qwen_image"])
def test_no_500_in_many(start: Any, model: str) -> None:
    hammer(start(model, "layer"), 150)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
_FIELDS = ("prompt", "seed", "size", "n", "num_inference_steps", "guidance_scale", "negative_prompt", "true_cfg_scale")


_BODIES = st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=4)


def send_any_json(live: Live, examples: int) -> None:
    with live.client() as client:

        @settings(max_examples=examples, **_QUIET)  # type: ignore[arg-type]
        @given(body=_BODIES, route=st.sampled_from(("generations", "edits")))
        def one(body: dict[str, Any], route: str) -> None:
            words = calm(dict(body))
            answer = client.post(f"/v1/images/{route}", content=json.dumps(words, ensure_ascii=True).encode())
            assert answer.status_code < 500, (words, answer.text)

        one()


def test_no_500_for_any_json(live: Live) -> None:
    send_any_json(live, 60)


@pytest.mark.slow
def test_no_500_for_much_json(live: Live) -> None:
    send_any_json(live, 600)


def test_the_schema_describes_every_route(live: Live) -> None:
    paths = live.app.openapi()["paths"]
    for path in (
        "/v1/images/generations", "/v1/images/edits", "/v1/videos", "/v1/videos/{video_id}",
        "/v1/videos/{video_id}/content", "/v1/models", "/health", "/metrics", "/v1/offload", "/v1/offload/memory",
        "/v1/sleep", "/v1/wake", "/v1/restart",
    ):  # fmt: skip
        assert path in paths
    body = paths["/v1/images/generations"]["post"]["requestBody"]["content"]["application/json"]
    fields = body["schema"]["properties"]
    assert {"prompt", "seed", "num_inference_steps", "negative_prompt", "true_cfg_scale", "size"} <= set(fields)
