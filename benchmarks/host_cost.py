"""What a streamed block costs the host: Python and launches, real microseconds.

python benchmarks/host_cost.py [--quick]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import greenroom
from bench.clock import DEVICE, emu, start
from bench.offloaders import LAYERWISE, Pipeline
from bench.report import INK, Gate, Result, Table, main, tidy

TENSORS = (10, 30, 60)
BLOCKS = 24
LIMIT = 60.0
PARTS = ("bind", "release", "checks for edits", "copy", "events", "hooks", "the rest")


class Block(nn.Module):
    """A number of small tensors and no computation."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        for i in range(tensors):
            self.register_parameter(f"weight_{i}", nn.Parameter(torch.zeros(16)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Blocks(nn.Module):
    """A DiT of such blocks."""

    _layerwise_offload_blocks_attrs = ("blocks",)

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def wan_blocks() -> list[nn.Module]:
    """Blocks with the tensors of Wan's, very small, whose forward does nothing."""
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        num_attention_heads=1, attention_head_dim=16, text_dim=16, freq_dim=16, ffn_dim=16, num_layers=BLOCKS
    )
    for block in model.blocks:
        block.forward = lambda x: x
    return list(model.blocks)


def best(work: Callable[[], Any], repeats: int) -> float:
    """Least real microseconds of `work`, divided by the blocks."""
    least = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        least = min(least, time.perf_counter() - began)
    return least / BLOCKS * 1e6


def cost(blocks: Sequence[nn.Module], repeats: int) -> dict[str, float]:
    """Microseconds a streamed block costs, in all and by part; each part is timed alone, best of `repeats`."""
    model = Blocks(blocks)
    x = torch.zeros(1, device=DEVICE)
    plain = best(lambda: _each(model.blocks, x), repeats)
    nothing = [h for b in model.blocks for h in _hook_with_nothing(b)]
    hooks = best(lambda: _each(model.blocks, x), repeats) - plain
    for handle in nothing:
        handle.remove()
    pipe = Pipeline(model)
    handle = greenroom.offload(pipe, LAYERWISE, device=DEVICE)
    for _ in range(4):
        model(x)
    figures = {"total": best(lambda: model(x), repeats) - plain, "hooks": hooks}
    if handle.report().misses:
        raise RuntimeError("blocks were missed: this would time something else")
    runtime = handle._runtime()
    stream, copier = runtime.stream, runtime.copier
    pipe.maybe_free_model_hooks()
    emu.synchronize()
    streamed = stream.streamed
    event, current = torch.Event(DEVICE), runtime.accelerator.current_stream
    bound = [(b, *b.views_at(stream.arena, 0)) for b in streamed]

    def bind() -> None:
        for block, _, views, addresses in bound:
            block.unit.bind(views, addresses)

    def release() -> None:
        for block in streamed:
            block.unit.release()

    def check() -> None:  # before the copy, and before the block computes
        for block in streamed:
            unit = block.unit
            _ = unit.edited, unit.versions(), unit.edited, unit.versions()

    def copy() -> None:
        for block, flat, _, _ in bound:
            copier.fill(flat, block.unit, event)

    def events() -> None:
        for _ in streamed:
            current().wait_event(event)
            event.record(current())
            copier.stream.wait_event(event)

    pairs = [(best(bind, 1), best(release, 1)) for _ in range(repeats)]
    figures["bind"], figures["release"] = (min(pair[i] for pair in pairs) for i in range(2))
    figures["checks for edits"] = best(check, repeats)
    figures["copy"] = best(copy, repeats)
    figures["events"] = best(events, repeats)
    figures["the rest"] = max(0.0, figures["total"] - sum(figures[p] for p in PARTS[:-1]))
    handle.disable()
    return figures


def _each(blocks: Any, x: torch.Tensor) -> None:
    for block in blocks:
        x = block(x)


def _hook_with_nothing(block: nn.Module) -> list[Any]:
    return [
        block.register_forward_pre_hook(lambda module, args: None),
        block.register_forward_hook(lambda module, args, output: None, always_call=True),
    ]


def run(quick: bool = False) -> Result:
    repeats = 20 if quick else 300
    start()
    emu.set_virtual_time(True)  # copies are made at once by the host: no thread competes for its processor
    with torch.no_grad():
        measured = {f"{n} tensors": cost([Block(n) for _ in range(BLOCKS)], repeats) for n in TENSORS}
        wan = wan_blocks()
        count = sum(1 for _ in wan[0].parameters())
        label = f"Wan's block, {count} tensors"
        measured[label] = cost(wan, repeats)
        emu.set_virtual_time(False)
        threads = cost([Block(30) for _ in range(BLOCKS)], repeats)["total"]
    start()
    first, last = measured[f"{TENSORS[0]} tensors"], measured[f"{TENSORS[-1]} tensors"]
    slope = (last["total"] - first["total"]) / (TENSORS[-1] - TENSORS[0])
    table = Table(["block", "us a block", *PARTS])
    for name, figures in measured.items():
        table.rows.append([name, f"{figures['total']:.1f}", *(f"{figures[p]:.1f}" for p in PARTS)])
    text = [
        f"Real host time that Greenroom adds to each of {BLOCKS} streamed blocks whose forward does nothing and whose "
        f"weights are a few bytes, best of {repeats} repeats, under `torch.no_grad()`: pointing the tensors at the "
        "device copy (bind) and back (release), looking for edits of the weights, enqueueing the copy, events between "
        "the two streams, and torch's calls of two hooks. Each part is timed by itself; the rest is what is left, "
        "bookkeeping of the ring above all.",
        f"Each further tensor costs {slope:.2f} us. With copies made by a thread of the emulator instead of by the "
        f"host, a block of 30 tensors costs {threads:.1f} us. On the emulator, pointing a tensor at another device's "
        "memory goes through torch's fallback for autograd, which costs about as much again as on a device that torch "
        "knows.",
    ]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        colours = ["#1b7f5c", "#4fa387", "#8cc5b0", "#c77c2a", "#dfae74", "#7b6fb0", INK["others"]]
        names = list(measured)
        left = [0.0] * len(names)
        for part, colour in zip(PARTS, colours, strict=True):
            values = [measured[n][part] for n in names]
            axes.barh(range(len(names)), values, left=left, color=colour, label=part, height=0.6)
            left = [a + b for a, b in zip(left, values, strict=True)]
        for i, name in enumerate(names):
            axes.annotate(f" {measured[name]['total']:.0f} us", (left[i], i), va="center", fontsize=9)
        axes.axvline(LIMIT, color="#c0392b", linestyle="--", linewidth=1)
        axes.annotate(" target at 30 tensors", (LIMIT, -0.45), color="#c0392b", fontsize=8, va="center")
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlim(0, max(*left, LIMIT) * 1.2)
        axes.set_xlabel("host microseconds for a streamed block (real clock, best of many)")
        figure.legend(fontsize=8, frameon=False, loc="outside right center")
        figure.suptitle("What a streamed block costs the host", x=0.01, ha="left")
        tidy(axes)

    return Result(
        "host_cost",
        "What a streamed block costs the host",
        "real",
        "python benchmarks/host_cost.py",
        text,
        [("Host microseconds for a streamed block (real)", table)],
        [Gate("us for a block of 30 tensors", measured["30 tensors"]["total"], LIMIT)],
        draw,
        size=(10, 3.8),
        figures=measured,
    )


if __name__ == "__main__":
    main(run)
