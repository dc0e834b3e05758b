"""Everything streamed: how close each offloader comes to what the link and the chip allow.

python benchmarks/streaming.py [--quick]
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from bench import offloaders as o
from bench.clock import CostModel, Sample, measure, profile, start
from bench.report import INK, Gate, Result, Table, main, mb, tidy, yes
from bench.subjects import wan

COST = CostModel(flops=100e9, membw=400e9, launch=2e-6, kernel_latency=2e-6, copy_latency=10e-6)
RATIOS = (0.5, 1.0, 2.0)
GREENROOM = "Greenroom, layerwise"
LIMIT = 1.03
OFFLOADERS: dict[str, tuple[o.Offloader, bool]] = {  # and whether the model moves once a call
    GREENROOM: (o.greenroom_layerwise(), False),
    "diffusers group, block, stream": (o.group_offload("block_level", stream=True), False),
    "diffusers group, block, stream, record_stream": (o.group_offload("block_level", stream=True, record=True), False),
    "diffusers group, leaf": (o.group_offload("leaf_level", stream=False), False),
    "diffusers group, leaf, stream": (o.group_offload("leaf_level", stream=True), False),
    "diffusers group, leaf, stream, record_stream": (o.group_offload("leaf_level", stream=True, record=True), False),
    "diffusers sequential (accelerate cpu_offload)": (o.sequential_offload, False),
    "diffusers model (accelerate cpu_offload_with_hook)": (o.model_offload, True),
}


def run(quick: bool = False) -> Result:
    subject = wan(16, 128, 4) if quick else wan(24, 640, 4)
    cost = dataclasses.replace(COST, flops=5e9) if quick else COST
    forwards = 4
    offloaders = OFFLOADERS
    if quick:
        offloaders = {k: v for k, v in OFFLOADERS.items() if "leaf" not in k and "sequential" not in k}
    start(races=True, poison=quick)
    base = profile(subject, cost, forwards=forwards)
    streamed = sum(subject.block_bytes())
    bandwidths = [streamed / base.compute / ratio for ratio in RATIOS]
    reference = base.reference
    samples: dict[str, list[Sample]] = {}
    for name, (offloader, whole_call) in offloaders.items():
        samples[name] = measure(subject, offloader, cost, bandwidths, whole_call=whole_call, forwards=forwards)
    start()

    tables = []
    for i, ratio in enumerate(RATIOS):
        table = Table(
            [
                "offloader",
                "ms a forward",
                "bound, ms",
                "over bound",
                "over resident",
                "copied, MB",
                "copies",
                "copied back, MB",
                "peak, MB",
                "same bits",
                "races",
            ]
        )
        table.rows.append(
            [
                "resident",
                f"{base.compute * 1e3:.2f}",
                "",
                "",
                "1.000",
                "0.0",
                "0",
                "0.0",
                mb(base.peak),
                "reference",
                "0",
            ]
        )
        for name, several in samples.items():
            s = several[i]
            bound = s.bound(base.compute, bandwidths[i])
            table.rows.append(
                [
                    name,
                    f"{s.seconds * 1e3:.2f}",
                    f"{bound * 1e3:.2f}",
                    f"{s.seconds / bound:.3f}",
                    f"{s.seconds / base.compute:.3f}",
                    mb(s.copied),
                    f"{s.copies:.0f}",
                    mb(s.returned),
                    mb(s.peak),
                    yes(torch.equal(s.latent, reference)),
                    str(s.races),
                ]
            )
        tables.append((f"Copy/compute {ratio:g} (link {bandwidths[i] / 1e9:.2f} GB/s, virtual)", table))
    over = {
        name: [s.seconds / s.bound(base.compute, b) for s, b in zip(several, bandwidths, strict=True)]
        for name, several in samples.items()
    }
    ours = samples[GREENROOM]
    gates = [
        Gate(f"Greenroom over the bound at copy/compute {r:g}", f, LIMIT)
        for r, f in zip(RATIOS, over[GREENROOM], strict=True)
    ]
    gates.append(Gate("Greenroom outputs that differ", sum(not torch.equal(s.latent, reference) for s in ours), 0))
    gates.append(Gate("races in Greenroom", sum(s.races for s in ours), 0))
    text = [
        f"{subject.name} of {max(subject.block_bytes()) / 1e6:.1f} MB; nothing of the blocks stays on the device. The "
        f"bandwidth of the link is chosen so that copying all blocks takes 0.5, 1 and 2 times as long as computing a "
        f"forward ({base.compute * 1e3:.2f} ms, measured with the model resident).",
        "Time is that of a forward in the steady state. The bound is max(compute, copied bytes / bandwidth) with the "
        "bytes that the offloader itself copied. Model offload moves the whole model at the start and back at the end "
        f"of each call: its time is a whole call of {forwards} forwards, divided by {forwards}. Pageable memory is "
        "copied as fast as pinned memory here, which flatters offloaders that do not pin. With record_stream the host "
        "runs ahead, and memory that it has freed stays taken until the device is done with it: where the link is "
        "fast, that is more than the whole model.",
        f"Cost model: {cost}.",
    ]

    def draw(figure: Any) -> None:
        times, peaks = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        names = list(over)
        height = 0.8 / len(RATIOS)
        for i, ratio in enumerate(RATIOS):
            for j, name in enumerate(names):
                colour = INK["Greenroom"] if name == GREENROOM else INK["others"]
                at = j + (i - 1) * height
                peak = samples[name][i].peak / 1e6
                for axes, value, text in (
                    (times, over[name][i], f"{over[name][i]:.2f} at copy/compute {ratio:g}"),
                    (peaks, peak, f"{peak:.0f}"),
                ):
                    axes.barh(at, value, height * 0.9, color=colour, alpha=0.5 + 0.25 * i)
                    axes.annotate(text, (value, at), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7)
        times.axvline(1, color="black", linewidth=1)
        times.set_yticks(range(len(names)), [n.replace(", stream", ",\nstream", 1).replace(" (", "\n(") for n in names])
        times.invert_yaxis()
        times.set_xlim(0, max(max(v) for v in over.values()) * 1.35)
        times.set_xlabel("time of a forward over max(compute, copies);\n1 is the best possible (virtual clock)")
        whole = base.peak / 1e6
        peaks.axvline(whole, color="black", linewidth=1, linestyle="--")
        peaks.annotate(" resident", (whole, -0.55), fontsize=7, va="center")
        peaks.set_xlim(0, max(s.peak for several in samples.values() for s in several) / 1e6 * 1.15)
        peaks.set_xlabel("peak device memory, MB")
        figure.suptitle(f"Everything streamed: {subject.name}", x=0.01, ha="left")
        tidy(times)
        tidy(peaks)

    return Result(
        "streaming",
        "Everything streamed",
        "virtual",
        "python benchmarks/streaming.py",
        text,
        tables,
        gates,
        draw,
        size=(11, 7.5),
        figures={"over": over, "samples": samples},
    )


if __name__ == "__main__":
    main(run)
