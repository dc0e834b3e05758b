"""The life of a video: made, followed, fetched, deleted, forgotten."""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from live_server import STRATEGIES, Live, serving, until
from PIL import Image
from test_http import Blocked, png

from greenroom import Omni
from greenroom.serving import ServerSettings, create_app

BODY = {"prompt": "a red cube rolls", "size": "32x32", "num_frames": 5, "num_inference_steps": 2, "seed": 3}


@pytest.fixture
def videos(start: Any) -> Live:
    return start("wan22_t2v", "layer")


def finished(client: Any, video_id: str) -> Any:
    until(lambda: client.get(f"/v1/videos/{video_id}").json()["status"] in ("completed", "failed"))
    return client.get(f"/v1/videos/{video_id}").json()


def test_progress_content_and_deletion(videos: Live) -> None:
    with videos.client() as client:
        video = client.post("/v1/videos", json=BODY).json()
        assert video["object"] == "video" and video["status"] in ("queued", "in_progress")
        kinds = []
        with client.stream("GET", f"/v1/videos/{video['id']}/events") as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    kinds.append(json.loads(line[6:])["type"])
        assert kinds[-1] == "video.completed" and "video.progress" in kinds
        done = client.get(f"/v1/videos/{video['id']}").json()
        assert done["progress"] == 100 and done["size"] == "32x32" and done["seed"] == 3
        assert done["metrics"]["steps"] == 2 and done["expires_at"] > done["completed_at"] - 1
        content = client.get(f"/v1/videos/{video['id']}/content")
        assert content.headers["content-type"] == "video/mp4" and content.content[4:8] == b"ftyp"
        thumbnail = client.get(f"/v1/videos/{video['id']}/content?variant=thumbnail").content
        assert Image.open(io.BytesIO(thumbnail)).size == (32, 32)
        assert client.get(f"/v1/videos/{video['id']}/content?variant=sprite").status_code == 400
        assert client.delete(f"/v1/videos/{video['id']}").json()["deleted"] is True
        assert client.get(f"/v1/videos/{video['id']}/content").status_code == 404


def test_a_deleted_video_is_cancelled(videos: Live) -> None:
    with videos.client() as client:
        video = client.post("/v1/videos", json={**BODY, "num_inference_steps": 200}).json()
        until(lambda: client.get(f"/v1/videos/{video['id']}").json()["status"] == "in_progress")
        assert client.get(f"/v1/videos/{video['id']}/content").status_code == 409
        client.delete(f"/v1/videos/{video['id']}")
        until(lambda: videos.omni.status.running is None, 5)
        assert finished(client, client.post("/v1/videos", json=BODY).json()["id"])["status"] == "completed"


def test_a_video_survives_a_client_that_stops_listening(videos: Live) -> None:
    with videos.client() as client:
        video = client.post("/v1/videos", json={**BODY, "num_inference_steps": 8}).json()
        with client.stream("GET", f"/v1/videos/{video['id']}/events") as answer:
            next(answer.iter_lines())
        assert finished(client, video["id"])["status"] == "completed"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"seconds": -1}, "seconds"),
        ({"seconds": "long"}, "seconds"),
        ({"seconds": 3600, "num_frames": None}, "num_frames"),
        ({"num_frames": 100_000}, "num_frames"),
        ({"fps": 0}, "fps"),
        ({"size": "33x32"}, "size"),
        ({"true_cfg_scale": 2}, "true_cfg_scale"),
        ({"strength": 0.5}, "strength"),
        ({"generator_device": "foo"}, "generator_device"),
        ({"input_reference": "aGVsbG8="}, "input_reference"),
    ],
)
def test_wrong_videos_are_refused_by_field(videos: Live, change: dict[str, Any], field: str) -> None:
    with videos.client() as client:
        answer = client.post("/v1/videos", json={**BODY, **change})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == field, answer.text


def test_a_reference_for_a_model_that_takes_none(videos: Live) -> None:
    with videos.client() as client:
        answer = client.post("/v1/videos", data={"prompt": "x"}, files={"input_reference": ("a.png", png())})
        assert answer.status_code == 400 and "takes no picture" in answer.json()["error"]["message"]


