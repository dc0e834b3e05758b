"""Ways of offloading that every test of use runs under, and the comparison with a pipeline that is not offloaded."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from diffusers import ControlNetModel, StableDiffusionXLControlNetPipeline
from diffusers.pipelines.pipeline_utils import DiffusionPipeline

import greenroom
from greenroom import testing

WAYS: dict[str, dict[str, Any]] = {
    "model-level": {"config": {"mode": "module", "components": ["dit", "text_encoder", "vae"]}},
    "layerwise": {"config": {"mode": "layer", "components": ["dit", "text_encoder"]}},
    "layerwise with residents": {
        "config": {"mode": "layer", "components": ["dit"], "layer_options": {"dit": {"resident_layers": 2}}}
    },
    "budget": {},
}
every_way = pytest.mark.parametrize("way", WAYS)


def words_for(pipe: Any, way: str) -> dict[str, Any]:
    """What to say to `greenroom.offload` for `way`; the budget is half of the weights beside what is there now."""
    words = dict(WAYS[way])
    if way == "budget":
        tensors = [t for c in modules(pipe) for t in (*c.parameters(), *c.buffers())]
        words["memory"] = torch.emu.memory_allocated() + sum(t.nbytes for t in tensors) // 2 + 2**20
    config = words.get("config")
    components = getattr(pipe, "components", {})
    if config and not any(k.startswith("text_encoder") and v is not None for k, v in components.items()):
        words["config"] = {**config, "components": [c for c in config["components"] if c != "text_encoder"]}
    return words


def offload(pipe: Any, way: str) -> greenroom.Handle:
    return greenroom.offload(pipe, **words_for(pipe, way), device="emu")


def draw(pipe: DiffusionPipeline, seed: int = 0, **call: Any) -> torch.Tensor:
    """All that a call makes, on the CPU as one flat tensor, with a fresh seeded CPU generator."""
    call = {"output_type": "pt", "generator": torch.Generator("cpu").manual_seed(seed), **call}
    made = pipe(**call, return_dict=False)
    return torch.cat([_flat(part) for part in made if part is not None])


def _flat(made: Any) -> torch.Tensor:
    if isinstance(made, torch.Tensor):
        return made.detach().flatten().float().cpu()
    if isinstance(made, list | tuple):
        parts = [_flat(m) for m in made if m is not None]
        return torch.cat(parts) if parts else torch.empty(0)
    return torch.as_tensor(made).flatten().float()


_told: dict[str, list[torch.Tensor]] = {}


def as_told_plainly(
    build: Callable[[], Any], story: Callable[[Any], Iterator[torch.Tensor]], way: str
) -> list[torch.Tensor]:
    """What `story` yields without an offload; told once for all ways of one test."""
    test = os.environ["PYTEST_CURRENT_TEST"].replace(way, "")
    if test not in _told:
        _told[test] = list(story(build()))
    return _told[test]


def same_story(
    build: Callable[[], Any], story: Callable[[Any], Iterator[torch.Tensor]], way: str, chapters: int | None = None
) -> greenroom.Handle:
    """Tells `story` to a plain pipeline and to an offloaded one; what they yield must be equal, bit by bit.

    Afterwards the offload is disabled, and nothing may be left on the device or page-locked.
    """
    gc.collect()
    allocated, pinned = torch.emu.memory_allocated(), torch.emu.pinned_stats()["current"]
    expected = as_told_plainly(build, story, way)
    assert chapters is None or len({bytes(e.numpy()) for e in expected}) == chapters  # the story tells apart
    pipe = build()
    handle = offload(pipe, way)
    for number, found in enumerate(story(pipe)):
        assert torch.equal(found, expected[number]), f"chapter {number}"
    assert handle.enabled
    handle.disable()
    moved = [n for c in modules(pipe) for n, t in c.named_parameters() if t.device.type != "cpu"]
    assert not moved
    del pipe
    gc.collect()
    assert torch.emu.pinned_stats()["current"] == pinned
    assert torch.emu.memory_allocated() - allocated < 2**20
    return handle


def modules(pipe: Any) -> list[torch.nn.Module]:
    return [c for c in pipe.components.values() if isinstance(c, torch.nn.Module)]


def builder(name: str, dtype: torch.dtype = torch.float32) -> Callable[[], Any]:
    return lambda: testing.build_pipeline(name, dtype=dtype)


def controlled(base: Any) -> Any:
    """A ControlNet pipeline around the components of an SDXL pipeline."""
    torch.manual_seed(4)
    net = ControlNetModel.from_unet(base.unet, conditioning_embedding_out_channels=(4, 8, 8, 8)).eval()
    testing.randomise(net, seed=9)
    pipe = StableDiffusionXLControlNetPipeline(**base.components, controlnet=net, add_watermarker=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def runner(name: str) -> Callable[..., torch.Tensor]:
    def run(pipe: Any, seed: int = 0, **call: Any) -> torch.Tensor:
        return draw(pipe, seed, **{**testing.call_kwargs(name), "generator": _generator(seed), **call})

    return run


def _generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)
