"""Interruptions at awkward places, and what is left behind by verbs that users call."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import toys

import greenroom
from greenroom import testing

VERBS: dict[str, Callable[[Any], object]] = {
    "nothing": lambda handle: None,
    "set_memory": lambda handle: handle.set_memory(8_000_000),
    "sleep": lambda handle: (handle.sleep(), handle.wake()),
    "disable": lambda handle: handle.disable(),
}


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS.keys())
def test_no_verb_keeps_the_pipeline(emu: ModuleType, without_garbage_collection: None, verb: Any) -> None:
    before = emu.memory_allocated(), emu.pinned_stats()["current"]
    pipe = testing.build_pipeline("sdxl")
    handle = greenroom.offload(pipe, memory=9_000_000, device="emu")
    testing.run(pipe, "sdxl")
    verb(handle)
    alive = weakref.ref(pipe)
    del pipe, handle
    assert alive() is None
    assert (emu.memory_allocated(), emu.pinned_stats()["current"]) == before


def test_a_namespace_is_freed_with_its_last_reference(emu: ModuleType) -> None:
    before = emu.memory_allocated(), emu.pinned_stats()["current"]
    pipe = SimpleNamespace(transformer=toys.DiT().eval())
    handle = greenroom.offload(pipe, device="emu")
    x, context = toys.inputs()
    with torch.no_grad():
        pipe.transformer(x, context)
    alive = weakref.ref(pipe.transformer)
    del pipe, handle
    gc.collect()
    assert alive() is None
    assert (emu.memory_allocated(), emu.pinned_stats()["current"]) == before


def test_an_exchange_of_layouts_that_was_interrupted_is_made_whole(emu: ModuleType) -> None:
    """A copy fails while blocks make room for others: that call fails, and the next one is right."""
    small, large = {"height": 96, "width": 32}, {"height": 128, "width": 128}
    failed = 0

    def draw(pipe: Any, seed: int, size: dict[str, int]) -> torch.Tensor:
        made: torch.Tensor = pipe(**{**testing.call_kwargs("flux2", seed), **size}, return_dict=False)[0]
        return made.cpu()

    for k in range(1, 30, 4):
        pipe = testing.build_pipeline("flux2")
        handle = greenroom.offload(pipe, memory=5_548_660 + emu.memory_allocated(), device="emu")
        for seed in (2, 2):
            expected = draw(pipe, seed, small)
        others = torch.ones(131_200, device="emu")
        emu.fail_copy(k)
        try:
            draw(pipe, 1, large)
        except RuntimeError:
            failed += 1
        emu.fail_copy(None)
        for _ in range(2):
            assert torch.equal(draw(pipe, 2, small), expected)
        handle.disable()
        del pipe, handle, others
        gc.collect()
    assert failed


def test_what_comes_after_a_call_is_no_part_of_its_peak(emu: ModuleType) -> None:
    pipe = toys.Pipeline()
    handle = greenroom.offload(pipe, memory=emu.memory_allocated() + 2_000_000, device="emu")
    pipe("emu")
    peak = handle.report().latest_peak
    assert 0 < peak < 10_000_000
    others = torch.empty(10_000_000, dtype=torch.uint8, device="emu")
    del others
    assert handle.report().latest_peak == peak


@pytest.mark.parametrize("mode", ["module", "layer"])
def test_a_copy_that_fails_on_the_staging_thread_leaves_nothing(
    emu: ModuleType, without_garbage_collection: None, mode: str
) -> None:
    pipe = toys.Pipeline()
    expected = pipe()
    before = emu.memory_allocated(), emu.pinned_stats()["current"]
    for k in (2, 9):
        handle = greenroom.offload(pipe, {"mode": mode, "pin_memory": False}, device="emu")
        emu.fail_copy(k)
        with pytest.raises(RuntimeError, match="injected"):
            pipe("emu")
        emu.fail_copy(None)
        assert torch.equal(pipe("emu"), expected)
        handle.disable()
        assert (emu.memory_allocated(), emu.pinned_stats()["current"]) == before
