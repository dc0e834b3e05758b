"""Copies to the device: who waits for them, which thread asks for them, and what they read and when it goes."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
import toys
from torch import nn

import greenroom
from greenroom.accelerator import Accelerator

# Bytes per second at which a block of a toy takes a tenth of a second and more.
SLOW = 1e6


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(768, 768)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


def test_a_forward_is_timed_while_its_copies_wait_for_their_thread(emu: ModuleType) -> None:
    torch.manual_seed(0)
    pipe = toys.only(toys.Row(Wide() for _ in range(6)))
    weights = toys.nbytes(pipe.transformer)
    x = torch.randn(4, 768)
    with torch.no_grad():
        expected = pipe.transformer(x)
    emu.set_bandwidth(100e6)
    # Of so small a pin budget the ring gets small chunks: the thread is busy for as long as a block is on its way.
    words = {"mode": "auto", "pin_memory": 2**20, "memory_budget": weights // 2 + 2**21}
    handle = greenroom.offload(pipe, words, device="emu")
    for _ in range(3):
        with torch.no_grad():
            assert torch.equal(pipe.transformer(x.to("emu")).cpu(), expected)
    assert handle.report().pageable > 0.5 * weights


def test_threads_that_enter_a_stream_leave_with_their_own(emu: ModuleType) -> None:
    accelerator = Accelerator.of("emu")
    stream, own = accelerator.new_stream(), accelerator.new_stream()
    inside, left = threading.Barrier(2), threading.Barrier(2)
    seen: dict[str, int] = {}

    def first() -> None:
        torch.accelerator.set_stream(own)
        with accelerator.on(stream):
            inside.wait(10)
        seen["first"] = accelerator.current_stream().stream_id
        left.wait(10)

    def second() -> None:
        before = accelerator.current_stream().stream_id
        with accelerator.on(stream):
            inside.wait(10)
            left.wait(10)
        seen["second"] = accelerator.current_stream().stream_id - before

    toys.at_once(first, second)
    assert seen == {"first": own.stream_id, "second": 0}


class Collects:
    """An event at whose recording garbage is collected."""

    def record(self, stream: Any) -> None:
        gc.collect()


def test_the_last_module_may_die_on_the_thread_that_copies(emu: ModuleType) -> None:
    gc.collect()
    before, threads = emu.memory_allocated(), set(threading.enumerate())
    pipe = toys.Pipeline()
    handle = greenroom.offload(pipe, toys.UNPINNED, device="emu")
    pipe("emu")
    stager = handle._runtime().copier.stager
    (thread,) = (t for t in set(threading.enumerate()) - threads if t.name.startswith("greenroom-staging"))
    pipe.itself = pipe
    for module in pipe.components.values():
        module.itself = [module]
    gc.disable()
    try:
        del pipe, module
        host, target = torch.ones(4096, dtype=torch.uint8), torch.empty(4096, dtype=torch.uint8, device="emu")
        stager.copy(target, host, Collects(), pinned=False).enqueued()
    finally:
        gc.enable()
    assert not handle.enabled
    thread.join(10)
    assert not thread.is_alive()
    assert torch.equal(target.cpu(), host)
    del target
    assert emu.memory_allocated() == before
    assert emu.pinned_stats()["current"] == 0


def cast(pipe: Any, handle: Any) -> None:
    table = pipe.transformer.blocks[0].scale_shift_table
    table.data = table.data.double()
    x, context = toys.inputs(device="emu")
    with torch.no_grad():
        pipe.transformer(x, context)


def replace(pipe: Any, handle: Any) -> None:
    pipe.transformer.blocks[0].down = nn.Linear(4 * toys.WIDTH, toys.WIDTH)
    x, context = toys.inputs(device="emu")
    with torch.no_grad():
        pipe.transformer(x, context)


def disable(pipe: Any, handle: Any) -> None:
    handle.disable()


def delete(pipe: Any, handle: Any) -> None:
    del pipe.transformer


@pytest.mark.parametrize("way", [cast, replace, disable, delete], ids=lambda way: way.__name__)
def test_no_master_goes_while_it_is_copied(emu: ModuleType, way: Callable[[Any, Any], None]) -> None:
    torch.manual_seed(0)
    pipe = toys.only(toys.DiT())
    emu.set_bandwidth(SLOW)
    handle = greenroom.offload(pipe, {"mode": "layer", "components": ["dit"]}, device="emu")
    runtime = handle._runtime()
    stream = runtime.copier.stream
    assert not stream.query()  # the first blocks are on their way
    ended: list[bool] = []
    # As memory that is registered with a device goes: with its storage.
    unit = runtime.parts[0].blocks[0].unit
    weakref.finalize(unit.master.untyped_storage(), lambda: ended.append(stream.query()))
    del runtime, unit
    way(pipe, handle)
    gc.collect()
    assert ended == [True]


@pytest.mark.parametrize("refused", [False, True], ids=["locked", "refused"])
def test_a_master_that_changes_its_layout_is_pinned_as_the_words_say(emu: ModuleType, refused: bool) -> None:
    torch.manual_seed(0)
    pipe = toys.only(toys.DiT())
    words = {"mode": "layer", "components": ["dit"], "pin_failure_policy": "whole_block_fallback"}
    handle = greenroom.offload(pipe, words, device="emu")
    before = handle.report()
    if refused:
        emu.fail_pin(1)
    cast(pipe, handle)
    after = handle.report()
    assert after.pinned == emu.pinned_stats()["current"]
    assert (after.pageable > 0) == refused
    assert after.pinned + after.pageable > before.pinned + before.pageable


class Empty(nn.Module):
    """Its only tensor has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("nothing", torch.empty(0, toys.WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * torch.cat((x, self.nothing.add(1)))


class Around(nn.Module):
    """Nothing outside its blocks but a tensor without elements."""

    _layerwise_offload_blocks_attrs: ClassVar = ["blocks"]

    def __init__(self, middle: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.register_buffer("nothing", torch.empty(0))
        self.blocks = nn.ModuleList((toys.Block(), middle(), toys.Block(), toys.Block()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("device", ["emu", "cpu"])
@pytest.mark.parametrize("mode", ["layer", "module"])
@pytest.mark.parametrize("middle", [toys.Block, Empty], ids=["outside", "a block"])
def test_tensors_without_elements(emu: ModuleType, device: str, mode: str, middle: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    pipe = toys.only(Around(middle))
    x = torch.randn(4, toys.WIDTH)
    with torch.no_grad():
        expected = pipe.transformer(x)
    handle = greenroom.offload(pipe, {"mode": mode, "components": ["dit"]}, device=device)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(pipe.transformer(x.to(device)).cpu(), expected)
    handle.disable()
    assert pipe.transformer.nothing.shape == (0,)


class Cudart:
    """CUDA's runtime as far as it registers memory; it refuses, and keeps the error as CUDA does."""

    def __init__(self) -> None:
        self.last_error = 0
        self.devices: list[int] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.devices.append(torch.accelerator.current_device_index())
        self.last_error = 2
        return 2


class TellingCudart(Cudart):
    def cudaGetLastError(self) -> int:
        self.last_error, error = 0, self.last_error
        return error


@pytest.mark.parametrize("kind", [Cudart, TellingCudart], ids=["without cudaGetLastError", "with it"])
def test_a_refusal_of_cuda_leaves_no_error_behind(
    emu: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: type[Cudart]
) -> None:
    cudart = kind()

    def kernel(*size: int, device: torch.device) -> None:
        error, cudart.last_error = cudart.last_error, 0
        if error:
            raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch, "ones", kernel)
    accelerator = Accelerator(torch.device("cuda", 1))
    with pytest.raises(RuntimeError, match="cudaHostRegister refused 4096 bytes"):
        accelerator.host_buffer(4096, pin=True)
    assert cudart.last_error == 0
    assert cudart.devices == [1]  # and not a context on the device that happens to be current
    assert torch.accelerator.current_device_index() == 0


def test_the_thread_that_copies_is_on_its_device(emu: ModuleType) -> None:
    pipe = toys.Pipeline()
    expected = pipe()
    handle = greenroom.offload(pipe, toys.UNPINNED, device="emu:1")
    devices: list[int] = []

    class Asks:
        def record(self, stream: Any) -> None:
            devices.append(torch.accelerator.current_device_index())

    host, target = torch.ones(64, dtype=torch.uint8), torch.empty(64, dtype=torch.uint8, device="emu:1")
    handle._runtime().copier.stager.copy(target, host, Asks(), pinned=False).enqueued()
    assert devices == [1]
    assert torch.equal(pipe("emu:1"), expected)
    handle.disable()
