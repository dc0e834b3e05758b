"""OpenAI's own client against a live server: same bits as Omni and as the pipeline that was never offloaded."""

from __future__ import annotations

import base64
import io
import time
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from greenroom import testing
from greenroom.engine.media import write_video

MODELS = {
    "demo": {"num_inference_steps": 3},
    "qwen_image": {"height": 64, "width": 64, "num_inference_steps": 2},
    "wan22_t2v": {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 3},
}
PROMPT = "a handwritten seven"


def pixels(picture: Any) -> np.ndarray:
    return np.asarray(picture)


def decoded(item: Any) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(item.b64_json))))


@pytest.fixture(scope="module")
def reference(emu_module: Any, checkpoints: Any) -> Callable[..., list[Any]]:
    """What a pipeline that was never offloaded draws, and what its image-to-image sibling does."""
    made: dict[Any, list[Any]] = {}

    def draw(model: str, seed: int, image: Image.Image | None = None, **words: Any) -> list[Any]:
        key = (model, seed, image is None, tuple(words.items()))
        if key not in made:
            from diffusers import AutoPipelineForImage2Image, DiffusionPipeline

            dtype = torch.bfloat16 if model == "demo" else torch.float32
            with testing.quiet():
                pipe: Any = DiffusionPipeline.from_pretrained(checkpoints[model], dtype=dtype)
            if image is not None:
                pipe = AutoPipelineForImage2Image.from_pipe(pipe)
                words["image"] = image
            if model == "demo":
                words = {"height": 32, "width": 32, "max_sequence_length": 32, **words}
            pipe.set_progress_bar_config(disable=True)
            pipe.to("emu")
            generator = torch.Generator().manual_seed(seed)
            out = pipe(PROMPT, generator=generator, output_type="pil", **words)
            made[key] = out.images if hasattr(out, "images") else out.frames[0]
        return made[key]

    return draw


@pytest.mark.parametrize("strategy", ["resident", "module", "layer"])
@pytest.mark.parametrize("model", ["demo", "qwen_image"])
def test_generates_the_same_picture(start: Any, reference: Any, model: str, strategy: str) -> None:
    live = start(model, strategy)
    answer = live.openai().images.generate(prompt=PROMPT, extra_body={"seed": 11, **MODELS[model]})
    assert np.array_equal(decoded(answer.data[0]), pixels(reference(model, 11, **MODELS[model])[0]))
    again = live.omni.generate(PROMPT, {"seed": 11, **MODELS[model]}, progress=False)[0]
    assert np.array_equal(decoded(answer.data[0]), pixels(again.images[0]))


@pytest.mark.parametrize("strategy", ["resident", "module", "layer"])
@pytest.mark.parametrize("model", ["demo", "qwen_image"])
def test_edits_the_same_picture(start: Any, reference: Any, model: str, strategy: str) -> None:
    rng = np.random.default_rng(3)
    side = 32 if model == "demo" else 64
    image = Image.fromarray(rng.integers(0, 255, (side, side, 3), dtype=np.uint8))
    file = io.BytesIO()
    image.save(file, "PNG")
    words = {**MODELS[model], "num_inference_steps": 4, "strength": 0.6}
    answer = start(model, strategy).openai().images.edit(
        image=("in.png", file.getvalue(), "image/png"), prompt=PROMPT, extra_body={"seed": 4, **words}
    )  # fmt: skip
    assert np.array_equal(decoded(answer.data[0]), pixels(reference(model, 4, image, **words)[0]))


@pytest.mark.parametrize("strategy", ["resident", "module", "layer"])
def test_makes_the_same_video(start: Any, reference: Any, strategy: str) -> None:
    live = start("wan22_t2v", strategy)
    client = live.openai()
    words = {k: v for k, v in MODELS["wan22_t2v"].items() if k not in ("height", "width")}
    video = client.videos.create(prompt=PROMPT, size="32x32", extra_body={"seed": 2, **words})
    limit = time.monotonic() + 60
    while video.status in ("queued", "in_progress") and time.monotonic() < limit:
        time.sleep(0.05)
        video = client.videos.retrieve(video.id)
    assert video.status == "completed" and video.progress == 100, video.error
    frames = reference("wan22_t2v", 2, **MODELS["wan22_t2v"])
    archive = zipfile.ZipFile(io.BytesIO(live.client().get(f"/v1/videos/{video.id}/content?variant=frames").content))
    served = [pixels(Image.open(archive.open(n))) for n in archive.namelist()]
    assert len(served) == len(frames) == 5
    assert all(np.array_equal(a, pixels(b)) for a, b in zip(served, frames, strict=True))
    assert client.videos.download_content(video.id).read() == write_video(frames, 16)
    assert video.id in [v.id for v in client.videos.list().data]
    assert client.videos.delete(video.id).deleted
    assert video.id not in [v.id for v in client.videos.list().data]


def test_several_outputs_are_those_of_the_following_seeds(live: Any) -> None:
    both = live.openai().images.generate(prompt=PROMPT, n=2, extra_body={"seed": 5, **MODELS["demo"]})
    assert len(both.data) == 2 and not np.array_equal(decoded(both.data[0]), decoded(both.data[1]))


def test_lists_the_model(live: Any) -> None:
    client = live.openai()
    name = client.models.list().data[0].id
    assert client.models.retrieve(name).id == name
    assert client.images.generate(prompt=PROMPT, model=name, extra_body=MODELS["demo"]).data


def test_errors_have_openais_shape(live: Any) -> None:
    import openai

    with pytest.raises(openai.BadRequestError) as refused:
        live.openai().images.generate(prompt=PROMPT, extra_body={"sed": 1})
    assert refused.value.param == "sed" and refused.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as unknown:
        live.openai().images.generate(prompt=PROMPT, model="dall-e-9")
    assert unknown.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        live.openai().videos.retrieve("video_nothing")


def test_progress_is_streamed(live: Any) -> None:
    kinds, steps = [], []
    with live.client().stream(
        "POST", "/v1/images/generations", json={"prompt": PROMPT, "seed": 11, "stream": True, **MODELS["demo"]}
    ) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        import json

        for line in answer.iter_lines():
            if line.startswith("data: "):
                data = json.loads(line[6:])
                kinds.append(data["type"])
                steps.append(data.get("step"))
    assert kinds[-1] == "image_generation.completed" and kinds.count("image_generation.completed") == 1
    assert 3 in steps
