"""Timed forwards as a picture: whether the bus or the chip is the limit should be seen at a glance."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from greenroom.strategies.probe import Timing

_COLOURS = {"compute": "#2a6f97", "copy": "#e07a2f"}
_ROWS = {"compute": 1.0, "copy": 0.0}


def plot_timings(timings: Mapping[str, Timing], path: Path, *, budget: int | None = None) -> None:
    """Draws one row of lanes and one of memory for each component.

    Args:
        timings: component name -> its timed forward.
        path: the picture to write.
        budget: device bytes to draw a line at.
    """
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        2 * len(timings),
        1,
        figsize=(11, 3.4 * len(timings)),
        height_ratios=[1, 1.2] * len(timings),
        squeeze=False,
        layout="constrained",
    )
    for row, (name, timing) in enumerate(timings.items()):
        _lanes(axes[2 * row][0], name, timing)
        _memory(axes[2 * row + 1][0], timing, budget)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _lanes(axis: Any, name: str, timing: Timing) -> None:
    for lane, _, start, end, _ in timing.lanes:
        axis.broken_barh(
            [(start * 1e3, (end - start) * 1e3)],
            (_ROWS[lane] + 0.1, 0.8),
            facecolors=_COLOURS[lane],
            edgecolor="white",
            linewidth=0.5,
        )
    busy = {lane: sum(e - s for kind, _, s, e, _ in timing.lanes if kind == lane) for lane in _ROWS}
    share = {lane: seconds / timing.forward_s if timing.forward_s else 0.0 for lane, seconds in busy.items()}
    axis.set_yticks([0.5, 1.5], [f"copy ({share['copy']:.0%} busy)", f"compute ({share['compute']:.0%} busy)"])
    axis.set_xlim(0, max(timing.forward_s * 1e3, 1e-6))
    limit = "the bus is the limit" if busy["copy"] > busy["compute"] else "the chip is the limit"
    axis.set_title(f"{name}: one forward, {timing.forward_s * 1e3:.3g} ms; {limit}", loc="left")


def _memory(axis: Any, timing: Timing, budget: int | None) -> None:
    if timing.memory:
        times = [seconds * 1e3 for seconds, _ in timing.memory]
        axis.step(times, [nbytes / 1e6 for _, nbytes in timing.memory], where="post", color="#444444")
    if budget is not None:
        axis.axhline(budget / 1e6, color="#b00020", linestyle="--", linewidth=1)
        axis.annotate("budget", (0, budget / 1e6), color="#b00020", va="bottom")
    axis.set_ylim(bottom=0)
    axis.set_xlim(0, max(timing.forward_s * 1e3, 1e-6))
    axis.set_xlabel("ms")
    axis.set_ylabel("device, MB")
