"""Every supported architecture under every way of offloading: the same bits, within the plan, nothing left over."""

from __future__ import annotations

import functools
import gc
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch

import greenroom
from greenroom import testing

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WAYS: dict[str, dict[str, Any]] = {
    "model-level": {"config": {"mode": "module"}},
    "layerwise dit": {"config": {"mode": "layer", "components": ["dit"]}},
    "layerwise dit and text_encoder": {"config": {"mode": "layer", "components": ["dit", "text_encoder"]}},
}
CASES = [
    (name, way)
    for name in testing.ARCHITECTURES
    for way in WAYS
    if not (name == "cosmos3" and way == "layerwise dit and text_encoder")  # it has no text encoder
]


@dataclass(frozen=True)
class Plain:
    """The never-offloaded pipeline on the device: what it draws, and in bytes its weights, what it needs beside them,
    and what it keeps after the call (states of schedulers, tables that models remember)."""

    drawn: torch.Tensor
    weights: int
    activations: int
    kept: int


@functools.cache
def plain(name: str, dtype: str) -> Plain:
    pipe = testing.build_pipeline(name, dtype=DTYPES[dtype])
    gc.collect()
    before = torch.emu.memory_allocated()
    pipe.to("emu")
    weights = torch.emu.memory_allocated() - before
    torch.emu.reset_peak_memory_stats()
    drawn = testing.run(pipe, name)
    peak, after = torch.emu.max_memory_allocated() - before, torch.emu.memory_allocated() - before
    assert torch.equal(drawn, testing.run(testing.build_pipeline(name, dtype=DTYPES[dtype]), name))
    return Plain(drawn, weights, peak - weights, after - weights)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "way"), CASES)
def test_same_bits_within_the_plan(emu: ModuleType, matrix_cell: None, name: str, way: str, dtype: str) -> None:
    expected = plain(name, dtype)
    pipe = testing.build_pipeline(name, dtype=DTYPES[dtype])
    gc.collect()
    before = emu.memory_allocated()
    handle = greenroom.offload(pipe, **WAYS[way], device="emu")
    report = handle.report()
    for _ in range(2):
        emu.reset_peak_memory_stats()
        assert torch.equal(testing.run(pipe, name), expected.drawn)
        assert emu.max_memory_allocated() - before <= report.device_weights + expected.activations + expected.kept
    named = report.arena + sum(c.resident for c in report.components)
    assert emu.memory_allocated() - before <= named + expected.kept
    assert report.device_weights < expected.weights
    assert handle.report().copied > 0
    handle.disable()
    gc.collect()
    assert emu.memory_allocated() - before <= expected.kept


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "way"), [(name, "budget at half") for name in testing.ARCHITECTURES])
def test_same_bits_within_a_budget_for_half_the_weights(
    emu: ModuleType, forgotten_models: None, matrix_cell: None, name: str, way: str, dtype: str
) -> None:
    expected = plain(name, dtype)
    pipe = testing.build_pipeline(name, dtype=DTYPES[dtype])
    gc.collect()
    before = emu.memory_allocated()
    budget = before + expected.weights // 2 + expected.activations + expected.kept
    emu.set_capacity(budget)  # the device has no more: a call that needed more would fail
    handle = greenroom.offload(pipe, memory=budget, device="emu")
    for _ in range(3):
        assert torch.equal(testing.run(pipe, name), expected.drawn)
    assert handle.report().copied > 0
    handle.disable()
    gc.collect()
    assert emu.memory_allocated() - before <= expected.kept
