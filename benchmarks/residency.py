"""Part of the blocks resident: what a device budget buys, for equal and for unequal blocks.

python benchmarks/residency.py [--quick]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from bench import offloaders as o
from bench.clock import DEVICE, CostModel, Profile, Sample, measure, profile, start, virtual
from bench.report import INK, Gate, Result, Table, main, mb, tidy
from bench.subjects import Subject, flux2, sd35_medium, wan
from greenroom.residency import Block, Residency, TransferCurve, choose

COST = CostModel(flops=10e9, membw=400e9, launch=2e-6, kernel_latency=2e-6, copy_latency=10e-6)
RATIOS = (0.5, 1.0, 2.0, 3.0)
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
EQUAL, UNEQUAL = 1.02, 1.05
PREDICTED = 1.02
WARM, FORWARDS = 3, 4
GROUP = {
    "diffusers group, block, stream": o.group_offload("block_level", stream=True),
    "diffusers group, leaf, stream, record_stream": o.group_offload("leaf_level", stream=True, record=True),
}


@dataclass
class Point:
    """One subject at one copy/compute ratio and budget.

    Attributes:
        share: of the blocks' bytes, beside two slots of the largest block.
        budget: bytes for blocks: residents and arena.
        bandwidth: bytes a second.
        compute: seconds of a forward with everything resident.
        plan: what Greenroom chose; ours: what it took.
        streamed: everything streamed; head: as many of the first blocks as fit beside two slots.
        same: whether all outputs are the resident model's to the bit.
    """

    ratio: float
    share: float
    budget: int
    bandwidth: float
    compute: float
    plan: Residency
    ours: Sample
    streamed: Sample
    head: Sample
    same: bool

    def over(self, sample: Sample) -> float:
        return sample.seconds / sample.bound(self.compute, self.bandwidth)


def grid(quick: bool) -> tuple[dict[str, Subject], tuple[float, ...], tuple[float, ...]]:
    """Subjects by name, copy/compute ratios, and shares of the blocks' bytes."""
    subjects = {
        "equal": wan(24, 128, 4),
        "FLUX.2": flux2(2, 8, 4, 4) if quick else flux2(8, 48, 4, 4),
        "SD3.5 Medium": sd35_medium(5, 4, 4, 4) if quick else sd35_medium(13, 10, 4, 4),
    }
    return (subjects, (2.0,), (0.0, 0.5)) if quick else (subjects, RATIOS, SHARES)


def block_bytes(subject: Subject) -> list[int]:
    """Bytes of each block on the device, alignment included."""
    virtual(COST)
    with o.greenroom_residents((), None)(subject, DEVICE) as running:
        return list(running.block_bytes)


def head_first(sizes: list[int], budget: int) -> tuple[list[int], int]:
    """As many leading blocks as fit, and an arena of two of the largest that are left."""
    count, arena = 0, 2 * max(sizes)
    for n in range(len(sizes) + 1):
        slots = 2 * max(sizes[n:], default=0)
        if sum(sizes[:n]) + slots <= budget:
            count, arena = n, slots
    return list(range(count)), arena


def sweep(subject: Subject, base: Profile, ratios: tuple[float, ...], shares: tuple[float, ...]) -> list[Point]:
    sizes = block_bytes(subject)
    total, largest = sum(sizes), max(sizes)
    blocks = [Block(size, compute) for size, compute in zip(sizes, base.blocks, strict=True)]
    points = []
    for ratio in ratios:
        bandwidth = total / base.compute / ratio
        curve = TransferCurve(COST.copy_latency, bandwidth)

        def run(resident: Any, arena: int, bandwidth: float = bandwidth) -> Sample:
            offloader = o.greenroom_residents(resident, arena or None)
            return measure(subject, offloader, COST, [bandwidth], warm=WARM, forwards=FORWARDS)[0]

        streamed = run((), 2 * largest)
        for share in shares:
            budget = min(total, int(2 * largest + share * total))
            plan = choose(blocks, budget, curve, gap_s=base.gap)
            ours = run(plan.resident, plan.arena_bytes)
            residents, arena = head_first(sizes, budget)
            head = run(residents, arena) if residents and len(residents) < len(sizes) else streamed
            if len(residents) == len(sizes):
                head = ours
            same = all(torch.equal(s.latent, base.reference) for s in (ours, streamed, head))
            points.append(Point(ratio, share, budget, bandwidth, base.compute, plan, ours, streamed, head, same))
    return points


def run(quick: bool = False) -> Result:
    subjects, ratios, shares = grid(quick)
    start(races=quick, poison=quick)
    swept: dict[str, list[Point]] = {}
    others: dict[str, dict[str, list[Sample]]] = {}
    tables = []
    for name, subject in subjects.items():
        base = profile(subject, COST, warm=WARM, forwards=FORWARDS)
        points = swept[name] = sweep(subject, base, ratios, shares)
        bandwidths = [p.bandwidth for p in points if p.share == shares[0]]
        others[name] = {
            label: measure(subject, offloader, COST, bandwidths, warm=WARM, forwards=FORWARDS)
            for label, offloader in ({} if quick else GROUP).items()
        }
        tables.append((f"{subject.name} (virtual; resident: {base.compute * 1e3:.2f} ms)", _table(points)))
        if others[name]:
            tables.append((f"{subject.name}: diffusers, which takes no budget", _others(points, others[name], ratios)))
    start()

    text = [
        "A budget holds the resident blocks and the arena through which the others pass: two of the largest block "
        "(share 0, where nothing can stay) plus a share of the bytes of all blocks, at most all of them. Each is run "
        "three ways: Greenroom's choice of residents and arena, from the measured compute time of each block and the "
        "copy time; the head of the list resident, two slots for the rest; and everything streamed through two slots.",
        "The bound is max(compute, copied bytes / bandwidth) of the run itself. Predicted is what Greenroom's "
        "arithmetic said before the run. All outputs are compared with the resident model's bit for bit; races are "
        "looked for on the reduced grid.",
        f"Cost model: {COST}. The models are small, and the modelled chip slow in proportion.",
    ]
    figures = {name: {(p.ratio, p.share): p for p in points} for name, points in swept.items()}
    return Result(
        "residency",
        "What a device budget buys",
        "virtual",
        "python benchmarks/residency.py",
        text,
        tables,
        _gates(swept),
        lambda figure: _draw(figure, swept, others),
        size=(10, 11),
        figures=figures,
    )


