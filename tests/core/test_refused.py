"""What is refused or fails on its way in or out leaves the offload as it was, or says what to do."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import toys

import greenroom


def on_the_device(**dit: int) -> tuple[toys.Pipeline, torch.Tensor]:
    """A pipeline whose weights are on the device, and its result."""
    pipe = toys.Pipeline(**dit)
    expected = pipe()
    for module in pipe.components.values():
        module.to("emu")
    return pipe, expected


def places(pipe: toys.Pipeline) -> dict[str, tuple[str, list[Any]]]:
    return {name: (str(tensor.device), tensor.tolist()) for name, tensor in toys.tensors(pipe).items()}


@pytest.mark.parametrize("config", [toys.MODEL_LEVEL, toys.LAYERWISE], ids=["module", "layer"])
def test_a_device_that_is_full_refuses_the_weights_and_the_offload_goes_on(
    emu: ModuleType, config: dict[str, Any]
) -> None:
    pipe, expected = on_the_device()
    before = places(pipe)
    handle = greenroom.offload(pipe, config, device="emu", **({} if config else {"memory": "2MiB"}))
    pipe("emu")
    emu.reset_peak_memory_stats()
    assert torch.equal(pipe("emu"), expected)
    needed = emu.max_memory_allocated() - emu.memory_allocated()
    free, _ = emu.mem_get_info(0)
    filled = torch.empty(free - needed - 4096, dtype=torch.uint8, device="emu")
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError, match="free memory there before they go back"):
            handle.disable()
        assert handle.enabled
        assert torch.equal(pipe("emu"), expected)
    del filled
    handle.disable()
    assert not handle.enabled
    assert places(pipe) == before
    assert torch.equal(pipe("emu"), expected)


@pytest.mark.parametrize("config", [toys.MODEL_LEVEL, toys.LAYERWISE], ids=["module", "layer"])
@pytest.mark.parametrize("fault", ["allocation", "copy"])
def test_a_disable_that_failed_halfway_is_completed_by_the_next(
    emu: ModuleType, config: dict[str, Any], fault: str
) -> None:
    inject = {"allocation": emu.fail_allocation, "copy": emu.fail_copy}[fault]
    failures = 0
    for k in (1, 2, 5, 20):
        pipe, expected = on_the_device(blocks=2, single=1)
        before = places(pipe)
        handle = greenroom.offload(pipe, config, device="emu")
        pipe("emu")
        inject(k)
        try:
            handle.disable()
        except RuntimeError as error:
            failures += 1
            assert "call handle.disable() again" in str(error)
            assert handle.enabled and "half undone" in repr(handle)
            for refused in (partial(pipe, "emu"), handle.report, handle.sleep, handle.wake, handle.rescan):
                with pytest.raises(greenroom.OffloadError, match="disable"):
                    refused()
        inject(None)
        handle.disable()
        assert not handle.enabled
        assert places(pipe) == before
        assert torch.equal(pipe("emu"), expected)
        greenroom.offload(pipe, config, device="emu")
        assert torch.equal(pipe("emu"), expected)
    assert failures > 1, "the fault was not met"


TOO_MUCH = {"dit": {"resident_layers": 99}}


@pytest.mark.parametrize("earlier", [toys.MODEL_LEVEL, toys.LAYERWISE, None], ids=["module", "layer", "budget"])
@pytest.mark.parametrize(
    ("config", "memory", "named"),
    [
        (None, "1KiB", "memory_budget = '1KiB'"),
        (None, "9999GiB", "memory_budget = '9999GiB'"),
        ({"mode": "layer", "layer_options": TOO_MUCH}, None, "resident_layers = 99"),
        ({"mode": "layer", "layer_options": TOO_MUCH}, "64MiB", "resident_layers = 99"),
    ],
)
def test_words_that_are_refused_leave_the_offload_alone(
    emu: ModuleType, earlier: dict[str, Any] | None, config: dict[str, Any] | None, memory: str | None, named: str
) -> None:
    pipe = toys.Pipeline()
    expected = pipe()
    handle = greenroom.offload(pipe, earlier, memory=None if earlier else "64MiB", device="emu")
    assert torch.equal(pipe("emu"), expected)
    before = handle.report()
    with pytest.raises(greenroom.ConfigError, match=named):
        greenroom.offload(pipe, config, memory=memory, device="emu")
    assert handle.enabled
    assert handle.report() == before  # nothing was copied, no peak was lost
    assert torch.equal(pipe("emu"), expected)


@pytest.mark.parametrize("earlier", [toys.LAYERWISE, None], ids=["layer", "budget"])
@pytest.mark.parametrize("fault", ["pin", "allocation", "copy"])
@pytest.mark.parametrize("rescanned", [False, True])
def test_what_fails_while_it_is_enabled_brings_the_earlier_offload_back(
    emu: ModuleType, earlier: dict[str, Any] | None, fault: str, rescanned: bool
) -> None:
    if fault == "allocation" and rescanned and earlier is None:
        pytest.skip("a budget does with less")
    inject = {"pin": emu.fail_pin, "allocation": emu.fail_allocation, "copy": emu.fail_copy}[fault]
    pipe = toys.Pipeline()
    expected = pipe()
    handle = greenroom.offload(pipe, earlier, memory=None if earlier else "64MiB", device="emu")
    pipe("emu")
    if earlier is None:
        handle.set_memory("2MiB")  # and that budget is kept
    inject(2)
    with pytest.raises(RuntimeError, match=r"injected|out of memory"):
        if rescanned:
            handle.rescan()
        else:
            greenroom.offload(pipe, toys.LAYERWISE_RESIDENT, device="emu")
    inject(None)
    assert handle.enabled
    report = handle.report()
    assert report.strategy == ("auto" if earlier is None else "layerwise")
    assert report.budget == (2 * 2**20 if earlier is None else None)
    assert torch.equal(pipe("emu"), expected)
    handle.rescan()
    assert handle.report().budget == report.budget
    handle.disable()
    assert torch.equal(pipe(), expected)


def test_a_sleeping_offload_sleeps_on_after_another_has_failed(emu: ModuleType) -> None:
    pipe = toys.Pipeline()
    expected = pipe()
    before = emu.memory_allocated()
    handle = greenroom.offload(pipe, toys.LAYERWISE, device="emu")
    handle.sleep()
    emu.fail_pin(2)
    with pytest.raises(RuntimeError, match="injected"):
        greenroom.offload(pipe, toys.LAYERWISE_RESIDENT, device="emu")
    assert handle.report().asleep and emu.memory_allocated() == before
    handle.wake()
    assert torch.equal(pipe("emu"), expected)


def test_where_nothing_can_be_enabled_the_pipeline_is_whole_and_the_error_says_so(
    emu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = toys.Pipeline()
    expected = pipe()
    handle = greenroom.offload(pipe, toys.LAYERWISE, device="emu")
    pipe("emu")

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no memory can be locked any more")

    monkeypatch.setattr("greenroom.accelerator.Accelerator.host_buffer", refuse)
    with pytest.raises(greenroom.OffloadError, match="whole and not offloaded"):
        handle.rescan()
    assert not handle.enabled
    assert torch.equal(pipe(), expected)
    monkeypatch.undo()
    greenroom.offload(pipe, toys.LAYERWISE, device="emu")
    assert torch.equal(pipe("emu"), expected)


@pytest.mark.parametrize("way_out", ["maybe_free_model_hooks", "sleep"])
def test_what_a_call_left_on_the_device_that_was_given_up_between_components(emu: ModuleType, way_out: str) -> None:
    pipe = toys.Pipeline()
    expected = pipe()
    handle = greenroom.offload(pipe, toys.MODEL_LEVEL, device="emu")
    pipe("emu")
    between = emu.memory_allocated()

    def give_up(step: int, x: torch.Tensor) -> None:
        raise KeyError("given up")

    pipe.between = give_up
    with pytest.raises(KeyError, match="given up"):
        pipe("emu")
    pipe.between = None
    assert emu.memory_allocated() > between
    if way_out == "sleep":
        handle.sleep()
        assert emu.memory_allocated() < between
        handle.wake()
    else:
        pipe.maybe_free_model_hooks()
    assert emu.memory_allocated() == between
    assert torch.equal(pipe("emu"), expected)


def test_a_budget_may_refuse_what_it_cannot_hold(emu: ModuleType) -> None:
    pipe = toys.only(toys.DiT())
    small, large = toys.inputs(1, "emu"), toys.inputs(4000, "emu")
    handle = greenroom.offload(pipe, memory="12MiB", device="emu")
    handle.refuse_excess()
    with torch.no_grad():
        pipe.transformer(*small)
        with pytest.raises(greenroom.errors.BudgetExceeded, match="accepted: a budget of at least"):
            pipe.transformer(*large)
            handle.raise_excess()
        assert pipe.transformer(*small).isfinite().all()
