"""The demo's one plot: device memory over time, a panel per strategy, the device's capacity across all of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from greenroom.demo.stage import Measurement

MB = 1e6
INK, LIMIT = "#3a6ea5", "#c0392b"


def memory_plot(runs: Mapping[str, Measurement], capacity: int | None, clock: str, path: Path) -> Path:
    """Draws each run's allocated bytes (MB) over ``clock`` (ms) and writes the figure. Returns ``path``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        len(runs), 1, sharex=True, sharey=True, figsize=(9, 1.9 * len(runs) + 0.8), layout="constrained"
    )
    for index, (panel, (name, run)) in enumerate(zip(_several(panels), runs.items(), strict=True)):
        times = [moment * 1e3 for moment, _ in run.samples]
        memory = [allocated / MB for _, allocated in run.samples]
        panel.fill_between(times, memory, step="post", color=INK, alpha=0.35, linewidth=0)
        panel.step(times, memory, where="post", color=INK, linewidth=0.7)
        if capacity is not None:
            panel.axhline(capacity / MB, color=LIMIT, linestyle="--", linewidth=1.2)
            if index == len(runs) - 1:  # the emptiest panel
                panel.annotate(
                    f"capacity {capacity / MB:.1f} MB",
                    (1, capacity / MB),
                    xycoords=("axes fraction", "data"),
                    xytext=(-4, 3),
                    textcoords="offset points",
                    color=LIMIT,
                    ha="right",
                    fontsize="small",
                )
        panel.set_title(f"{name}: peak {run.peak / MB:.1f} MB", loc="left", fontsize="medium")
        panel.set_ylabel("MB")
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(x=0)
        panel.set_ylim(bottom=0)
    _several(panels)[-1].set_xlabel(f"{clock} (ms)")
    figure.suptitle("Device memory while one picture is drawn", fontsize="large")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


def _several(panels: Any) -> list[Any]:
    return panels.tolist() if hasattr(panels, "tolist") else [panels]
