"""How long `offload()` takes beside copying the weights once, and what it takes of the host's memory.

python benchmarks/enabling.py [--quick]
"""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import greenroom
from bench.clock import DEVICE, start
from bench.offloaders import LAYERWISE, Pipeline
from bench.report import INK, Gate, Result, Table, main, mb, tidy
from bench.subjects import nbytes, wan
from greenroom.accelerator import Accelerator

TIME_LIMIT = 1.3
HELD_LIMIT = 1.02
M_MMAP_THRESHOLD = -3


class Watch:
    """Anonymous memory of this process, looked at by a thread every two milliseconds.

    Attributes:
        first, peak, last: bytes.
    """

    def __enter__(self) -> Watch:
        gc.collect()
        self.first = self.peak = anonymous()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.002):
            self.peak = max(self.peak, anonymous())

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()
        gc.collect()
        self.last = anonymous()


def anonymous() -> int:
    """Bytes of memory that no file stands behind; RssAnon of Linux's /proc."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024


def _give_back_at_once() -> None:
    """Has the C library map each large tensor by itself, so that the kernel sees when one is freed.

    Left alone it keeps what is freed between tensors that live, in whatever order they came: the same for everyone.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 64 << 10)


def copy_once(model: nn.Module) -> Any:
    """The least that anybody could do: each block and the rest are copied once into new pinned memory."""
    accelerator = Accelerator(DEVICE)
    blocks = list(model.blocks)
    inside = {id(t) for block in blocks for t in (*block.parameters(), *block.buffers())}
    rest = [t for t in (*model.parameters(), *model.buffers()) if id(t) not in inside]
    kept = []
    for tensors in ([*((*b.parameters(), *b.buffers()) for b in blocks)], [rest]):
        for group in tensors:
            slab = accelerator.host_buffer(sum(t.numel() * t.element_size() for t in group), pin=True)
            at = 0
            for t in group:
                size = t.numel() * t.element_size()
                slab[at : at + size].copy_(t.detach().reshape(-1).view(torch.uint8))
                at += size
            for t in group:
                t.data = torch.empty(0, dtype=t.dtype)
            kept.append(slab)
    return kept


def enable(model: nn.Module) -> Any:
    return greenroom.offload(Pipeline(model), LAYERWISE, device=DEVICE)


def run(quick: bool = False) -> Result:
    if not quick:
        _give_back_at_once()
    subject = wan(4, 128, 4) if quick else wan(24, 640, 4)
    rounds = 1 if quick else 7
    weights = nbytes(subject.template)
    largest = max(subject.block_bytes())
    ways: dict[str, Callable[[nn.Module], Any]] = {"copying once": copy_once, "offload()": enable}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    memory: dict[str, tuple[int, int]] = {}
    start(races=quick, poison=quick)
    for _ in range(rounds):  # in turn, so that whatever else this machine does falls on both alike
        for name, way in ways.items():
            model = subject.model()
            gc.collect()
            began = time.perf_counter()
            kept = way(model)
            seconds[name].append(time.perf_counter() - began)
            if name == "offload()":
                kept.disable()
            del kept, model
    for name, way in ways.items():
        model = subject.model()
        with Watch() as watch:
            kept = way(model)
        memory[name] = (watch.peak - watch.first + weights, watch.last - watch.first + weights)
        if name == "offload()":
            kept.disable()
        del kept, model
    start()
    gc.collect()
    base = min(seconds["copying once"])
    table = Table(["", "s", "over copying once", "worst round", "peak over weights", "held over weights"])
    for name, several in seconds.items():
        peak, held = memory[name]
        table.rows.append(
            [
                name,
                f"{min(several):.2f}",
                f"{min(several) / base:.2f}",
                f"{max(several) / base:.2f}",
                f"{peak / weights:.3f}",
                f"{held / weights:.3f}",
            ]
        )
    text = [
        f"{subject.name}, {mb(weights)} MB of weights, blocks of at most {mb(largest)} MB, on the CPU; afterwards all "
        f"stand in pinned memory of the emulated accelerator. Best of {rounds} rounds, the two in turn. Copying once "
        "is what nobody can go below: for each block new pinned memory, one copy of each tensor into it, and the old "
        "tensors let go. Memory is what the process holds that no file stands behind, looked at every 2 ms, each "
        "tensor mapped by itself; weights and the largest block together are "
        f"{(weights + largest) / weights:.3f} of the weights.",
    ]
    peak, held = memory["offload()"]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for i, (name, several) in enumerate(seconds.items()):
            colour = INK["Greenroom"] if name == "offload()" else INK["others"]
            axes.barh(i, min(several) / base, color=colour, height=0.6)
            axes.annotate(f" {min(several) / base:.2f}", (min(several) / base, i), va="center", fontsize=9)
        axes.axvline(TIME_LIMIT, color="#c0392b", linestyle="--", linewidth=1)
        axes.set_yticks(range(len(seconds)), list(seconds))
        axes.invert_yaxis()
        axes.set_xlabel("time over copying the weights once (real clock); dashed: the limit")
        tidy(axes)

    gates = (
        []
        if quick
        else [
            Gate("time over copying once", min(seconds["offload()"]) / base, TIME_LIMIT),
            Gate("bytes held over the weights", held / weights, HELD_LIMIT),
            Gate("peak over weights and the largest block", peak / (weights + largest), 1.01),
        ]
    )
    return Result(
        "enabling",
        "What enabling takes",
        "real",
        "python benchmarks/enabling.py",
        text,
        [("Time and host memory (real)", table)],
        gates,
        draw,
        size=(8, 2.4),
        figures={"seconds": seconds, "memory": memory},
    )


if __name__ == "__main__":
    main(run)
