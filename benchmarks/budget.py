"""A memory budget through the public door: what one call teaches, what was predicted, what happened.

python benchmarks/budget.py [--quick]
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch

import greenroom.emulator  # noqa: F401 - registers the device
from bench import offloaders as o
from bench.clock import DEVICE, Bench, profile, start, virtual
from bench.report import INK, Gate, Result, Table, main, mb, tidy
from bench.subjects import Subject
from residency import COST, FORWARDS, WARM, block_bytes, grid

emu = torch.emu  # type: ignore[attr-defined]
LEARNING = 3  # forwards of the first call


@dataclass
class Point:
    """One subject, copy/compute ratio and budget.

    Attributes:
        share: of the blocks' bytes, beside what cannot be given up.
        budget: bytes on the device.
        step, predicted: seconds of a forward after one call, measured and predicted.
        peak, predicted_peak: bytes, measured over both calls, and predicted for the second.
        first_peak: bytes at the peak of the first call.
        streamed: blocks that are streamed.
        bound: max(compute, copied bytes / bandwidth) of the measured forwards.
        same: whether the latents are the resident model's to the bit.
    """

    ratio: float
    share: float
    budget: int
    step: float
    predicted: float
    peak: int
    predicted_peak: int
    streamed: int
    bound: float
    same: bool


def sweep(subject: Subject, ratios: tuple[float, ...], shares: tuple[float, ...]) -> list[Point]:
    base = profile(subject, COST, warm=WARM, forwards=FORWARDS)
    sizes = block_bytes(subject)
    total, largest = sum(sizes), max(sizes)
    # What the budget has to hold beside blocks: the rest of the weights and the activations, as the resident run had.
    beside = base.peak - total
    points = []
    for ratio in ratios:
        bandwidth = total / base.compute / ratio
        for share in shares:
            budget = int(1.01 * (beside + min(total, 2 * largest + share * total)))
            points.append(_point(subject, base, ratio, share, budget, bandwidth))
    return points


def _point(subject: Subject, base: Any, ratio: float, share: float, budget: int, bandwidth: float) -> Point:
    virtual(COST, bandwidth)
    emu.reset_peak_memory_stats()
    with o.greenroom_budget(budget)(subject, DEVICE) as running, torch.no_grad():
        bench = Bench(subject, running)
        bench.call(LEARNING, subject.latent.to(DEVICE))
        running.end_call()
        sample = bench.steady(COST, bandwidth, warm=WARM, forwards=FORWARDS)
        report = running.handle.report()
        (component,) = report.components
        (step,) = report.steps
        point = Point(
            ratio=ratio,
            share=share,
            budget=budget,
            step=sample.seconds,
            predicted=step.predicted,
            peak=max(sample.peak, report.peak),
            predicted_peak=report.predicted_peak,
            streamed=component.streamed_blocks,
            bound=sample.bound(base.compute, bandwidth),
            same=torch.equal(sample.latent, base.reference),
        )
        del bench, running
    gc.collect()
    emu.empty_cache()
    return point


def run(quick: bool = False) -> Result:
    subjects, ratios, shares = grid(quick)
    start(races=quick, poison=quick)
    swept = {name: sweep(subject, ratios, shares) for name, subject in subjects.items()}
    start()
    text = [
        "`greenroom.offload(pipe, {...}, memory=budget)`, one call to learn from, then the forwards that are measured. "
        "The budget holds everything: the weights outside the blocks, the activations, and for blocks two of the "
        "largest (share 0) plus a share of the bytes of all blocks.",
        "Predicted is what the report said after the first call, for a forward in the steady state and for the peak. "
        "Peak is the highest of both calls.",
        f"Cost model: {COST}. The models are small, and the modelled chip slow in proportion.",
    ]
    tables = [(f"{subject.name} (virtual)", _table(swept[name])) for name, subject in subjects.items()]
    every = [p for points in swept.values() for p in points]
    gates = [
        Gate("peak over budget, every point", max(p.peak / p.budget for p in every), 1.0),
        Gate("step off its prediction, every point", max(abs(p.step / p.predicted - 1) for p in every), 0.05),
        Gate("peak off its prediction, every point", max(abs(p.predicted_peak / p.peak - 1) for p in every), 0.02),
        Gate("over the bound, equal blocks, every point", max(p.step / p.bound for p in swept["equal"]), 1.02),
        Gate("outputs that differ", sum(not p.same for p in every), 0),
    ]
    if not quick:  # on the reduced grid the models have too few blocks to spread
        unequal = [p for name, points in swept.items() if name != "equal" for p in points if p.share > 0]
        gates.append(
            Gate("over the bound, unequal blocks, every share above 0", max(p.step / p.bound for p in unequal), 1.05)
        )
    return Result(
        "budget",
        "A memory budget: predicted and measured",
        "virtual",
        "python benchmarks/budget.py",
        text,
        tables,
        gates,
        lambda figure: _draw(figure, swept),
        size=(10, 4),
        figures={name: {(p.ratio, p.share): p for p in points} for name, points in swept.items()},
    )


def _table(points: list[Point]) -> Table:
    table = Table(
        [
            "copy/compute",
            "share",
            "budget, MB",
            "peak, MB",
            "predicted, MB",
            "blocks streamed",
            "a forward, ms",
            "predicted, ms",
            "over bound",
            "same bits",
        ]
    )
    for p in points:
        table.rows.append(
            [
                f"{p.ratio:g}",
                f"{p.share:.0%}",
                mb(p.budget),
                mb(p.peak),
                mb(p.predicted_peak),
                str(p.streamed),
                f"{p.step * 1e3:.2f}",
                f"{p.predicted * 1e3:.2f}",
                f"{p.step / p.bound:.3f}",
                "yes" if p.same else "**no**",
            ]
        )
    return table


def _draw(figure: Any, swept: dict[str, list[Point]]) -> None:
    axes = figure.subplots(1, len(swept), sharey=True)
    for axis, (name, points) in zip(axes, swept.items(), strict=True):
        for ratio in sorted({p.ratio for p in points}):
            line = [p for p in points if p.ratio == ratio]
            axis.plot(
                [p.budget / 1e6 for p in line],
                [p.step / line[-1].bound for p in line],
                marker="o",
                color=INK["Greenroom"],
                alpha=0.3 + 0.2 * ratio,
                label=f"copy/compute {ratio:g}",
            )
        axis.set_title(name, loc="left")
        axis.set_xlabel("budget, MB")
        tidy(axis)
    axes[0].set_ylabel("a forward over everything resident")
    axes[0].legend(frameon=False)


if __name__ == "__main__":
    main(run)
