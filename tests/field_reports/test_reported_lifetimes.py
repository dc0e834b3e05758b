"""Host memory, edits of what is on the host, and what lives on after an offload is gone."""

from __future__ import annotations

import gc
import hashlib
import threading
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import toys
from torch import nn

import greenroom
import launch

every_config = pytest.mark.parametrize("config", toys.EVERY.values(), ids=toys.EVERY.keys())


def digests(pipe: toys.Pipeline) -> dict[str, str]:
    found = toys.tensors(pipe)
    return {
        name: hashlib.sha256(bytes(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())).hexdigest()
        for name, t in found.items()
    }


@every_config
def test_calls_leave_the_masters_as_they_are(emu: ModuleType, config: dict[str, Any]) -> None:
    pipe = toys.Pipeline()
    before = digests(pipe)
    handle = greenroom.offload(pipe, config, device="emu")
    for seed in range(3):
        pipe("emu", seed=seed)
        assert digests(pipe) == before
    handle.disable()
    assert digests(pipe) == before


@every_config
def test_weights_on_the_host_are_edited_in_place(emu: ModuleType, config: dict[str, Any]) -> None:
    """As an adapter is fused: no further pinned memory, and no traffic for what is not on the device."""
    plain, pipe = toys.Pipeline(), toys.Pipeline()
    plain_delta = torch.randn(toys.WIDTH, 4 * toys.WIDTH, generator=torch.Generator().manual_seed(2)) / 10
    handle = greenroom.offload(pipe, config, device="emu")
    pipe("emu")
    emu.synchronize()
    pins, at = emu.pinned_stats(), [b.down.weight.data_ptr() for b in pipe.transformer.blocks]
    for each in (plain, pipe):
        with torch.no_grad():
            for block in each.transformer.blocks:
                block.down.weight.add_(plain_delta.to(block.down.weight.device))
    assert [b.down.weight.data_ptr() for b in pipe.transformer.blocks] == at
    assert emu.pinned_stats() == pins
    for _ in range(2):
        assert torch.equal(pipe("emu"), plain())
    assert emu.pinned_stats()["current"] == pins["current"]
    handle.disable()
    assert torch.equal(pipe(), plain())


def test_a_pin_budget_holds_for_what_comes_later_too(emu: ModuleType) -> None:
    """What does not fit stays pageable, is reported, and works."""

    class Adapted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            return x + (x @ self.a) @ self.b if hasattr(self, "a") else x

    def build() -> Any:
        torch.manual_seed(0)
        pipe = toys.only(toys.DiT(blocks=24))
        for block in pipe.transformer.blocks:
            block.down = Adapted(4 * toys.WIDTH, toys.WIDTH)
        return pipe

    def adapt(pipe: Any) -> None:
        generator = torch.Generator().manual_seed(1)
        for block in pipe.transformer.blocks:
            block.down.a = nn.Parameter(torch.randn(toys.WIDTH, 24, generator=generator) / 8)
            block.down.b = nn.Parameter(torch.randn(24, toys.WIDTH, generator=generator) / 8)

    x, context = toys.inputs()
    plain, pipe = build(), build()
    budget = 2**20
    config = {"mode": "layer", "components": ["dit"], "pin_memory": budget}
    handle = greenroom.offload(pipe, config, device="emu")
    before = handle.report().pageable
    with torch.no_grad():
        pipe.transformer(x, context)
        for each in (plain, pipe):
            adapt(each)
        for _ in range(3):
            assert torch.equal(pipe.transformer(x, context).cpu(), plain.transformer(x, context))
    assert handle.report().pageable > before
    assert emu.pinned_stats()["current"] == handle.report().pinned <= budget


@every_config
def test_a_pipeline_made_in_a_thread_dies_when_it_is_let_go(emu: ModuleType, config: dict[str, Any]) -> None:
    made: list[Any] = []

    def load() -> None:
        pipe = toys.Pipeline()
        local = [pipe.transformer]
        handle = greenroom.offload(pipe, config, device="emu")
        pipe("emu")
        made.extend([pipe, handle])
        del local

    before, pinned = emu.memory_allocated(), emu.pinned_stats()["current"]
    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    pipe, handle = made
    made.clear()
    modules = [weakref.ref(m) for m in pipe.components.values()]
    gc.disable()
    try:
        del pipe
        assert [m() for m in modules] == [None] * len(modules)
        emu.synchronize()
        assert emu.memory_allocated() == before
        assert emu.pinned_stats()["current"] == pinned
    finally:
        gc.enable()
    assert not handle.enabled


@every_config
def test_what_stands_in_for_a_weight_is_the_same_object(emu: ModuleType, config: dict[str, Any]) -> None:
    """References that others hold, such as an optimiser's, see each change."""
    pipe = toys.Pipeline()
    held = toys.tensors(pipe)
    handle = greenroom.offload(pipe, config, device="emu")
    for _ in range(2):
        pipe("emu")
    with torch.no_grad():
        held["transformer.blocks.1.down.weight"].zero_()
        held["transformer.blocks.1.down.bias"].zero_()
    plain = toys.Pipeline()
    with torch.no_grad():
        plain.transformer.blocks[1].down.weight.zero_()
        plain.transformer.blocks[1].down.bias.zero_()
    assert torch.equal(pipe("emu"), plain())
    handle.disable()
    assert all(t is held[name] for name, t in toys.tensors(pipe).items())


def test_the_device_that_was_named_is_kept_over_calls(emu: ModuleType) -> None:
    pipe = toys.Pipeline()
    expected = pipe()
    device = torch.device("emu", emu.device_count() - 1)
    others = [emu.memory_allocated(i) for i in range(device.index)]
    handle = greenroom.offload(pipe, toys.MODEL_LEVEL_VAE, device=str(device))
    for _ in range(3):
        with emu.device(device.index):
            assert torch.equal(pipe(device), expected)
        assert handle.report().device == str(device)
        assert pipe.text_encoder._hf_hook.execution_device == device
    assert [emu.memory_allocated(i) for i in range(device.index)] == others


def test_collectives_inside_blocks_while_the_next_is_copied(emu: ModuleType, tmp_path: Path) -> None:
    """Two ranks exchange halves of a sequence in each block, on a bus so slow that every copy is still in flight."""
    launch.run(Path(__file__).with_name("sequence_parallel_rank.py"), 2, folder=tmp_path)