def test_seconds_and_frames(videos: Live) -> None:
    with videos.client() as client:
        words = {k: v for k, v in BODY.items() if k != "num_frames"}
        form = {k: (None, str(v)) for k, v in {**words, "seconds": 0.625, "fps": 8}.items()}
        made = client.post("/v1/videos", files=form)
        done = finished(client, made.json()["id"])
        assert done["status"] == "completed" and float(done["seconds"]) == 0.625


def test_pages_of_the_list(videos: Live) -> None:
    with videos.client() as client:
        ids = [finished(client, client.post("/v1/videos", json=BODY).json()["id"])["id"] for _ in range(3)]
        newest = client.get("/v1/videos?limit=2").json()
        assert [v["id"] for v in newest["data"]] == ids[:0:-1] and newest["has_more"]
        after = client.get(f"/v1/videos?limit=1&after={ids[1]}").json()["data"]
        assert after[0]["id"] == ids[0]
        assert client.get("/v1/videos?after=nothing").status_code == 404


def test_old_videos_are_cleaned_up_and_the_number_is_bounded(checkpoints: Any, emu: Any) -> None:
    omni = Omni(checkpoints["wan22_t2v"], device="emu", **STRATEGIES["layer"])
    settings = ServerSettings(shutdown_timeout=5, max_videos=2, video_lifetime=2)
    with serving(omni, settings) as live, live.client() as client:
        first = finished(client, client.post("/v1/videos", json=BODY).json()["id"])
        with Blocked(omni):
            codes = [client.post("/v1/videos", json=BODY).status_code for _ in range(3)]
        assert codes == [200, 200, 429]
        assert client.get(f"/v1/videos/{first['id']}").status_code == 404
        until(lambda: client.get("/v1/videos").json()["data"] == [], 20)


def test_a_request_that_is_refused_takes_nobodys_place(checkpoints: Any, emu: Any) -> None:
    omni = Omni(checkpoints["wan22_t2v"], device="emu", **STRATEGIES["layer"])
    with serving(omni, ServerSettings(shutdown_timeout=5, max_videos=1)) as live, live.client() as client:
        first = finished(client, client.post("/v1/videos", json=BODY).json()["id"])
        assert client.post("/v1/videos", json={**BODY, "size": "33x32"}).status_code == 400
        assert client.get(f"/v1/videos/{first['id']}/content").status_code == 200
        assert client.post("/v1/videos", json=BODY).status_code == 200
        assert client.get(f"/v1/videos/{first['id']}").status_code == 404


def test_a_dead_worker_fails_its_videos_by_name(checkpoints: Any, emu: Any) -> None:
    omni = Omni(checkpoints["wan22_t2v"], device="emu", **STRATEGIES["layer"])
    with serving(omni) as live, live.client() as client:
        with Blocked(omni):
            video = client.post("/v1/videos", json=BODY).json()

            def die() -> None:
                raise SystemExit("killed")

            omni._worker.order(die)
        failed = finished(client, video["id"])
        assert failed["status"] == "failed" and failed["error"]["code"] == "worker_dead"
        assert client.get(f"/v1/videos/{video['id']}/content").status_code == 400
        assert client.post("/v1/videos", json=BODY).status_code == 503


def test_a_video_that_takes_too_long_is_counted_as_a_picture_is(checkpoints: Any, emu: Any) -> None:
    omni = Omni(checkpoints["wan22_t2v"], device="emu", **STRATEGIES["layer"])
    settings = ServerSettings(shutdown_timeout=5, request_timeout=0.3)
    with serving(omni, settings) as live, live.client() as client:
        video = client.post("/v1/videos", json={**BODY, "num_inference_steps": 200}).json()
        failed = finished(client, video["id"])
        assert failed["status"] == "failed" and failed["error"]["code"] == "timeout"
        assert 'greenroom_requests_total{kind="video",outcome="timeout"} 1.0' in client.get("/metrics").text


def test_videos_are_deleted_even_where_the_engine_cannot_be_shut_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing:
        def shutdown(self, timeout_s: float) -> bool:
            raise RuntimeError("the device failed")

        def cancel_swept(self) -> None:
            pass

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    engine: Any = Failing()
    with pytest.raises(RuntimeError, match="the device failed"), TestClient(create_app(engine)):
        assert len(list(tmp_path.iterdir())) == 1
    assert not list(tmp_path.iterdir())