def _gates(swept: dict[str, list[Point]]) -> list[Gate]:
    def worst(points: list[Point]) -> float:
        return max(p.over(p.ours) for p in points if p.share > 0)

    unequal = [p for name, points in swept.items() if name != "equal" for p in points]
    every = [*swept["equal"], *unequal]
    half = next(p for p in swept["equal"] if p.ratio == 2 and p.share == 0.5)
    return [
        Gate("over the bound, equal blocks, every share above 0", worst(swept["equal"]), EQUAL),
        Gate("over the bound, unequal blocks, every share above 0", worst(unequal), UNEQUAL),
        Gate("measured over predicted, every point", max(p.ours.seconds / p.plan.step_s for p in every), PREDICTED),
        Gate(
            "faster than all streamed, equal, copy/compute 2, half resident",
            half.streamed.seconds / half.ours.seconds,
            1.8,
            at_least=True,
        ),
        Gate(
            "faster than head first, equal, copy/compute 2, half resident",
            half.head.seconds / half.ours.seconds,
            1.35,
            at_least=True,
        ),
        Gate(
            "slower than head first at the same budget, anywhere",
            max(p.ours.seconds / p.head.seconds for p in every),
            1.001,
        ),
        Gate("races", sum(s.races for p in every for s in (p.ours, p.head, p.streamed)), 0),
        Gate("outputs that differ", sum(not p.same for p in every), 0),
    ]


def _table(points: list[Point]) -> Table:
    table = Table(
        [
            "copy/compute",
            "share",
            "budget, MB",
            "residents",
            "arena, MB",
            "Greenroom, ms",
            "predicted, ms",
            "over bound",
            "peak, MB",
            "head first, ms",
            "peak, MB",
            "all streamed, ms",
            "peak, MB",
            "faster than head first",
            "than all streamed",
            "same bits",
        ]
    )
    for p in points:
        table.rows.append(
            [
                f"{p.ratio:g}",
                f"{p.share:.0%}",
                mb(p.budget),
                str(len(p.plan.resident)),
                mb(p.plan.arena_bytes),
                f"{p.ours.seconds * 1e3:.2f}",
                f"{p.plan.step_s * 1e3:.2f}",
                f"{p.over(p.ours):.3f}",
                mb(p.ours.peak),
                f"{p.head.seconds * 1e3:.2f}",
                mb(p.head.peak),
                f"{p.streamed.seconds * 1e3:.2f}",
                mb(p.streamed.peak),
                f"{p.head.seconds / p.ours.seconds:.2f}",
                f"{p.streamed.seconds / p.ours.seconds:.2f}",
                "yes" if p.same else "**no**",
            ]
        )
    return table


def _others(points: list[Point], samples: dict[str, list[Sample]], ratios: tuple[float, ...]) -> Table:
    table = Table(["offloader", "copy/compute", "ms", "over bound", "over resident", "peak, MB"])
    for name, several in samples.items():
        for ratio, s in zip(ratios, several, strict=True):
            p = next(p for p in points if p.ratio == ratio)
            table.rows.append(
                [
                    name,
                    f"{ratio:g}",
                    f"{s.seconds * 1e3:.2f}",
                    f"{p.over(s):.3f}",
                    f"{s.seconds / p.compute:.3f}",
                    mb(s.peak),
                ]
            )
    return table


def _draw(figure: Any, swept: dict[str, list[Point]], others: dict[str, dict[str, list[Sample]]]) -> None:
    ratios = sorted({p.ratio for points in swept.values() for p in points})
    panels = figure.subplots(len(ratios), len(swept), sharex=True, sharey="row", squeeze=False)
    for column, (name, points) in enumerate(swept.items()):
        for row, ratio in enumerate(ratios):
            axes = panels[row][column]
            here = [p for p in points if p.ratio == ratio]
            shares = [100 * p.share for p in here]
            unit = here[0].compute
            axes.plot(
                shares, [p.streamed.seconds / unit for p in here], ":", color=INK["all streamed"], label="all streamed"
            )
            for (label, several), style in zip(others[name].items(), ("--", "-."), strict=False):
                value = several[ratios.index(ratio)].seconds / unit
                axes.axhline(value, color=INK["resident"], linestyle=style, linewidth=1, label=label)
            axes.plot(shares, [p.head.seconds / unit for p in here], "s-", color=INK["head first"], label="head first")
            axes.plot(shares, [p.ours.seconds / unit for p in here], "o-", color=INK["Greenroom"], label="Greenroom")
            axes.axhline(1, color="black", linewidth=0.7)
            axes.set_ylim(bottom=1 - 0.07 * (axes.get_ylim()[1] - 1))
            axes.set_title(f"{name}, copy/compute {ratio:g}", loc="left", fontsize=9)
            if column == 0:
                axes.set_ylabel("time over resident")
            if row == len(ratios) - 1:
                axes.set_xlabel("budget: share of the blocks (%)")
            tidy(axes)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.suptitle("Time of a forward by device budget (virtual clock)", x=0.01, ha="left")


if __name__ == "__main__":
    main(run)
