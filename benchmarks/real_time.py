"""One point on the real clock: copies of the emulator really take their time beside real computation.

python benchmarks/real_time.py [--quick]
"""

from __future__ import annotations

import contextlib
import gc
import time
from typing import Any

import torch

from bench import offloaders as o
from bench.clock import DEVICE, Bench, emu, start
from bench.report import INK, Result, Table, main, mb, tidy, yes
from bench.subjects import wan

RATIO = 2.0


def run(quick: bool = False) -> Result:
    subject = wan(4, 128, 4) if quick else wan(12, 512, 8)
    rounds, forwards = (1, 1) if quick else (16, 1)
    blocks = len(subject.blocks())
    offloaders: dict[str, o.Offloader] = {
        "resident": o.resident,
        "Greenroom, half the blocks resident": o.greenroom_layerwise(blocks // 2),
        "Greenroom, all streamed": o.greenroom_layerwise(),
        "diffusers group, block, stream": o.group_offload("block_level", stream=True),
        "diffusers group, leaf, stream, record_stream": o.group_offload("leaf_level", stream=True, record=True),
    }
    start(races=quick, poison=quick)
    seconds: dict[str, list[float]] = {name: [] for name in offloaders}
    latents: dict[str, torch.Tensor] = {}
    with contextlib.ExitStack() as stack, torch.no_grad():
        benches = {n: Bench(subject, stack.enter_context(off(subject, DEVICE))) for n, off in offloaders.items()}
        latent = subject.latent.to(DEVICE)
        compute = min(_time(benches["resident"], latent, 1)[0] for _ in range(3))
        emu.set_bandwidth(sum(subject.block_bytes()) / compute / RATIO)
        for bench in benches.values():  # to warm up
            _time(bench, latent, 1)
        for _ in range(rounds):  # in turn, so that whatever else this machine does falls on all alike
            for name, bench in benches.items():
                taken, latents[name] = _time(bench, latent, forwards)
                seconds[name].append(taken)
        del benches
    start()
    gc.collect()

    base = min(seconds["resident"])
    times = {name: min(several) for name, several in seconds.items()}
    table = Table(["offloader", "ms a forward", "over resident", "worst round", "same bits"])
    for name, several in seconds.items():
        table.rows.append(
            [
                name,
                f"{times[name] * 1e3:.0f}",
                f"{times[name] / base:.2f}",
                f"{max(several) / base:.2f}",
                yes(torch.equal(latents[name], latents["resident"])),
            ]
        )
    text = [
        f"{subject.name} of {mb(max(subject.block_bytes()))} MB on the emulated accelerator's real clock: the "
        "processor computes, and a thread moves bytes at a set bandwidth, at which all blocks together take twice as "
        f"long as a forward. Best of {rounds} rounds of {forwards} forward, the offloaders in turn, since whatever "
        "else runs on the machine only ever slows them. Only the ratios mean something: copies compete with "
        f"computation for the same processors and memory. The bound is {RATIO:g} with everything streamed and 1 with "
        "half the blocks resident.",
    ]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for i, (name, value) in enumerate(times.items()):
            ratio = value / base
            colour = INK["Greenroom"] if name.startswith("Greenroom") else INK["others"]
            axes.barh(i, ratio, color=colour, height=0.6)
            axes.annotate(f" {ratio:.2f}", (ratio, i), va="center", fontsize=9)
        axes.axvline(1, color="black", linewidth=1)
        axes.axvline(RATIO, color="black", linewidth=1, linestyle="--")
        axes.set_yticks(range(len(times)), [n.replace(", stream", ",\nstream", 1) for n in times])
        axes.invert_yaxis()
        axes.set_xlabel("time of a forward over resident; dashed: the bound with everything streamed (real clock)")
        figure.suptitle(f"{subject.name}, copy/compute {RATIO:g}, on the real clock", x=0.01, ha="left")
        tidy(axes)

    return Result(
        "real_time",
        "One point on the real clock",
        "real",
        "python benchmarks/real_time.py",
        text,
        [(f"Copy/compute {RATIO:g} (real)", table)],
        [],
        draw,
        size=(9, 3.6),
        figures={"seconds": times, "latents": latents},
    )


def _time(bench: Bench, latent: torch.Tensor, forwards: int) -> tuple[float, torch.Tensor]:
    """Seconds a forward, and the last latent on the CPU."""
    emu.synchronize()
    began = time.perf_counter()
    latent = bench.call(forwards, latent)
    emu.synchronize()
    return (time.perf_counter() - began) / forwards, latent.cpu()


if __name__ == "__main__":
    main(run)
