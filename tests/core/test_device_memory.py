"""Memory is where we said it would be: on the device, pinned, and in which direction it moves."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
import toys
from torch import nn

import greenroom


class Big(toys.Pipeline):
    """Weights that dwarf the activations."""

    def __init__(self) -> None:
        super().__init__(blocks=12, single=4)


def resident_peak(emu: ModuleType, pipe: toys.Pipeline) -> tuple[int, int]:
    """Peak of the never-offloaded pipeline on the device, and its activations beside the weights."""
    for component in pipe.components.values():
        component.to("emu")
    weights = emu.memory_allocated()
    emu.reset_peak_memory_stats()
    pipe("emu")
    peak = emu.max_memory_allocated()
    for component in pipe.components.values():
        component.to("cpu")
    return peak, peak - weights


@pytest.mark.parametrize("config", [toys.MODEL_LEVEL, toys.LAYERWISE], ids=["model-level", "layerwise"])
def test_a_device_too_small_for_the_pipeline(emu: ModuleType, config: dict[str, Any]) -> None:
    pipe = Big()
    expected = pipe()
    peak, _ = resident_peak(emu, pipe)
    emu.set_capacity(int(peak * 0.6))
    with pytest.raises(torch.OutOfMemoryError):
        for component in pipe.components.values():
            component.to("emu")
        pipe("emu")
    for component in pipe.components.values():
        component.to("cpu")
    greenroom.offload(pipe, config, device="emu")
    assert torch.equal(pipe("emu"), expected)


def test_layerwise_peak(emu: ModuleType) -> None:
    pipe = Big()
    _, activations = resident_peak(emu, pipe)
    lists = (
        pipe.text_encoder.layers,
        pipe.text_encoder_2.layers,
        pipe.transformer.blocks,
        pipe.transformer.single_blocks,
        pipe.transformer_2.blocks,
        pipe.transformer_2.single_blocks,
    )
    blocks = [b for blocks in lists for b in blocks]
    outside = sum(toys.nbytes(c) for c in pipe.components.values()) - sum(map(toys.nbytes, blocks))
    handle = greenroom.offload(pipe, toys.LAYERWISE, device="emu")
    emu.reset_peak_memory_stats()
    for _ in range(2):
        pipe("emu")
    limit = outside + 2 * max(map(toys.nbytes, blocks)) + activations
    assert emu.max_memory_allocated() <= 1.01 * limit
    assert handle.report().device_weights + activations >= 0.99 * emu.max_memory_allocated()


def test_model_level_peak_is_the_largest_group(emu: ModuleType) -> None:
    pipe = Big()
    _, activations = resident_peak(emu, pipe)
    sizes = {name: toys.nbytes(c) for name, c in pipe.components.items()}
    encoders = sizes["text_encoder"] + sizes["text_encoder_2"]
    largest = max(encoders, sizes["transformer"], sizes["transformer_2"])
    handle = greenroom.offload(pipe, toys.MODEL_LEVEL, device="emu")
    pins = emu.pinned_stats()["count"]
    emu.synchronize()  # copies in flight are counted when they end
    emu.reset_counters()
    emu.reset_peak_memory_stats()
    for _ in range(2):
        pipe("emu")
    assert emu.max_memory_allocated() <= 1.01 * (largest + sizes["vae"] + activations)
    assert handle.report().device_weights + activations >= 0.99 * emu.max_memory_allocated()
    output = 6 * toys.WIDTH * 4
    assert emu.counters()["d2h_bytes"] == 2 * output  # the pictures and nothing else
    assert emu.counters()["pins"] == 0
    assert emu.pinned_stats()["count"] == pins


def test_what_takes_turns_leaves_at_the_end_of_the_call(emu: ModuleType) -> None:
    pipe = Big()
    greenroom.offload(pipe, toys.MODEL_LEVEL_VAE, device="emu")
    pipe("emu")
    assert emu.memory_allocated() < toys.nbytes(pipe.vae)


def test_a_second_call_in_a_row_moves_no_more_than_the_first(emu: ModuleType) -> None:
    pipe = Big()
    greenroom.offload(pipe, toys.MODEL_LEVEL, device="emu")
    pipe("emu")
    moved = []
    for _ in range(3):
        emu.synchronize()  # copies in flight are counted when they end
        emu.reset_counters()
        pipe("emu", steps=20)
        emu.synchronize()
        moved.append(emu.counters()["h2d_bytes"])
    weights = sum(toys.nbytes(c) for n, c in pipe.components.items() if n != "vae")
    assert moved[0] == moved[1] == moved[2] <= 1.05 * weights  # each component once a call, not once a step


@pytest.mark.parametrize("config", toys.EVERY.values(), ids=toys.EVERY.keys())
def test_memory_is_flat_over_many_calls(emu: ModuleType, config: dict[str, Any]) -> None:
    pipe = toys.Pipeline()
    greenroom.offload(pipe, config, device="emu")
    seen = []
    for _ in range(20):
        pipe("emu")
        emu.synchronize()
        seen.append((emu.memory_allocated(), emu.pinned_stats()["current"], emu.pinned_stats()["count"]))
    assert len(set(seen[1:])) == 1


def test_host_bytes(emu: ModuleType) -> None:
    pipe = Big()
    weights = sum(toys.nbytes(c) for c in pipe.components.values())
    handle = greenroom.offload(pipe, toys.LAYERWISE, device="emu")
    assert weights <= emu.pinned_stats()["current"] <= 1.02 * weights
    assert handle.report().pinned == emu.pinned_stats()["current"]
    assert all(t.untyped_storage().nbytes() >= t.nbytes for t in toys.tensors(pipe).values())


def test_a_pin_budget(emu: ModuleType) -> None:
    pipe = nn.Module()
    pipe.transformer = toys.DiT(blocks=40)
    budget = 2**20
    handle = greenroom.offload(pipe, {"mode": "layer", "components": ["dit"], "pin_memory": budget}, device="emu")
    report = handle.report()
    assert 0 < report.pinned <= budget
    assert emu.pinned_stats()["current"] == report.pinned
    assert report.pinned + report.pageable >= toys.nbytes(pipe.transformer)


@pytest.mark.parametrize("pin", [False, 2**20], ids=["unpinned", "small pin budget"])
def test_pageable_masters_go_through_a_small_pinned_ring(emu: ModuleType, pin: bool | int) -> None:
    pipe = Big()
    expected = pipe()
    weights = sum(toys.nbytes(c) for c in pipe.components.values())
    handle = greenroom.offload(pipe, {**toys.LAYERWISE, "pin_memory": pin}, device="emu")
    report = handle.report()
    assert emu.pinned_stats()["current"] == report.pinned <= (pin or weights / 5)
    assert sum(c.pageable for c in report.components) == report.pageable > 0.5 * weights
    assert "pageable" in str(report)
    emu.reset_counters()
    emu.set_bandwidth(200e6)  # late on the real clock: whoever does not wait computes with what was there before
    assert torch.equal(pipe("emu"), expected)
    inputs = emu.counters()["h2d_sync"]
    assert emu.counters()["h2d_async"] > inputs  # the weights' way is asynchronous, whatever the masters are
    handle.disable()
    assert emu.pinned_stats()["current"] == 0


def test_a_failed_pin_degrades_where_that_is_asked_for(emu: ModuleType) -> None:
    pipe = toys.Pipeline()
    expected = pipe()
    emu.fail_pin(3)
    with pytest.warns(UserWarning, match="could not be pinned"):
        handle = greenroom.offload(pipe, {**toys.LAYERWISE, "pin_failure_policy": "whole_block_fallback"}, device="emu")
    assert handle.report().pageable > 0
    assert torch.equal(pipe("emu"), expected)


def test_foreign_tensors_count_against_the_budget(emu: ModuleType) -> None:
    pipe = Big()
    expected = pipe()
    weights = sum(toys.nbytes(c) for c in pipe.components.values())
    foreign = torch.zeros(weights // 2, dtype=torch.uint8, device="emu")
    emu.set_capacity(int(weights * 1.1))
    handle = greenroom.offload(pipe, memory=int(weights * 1.1), device="emu")
    for _ in range(3):
        assert torch.equal(pipe("emu"), expected)
    assert handle.report().out_of_memory == 0
    assert foreign.numel()


def test_resident_layers_are_never_copied_again(emu: ModuleType) -> None:
    pipe = toys.Pipeline()
    handle = greenroom.offload(pipe, toys.LAYERWISE_RESIDENT, device="emu")
    x, context = toys.inputs(device="emu")
    dit = next(c for c in handle.report().components if c.name == "transformer")
    assert dit.streamed_blocks == dit.blocks - 3
    with torch.no_grad():
        for _ in range(2):
            pipe.transformer(x, context)
        emu.synchronize()  # copies in flight are counted when they end
        emu.reset_counters()
        for _ in range(5):
            pipe.transformer(x, context)
    emu.synchronize()
    assert emu.counters()["h2d_bytes"] == 5 * dit.moved
    assert emu.counters()["h2d_count"] == 5 * dit.streamed_blocks


def test_steady_state_copies_exactly_the_streamed_blocks(emu: ModuleType) -> None:
    pipe = toys.Pipeline()
    handle = greenroom.offload(pipe, toys.LAYERWISE_DIT, device="emu")
    x, context = toys.inputs(device="emu")
    dit = next(c for c in handle.report().components if c.name == "transformer")
    with torch.no_grad():
        for _ in range(3):
            pipe.transformer(x, context)
        for _ in range(3):
            emu.synchronize()  # copies in flight are counted when they end
            emu.reset_counters()
            pipe.transformer(x, context)
            emu.synchronize()
            counters = emu.counters()
            assert counters["h2d_bytes"] == dit.moved
            assert counters["h2d_count"] == counters["h2d_async"] == dit.streamed_blocks
            assert counters["d2h_bytes"] == 0
