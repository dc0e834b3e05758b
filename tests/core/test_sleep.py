"""Sleep frees the device and copies nothing out; wake brings the same bits back."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
import toys

import greenroom

CONFIGS = {**toys.EVERY, "auto": {"mode": "auto", "memory_budget": 2_000_000}}


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


def test_sleep_frees_the_device_and_wake_brings_the_same_bits(emu: ModuleType, config: dict[str, Any]) -> None:
    pipe = toys.Pipeline()
    expected = pipe()
    handle = greenroom.offload(pipe, config, device="emu")
    assert torch.equal(pipe("emu"), expected)
    for _ in range(2):
        awake = emu.memory_allocated()
        emu.reset_counters()
        handle.sleep()
        handle.sleep()
        assert handle.report().asleep and "asleep" in str(handle.report())
        assert emu.memory_allocated() == 0 < awake
        # Answers of comparisons, not weights.
        assert emu.counters()["d2h_bytes"] < 1000
        handle.wake()
        handle.wake()
        assert not handle.report().asleep and emu.memory_allocated() == awake
        assert torch.equal(pipe("emu"), expected)


def test_values_can_be_read_while_it_sleeps(emu: ModuleType, config: dict[str, Any]) -> None:
    pipe = toys.Pipeline()
    before = {name: tensor.clone() for name, tensor in toys.tensors(pipe).items()}
    handle = greenroom.offload(pipe, config, device="emu")
    pipe("emu")
    handle.sleep()
    for name, tensor in toys.tensors(pipe).items():
        assert tensor.device.type == "cpu" and torch.equal(tensor, before[name]), name


def test_a_sleeping_offload_says_so_when_it_is_called(emu: ModuleType, config: dict[str, Any]) -> None:
    pipe = toys.Pipeline()
    expected = pipe()
    handle = greenroom.offload(pipe, config, device="emu")
    handle.sleep()
    with pytest.raises(greenroom.OffloadError, match=r"wake\(\)"):
        pipe("emu")
    for call in (handle.rescan, lambda: handle.materialized(pipe.vae).__enter__()):
        with pytest.raises(greenroom.OffloadError, match=r"wake\(\)"):
            call()
    assert emu.memory_allocated() == 0
    handle.wake()
    assert torch.equal(pipe("emu"), expected)


@pytest.mark.parametrize("through_data", [False, True])
def test_edits_on_the_device_are_kept(emu: ModuleType, config: dict[str, Any], through_data: bool) -> None:
    pipe, other = toys.Pipeline(), toys.Pipeline()
    handle = greenroom.offload(pipe, config, device="emu")
    pipe("emu")
    for edited in (pipe, other):
        with torch.no_grad():
            for weight in (edited.transformer.scale, edited.transformer.blocks[0].down.weight):
                (weight.data if through_data else weight).mul_(1.5)
    handle.sleep()
    handle.wake()
    assert torch.equal(pipe("emu"), other())


def test_edits_while_it_sleeps_are_kept(emu: ModuleType, config: dict[str, Any]) -> None:
    pipe, other = toys.Pipeline(), toys.Pipeline()
    handle = greenroom.offload(pipe, config, device="emu")
    handle.sleep()
    for edited in (pipe, other):
        edited.transformer.blocks[1].down.weight.data.mul_(0.5)
        edited.vae.decoder.weight.data = edited.vae.decoder.weight.detach() * 2
    handle.wake()
    assert torch.equal(pipe("emu"), other())


def test_disable_and_offload_anew_while_it_sleeps(emu: ModuleType, config: dict[str, Any]) -> None:
    pipe = toys.Pipeline()
    expected = pipe()
    handle = greenroom.offload(pipe, config, device="emu")
    handle.sleep()
    again = greenroom.offload(pipe, toys.MODEL_LEVEL, device="emu")
    if config != toys.MODEL_LEVEL:
        assert not again.report().asleep and torch.equal(pipe("emu"), expected)
    again.disable()
    assert torch.equal(pipe(), expected)
    assert emu.memory_allocated() == 0 and emu.pinned_stats()["current"] == 0


def test_a_wake_that_does_not_fit_leaves_it_asleep(emu: ModuleType) -> None:
    pipe = toys.Pipeline()
    expected = pipe()
    handle = greenroom.offload(pipe, toys.LAYERWISE, device="emu")
    awake = emu.memory_allocated()
    handle.sleep()
    emu.set_capacity(awake)
    taken = torch.empty(awake // 2, dtype=torch.uint8, device="emu")
    with pytest.raises(torch.OutOfMemoryError):
        handle.wake()
    assert handle.report().asleep and emu.memory_allocated() == taken.nbytes
    del taken
    handle.wake()
    emu.set_capacity(2**34)
    assert torch.equal(pipe("emu"), expected)


def test_it_cannot_sleep_in_the_middle_of_a_call(emu: ModuleType) -> None:
    pipe = toys.Pipeline()
    handle = greenroom.offload(pipe, toys.LAYERWISE, device="emu")
    refused: list[str] = []

    def try_to_sleep(module: Any, args: Any) -> None:
        try:
            handle.sleep()
        except greenroom.OffloadError as error:
            refused.append(str(error))

    hook = pipe.transformer.blocks[0].register_forward_pre_hook(try_to_sleep)
    pipe("emu")
    hook.remove()
    assert refused and all("between two calls" in text for text in refused)


def test_a_budget_keeps_what_it_has_learned(emu: ModuleType) -> None:
    pipe = toys.Pipeline()
    expected = pipe()
    handle = greenroom.offload(pipe, {"mode": "auto", "memory_budget": 900_000}, device="emu")
    pipe("emu")
    pipe("emu")
    before = handle.report()
    handle.sleep()
    handle.wake()
    after = handle.report()
    assert (after.why, after.device_weights, after.predicted_peak) == (
        before.why, before.device_weights, before.predicted_peak,
    )  # fmt: skip
    assert torch.equal(pipe("emu"), expected)
    assert handle.report().peak <= 900_000
