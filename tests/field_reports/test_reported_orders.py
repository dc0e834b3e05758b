"""Blocks that are skipped, conditional, reordered or repeated, and copies that land late."""

from __future__ import annotations

import gc
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import safetensors.torch
import torch
import toys
from torch import nn

import greenroom

every_config = pytest.mark.parametrize("config", toys.EVERY.values(), ids=toys.EVERY.keys())
SLOW_BUS = 20e6  # bytes a second: a block takes about 2 ms, far longer than its kernels


class Optional(nn.Module):
    """A branch of blocks that only some inputs take."""

    _layerwise_offload_blocks_attrs: ClassVar = ["blocks", "extra_blocks"]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(toys.Block() for _ in range(4))
        self.extra_blocks = nn.ModuleList(toys.Block() for _ in range(2))
        self.opt_proj = nn.Linear(toys.WIDTH, toys.WIDTH)

    def forward(self, x: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
        if extra is not None:
            x = x + self.opt_proj(extra)
            for block in self.extra_blocks:
                x = block(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("mode", ["module", "layer"])
def test_a_branch_that_the_first_forward_did_not_take(emu: ModuleType, mode: str) -> None:
    torch.manual_seed(0)
    pipe = toys.only(Optional())
    x, extra = torch.randn(2, 1, 4, toys.WIDTH)
    calls = (None, extra, None, extra, extra)
    with torch.no_grad():
        expected = [pipe.transformer(x, e) for e in calls]
        greenroom.offload(pipe, {"mode": mode, "components": ["dit"]}, device="emu")
        emu.set_bandwidth(SLOW_BUS)
        for e, value in zip(calls, expected, strict=True):
            assert torch.equal(pipe.transformer(x, e).cpu(), value)


class CaptionLast(nn.Module):
    """What is constructed last runs first."""

    _layerwise_offload_blocks_attrs: ClassVar = ["blocks", "caption"]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(toys.Block() for _ in range(4))
        self.caption = nn.ModuleList(toys.Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*reversed(self.caption), *self.blocks):
            x = block(x)
        return x


def test_blocks_that_run_before_those_constructed_earlier(emu: ModuleType) -> None:
    torch.manual_seed(0)
    pipe = toys.only(CaptionLast())
    x = torch.randn(1, 4, toys.WIDTH)
    with torch.no_grad():
        expected = pipe.transformer(x)
        handle = greenroom.offload(pipe, toys.LAYERWISE_DIT, device="emu")
        assert torch.equal(pipe.transformer(x).cpu(), expected)
        assert torch.equal(pipe.transformer(x).cpu(), expected)
        misses = handle.report().misses
        for _ in range(3):  # the order is the one that was seen, and everything comes in time
            assert torch.equal(pipe.transformer(x).cpu(), expected)
    assert handle.report().misses == misses


@every_config
def test_a_second_request_after_a_pause(emu: ModuleType, config: dict[str, Any]) -> None:
    pipe = toys.Pipeline()
    expected = pipe()
    greenroom.offload(pipe, config, device="emu")
    for _ in range(3):
        assert torch.equal(pipe("emu"), expected)
        emu.synchronize()
        gc.collect()
        emu.empty_cache()


class Guided(nn.Module):
    """Some layers of a block are not used; classifier-free guidance runs two forwards in each step."""

    _layerwise_offload_blocks_attrs: ClassVar = ["blocks"]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(toys.Block() for _ in range(5))
        for block in self.blocks:
            block.unused = nn.Linear(toys.WIDTH, 3 * toys.WIDTH)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x, context = block(torch.cat([x + context.mean(), context])).chunk(2)
        return x


def test_two_forwards_in_each_step_and_layers_that_are_not_used(emu: ModuleType) -> None:
    torch.manual_seed(0)
    pipe = toys.only(Guided())
    x, positive, negative = torch.randn(3, 1, 4, toys.WIDTH)

    def steps(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for _ in range(3):
                x = x + 4 * (pipe.transformer(x, positive) - pipe.transformer(x, negative))
                x = x / x.abs().max()
        return x.cpu()

    expected = steps(x)
    handle = greenroom.offload(pipe, toys.LAYERWISE_DIT, device="emu")
    emu.set_bandwidth(SLOW_BUS)
    assert torch.equal(steps(x.to("emu")), expected)
    before = handle.report()
    assert torch.equal(steps(x.to("emu")), expected)
    after = handle.report()
    assert after.misses == before.misses
    assert after.copied - before.copied == 6 * after.components[0].moved


@pytest.mark.parametrize("resident", range(8))
def test_any_number_of_resident_blocks(emu: ModuleType, resident: int) -> None:
    """From none to all but one: a pass copies exactly the others, however many of them follow each other."""
    torch.manual_seed(0)
    pipe = toys.only(toys.DiT())
    x, context = toys.inputs()
    config = {"mode": "layer", "components": ["dit"], "layer_options": {"dit": {"resident_layers": resident}}}
    with torch.no_grad():
        expected = pipe.transformer(x, context)
        handle = greenroom.offload(pipe, config, device="emu")
        x, context = x.to("emu"), {"embeds": [context["embeds"][0].to("emu")]}
        emu.set_bandwidth(SLOW_BUS)
        pipe.transformer(x, context)
        emu.synchronize()
        emu.reset_counters()
        before = handle.report().misses
        passes = 12
        for _ in range(passes):
            assert torch.equal(pipe.transformer(x, context).cpu(), expected)
        emu.synchronize()
        report = handle.report()
        assert report.components[0].streamed_blocks == 7 - resident
        # What is fetched ahead when counting begins and ends differs by less than the arena holds.
        assert abs(emu.counters()["h2d_bytes"] - passes * report.components[0].moved) <= report.arena
        assert report.misses == before


# ---------------------------------------------------------------------- copies that land late


class Modulated(nn.Module):
    """A table on the block itself, and normalisations without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale_shift_table = nn.Parameter(torch.randn(1, 3, toys.WIDTH) / 8)
        self.norm = nn.LayerNorm(toys.WIDTH, elementwise_affine=False)
        self.ffn = nn.Linear(toys.WIDTH, toys.WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift, scale, gate = self.scale_shift_table.unbind(1)
        return x + gate * self.ffn(self.norm(x) * (1 + scale) + shift)


class Cast(nn.Module):
    """Weights of eight bits with scales of sixteen, cast when they are used."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(toys.WIDTH, toys.WIDTH) / 8
        self.weight = nn.Parameter(weight.to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("scale", torch.rand(toys.WIDTH, 1).to(torch.bfloat16) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x @ (self.weight.float() * self.scale.float()).t()


@pytest.mark.parametrize("mode", ["module", "layer"])
@pytest.mark.parametrize("block", [Modulated, Cast])
def test_tables_and_casts_wait_for_their_copies(emu: ModuleType, block: type[nn.Module], mode: str) -> None:
    torch.manual_seed(0)
    pipe = toys.only(toys.Row(block() for _ in range(5)))
    x = torch.randn(1, 4, toys.WIDTH)
    dtypes = [p.dtype for p in (*pipe.parameters(), *pipe.buffers())]
    with torch.no_grad():
        expected = pipe.transformer(x)
        handle = greenroom.offload(pipe, {"mode": mode, "components": ["dit"]}, device="emu")
        assert [p.dtype for p in (*pipe.parameters(), *pipe.buffers())] == dtypes
        emu.set_bandwidth(1e6)
        for _ in range(2):
            assert torch.equal(pipe.transformer(x).cpu(), expected)
        handle.disable()
        assert [p.dtype for p in (*pipe.parameters(), *pipe.buffers())] == dtypes


@pytest.mark.parametrize("pin", [True, False], ids=["pinned", "pageable"])
@pytest.mark.parametrize("mode", ["module", "layer"])
def test_weights_mapped_from_a_file_land_late(emu: ModuleType, mode: str, pin: bool, tmp_path: Path) -> None:
    """What lies in a file that is mapped is under the same guards; once taken over, the file is not read again."""
    torch.manual_seed(0)
    pipe = toys.only(toys.DiT())
    x, context = toys.inputs()
    state = {k: v.clone() for k, v in pipe.transformer.state_dict().items()}
    safetensors.torch.save_file(state, tmp_path / "weights.safetensors")
    mapped = safetensors.torch.load_file(tmp_path / "weights.safetensors")
    with torch.no_grad():
        expected = pipe.transformer(x, context)
        pipe.transformer.load_state_dict(mapped, assign=True)
        config = {"mode": mode, "components": ["dit"], "pin_memory": pin}
        greenroom.offload(pipe, config, device="emu")
        del mapped
        (tmp_path / "weights.safetensors").unlink()
        emu.set_bandwidth(SLOW_BUS)
        for _ in range(3):
            assert torch.equal(pipe.transformer(x, context).cpu(), expected)
