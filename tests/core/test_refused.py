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
