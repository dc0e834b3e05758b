"""torch.compile of blocks and of whole models: the same values, and no recompiles after warm-up.

On the emulated device by the backend aot_eager; with the host as the device by inductor.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
import torch._dynamo
import toys
from ways import runner

import greenroom
from greenroom import testing

pytestmark = pytest.mark.filterwarnings("ignore")
every_way = pytest.mark.parametrize("way", ["model-level", "layerwise", "layerwise with residents", "budget"])
when_compiled = pytest.mark.parametrize("when", ["before", "after"])


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def offload(pipe: Any, way: str, device: str = "emu") -> greenroom.Handle:
    if way == "budget":
        weights = sum(map(toys.nbytes, pipe.components.values()))
        return greenroom.offload(pipe, memory=torch.emu.memory_allocated() + weights // 2, device=device)
    return greenroom.offload(pipe, toys.EVERY[way], device=device)


def compile_blocks(pipe: Any, fullgraph: bool, backend: str = "aot_eager") -> None:
    for dit in (pipe.transformer, pipe.transformer_2):
        for block in (*dit.blocks, *dit.single_blocks):
            block.compile(backend=backend, fullgraph=fullgraph)


def frames() -> int:
    return torch._dynamo.utils.counters["frames"]["ok"]


def same_without_recompiles(pipe: Any, expected: list[torch.Tensor]) -> None:
    assert torch.equal(pipe("emu"), expected[0])
    before = frames()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in (1, 0, 1):
            assert torch.equal(pipe("emu", seed=seed), expected[seed])
    assert frames() == before


@pytest.mark.parametrize("fullgraph", [False, True], ids=["graph breaks", "full graph"])
@when_compiled
@every_way
def test_compiled_blocks(emu: ModuleType, way: str, when: str, fullgraph: bool) -> None:
    pipe = toys.Pipeline()
    expected = [pipe(seed=seed) for seed in (0, 1)]
    if when == "before":
        compile_blocks(pipe, fullgraph)
    handle = offload(pipe, way)
    if when == "after":
        assert torch.equal(pipe("emu"), expected[0])
        compile_blocks(pipe, fullgraph)
    for _ in range(2):  # a budget moves blocks after the first calls
        pipe("emu")
    assert frames() > 0
    same_without_recompiles(pipe, expected)
    handle.disable()
    assert torch.equal(pipe(), expected[0])
    assert all(b._compiled_call_impl is not None for b in pipe.transformer.blocks)


@pytest.mark.parametrize("whole", ["in place", "out of place"])
@when_compiled
@every_way
def test_a_compiled_model(emu: ModuleType, way: str, when: str, whole: str) -> None:
    pipe = toys.Pipeline()
    expected = [pipe(seed=seed) for seed in (0, 1)]

    def compile_model() -> None:
        for name in ("transformer", "transformer_2", "text_encoder"):
            if whole == "in place":
                getattr(pipe, name).compile(backend="aot_eager")
            else:
                setattr(pipe, name, torch.compile(getattr(pipe, name), backend="aot_eager"))

    if when == "before":
        compile_model()
    handle = offload(pipe, way)
    if when == "after":
        assert torch.equal(pipe("emu"), expected[0])
        compile_model()
    for _ in range(2):
        pipe("emu")
    same_without_recompiles(pipe, expected)
    if "layerwise" in way:
        dit = next(c for c in handle.report().components if c.name == "transformer")
        assert dit.streamed_blocks > 0
    handle.disable()
    assert torch.equal(pipe(), expected[0])


@pytest.mark.parametrize("way", ["model-level", "layerwise"])
def test_weights_edited_under_compiled_blocks(emu: ModuleType, way: str) -> None:
    """What is compiled holds no weights: an edit between two calls takes effect without a recompile."""
    pipe, plain = toys.Pipeline(), toys.Pipeline()
    compile_blocks(pipe, True)
    offload(pipe, way)
    pipe("emu")
    for each in (pipe, plain):
        with torch.no_grad():
            each.transformer.blocks[1].down.weight.mul_(0.5)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(pipe("emu"), plain())


@pytest.mark.slow
@when_compiled
def test_regional_compilation_by_inductor_with_the_host_as_the_device(when: str) -> None:
    run = runner("qwen_image")
    plain = testing.build_pipeline("qwen_image")
    plain.transformer.compile_repeated_blocks(fullgraph=True)
    expected = run(plain)
    torch._dynamo.reset()
    pipe = testing.build_pipeline("qwen_image")
    if when == "before":
        pipe.transformer.compile_repeated_blocks(fullgraph=True)
    greenroom.offload(pipe, {"mode": "layer", "components": ["dit", "text_encoder"]}, device="cpu")
    if when == "after":
        run(pipe)
        pipe.transformer.compile_repeated_blocks(fullgraph=True)
    assert torch.equal(run(pipe), expected)
    before = frames()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            assert torch.equal(run(pipe), expected)
    assert frames() == before
