"""Results as Markdown and pictures."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "results"
INK = {
    "Greenroom": "#1b7f5c",
    "head first": "#c77c2a",
    "all streamed": "#7b6fb0",
    "resident": "#8a8a8a",
    "others": "#b9c4cf",
}


@dataclass(frozen=True)
class Gate:
    """A figure that must not get worse than a limit.

    Attributes:
        name: what is held to it.
        figure: the worst one measured.
        limit: the worst one accepted.
        at_least: the figure must not be below the limit; else not above it.
    """

    name: str
    figure: float
    limit: float
    at_least: bool = False

    @property
    def holds(self) -> bool:
        return self.figure >= self.limit if self.at_least else self.figure <= self.limit

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        return f"{'holds' if self.holds else '**FAILS**'}: {self.name}: {self.figure:.3f} ({sign} {self.limit:g})"


@dataclass
class Table:
    """Rows of equal length under a header."""

    header: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)

    def markdown(self) -> str:
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


@dataclass
class Result:
    """One benchmark's outcome.

    Attributes:
        name: of the files.
        title: of the page.
        clock: "virtual" (modelled on the emulator's virtual clock) or "real".
        command: what reproduces it.
        text: paragraphs above the tables.
        tables: (heading, table).
        gates: what must hold.
        draw: draws the picture onto a matplotlib figure.
        size: inches of the picture.
        figures: the plain numbers, for tests.
    """

    name: str
    title: str
    clock: str
    command: str
    text: list[str]
    tables: list[tuple[str, Table]]
    gates: list[Gate]
    draw: Callable[[Any], None]
    size: tuple[float, float] = (9.0, 5.0)
    figures: dict[Any, Any] = field(default_factory=dict)

    def markdown(self) -> str:
        import torch

        parts = [f"# {self.title}"]
        meaning = {
            "virtual": "All times are **virtual**: modelled on the emulated accelerator's clock; exact and repeatable.",
            "real": "All times are **real**: measured with this machine's clock, and different from run to run.",
        }[self.clock]
        parts.append(f"{meaning} Command: `{self.command}` (torch {torch.__version__}, {platform.machine()}).")
        parts += self.text
        for heading, table in self.tables:
            parts += [f"## {heading}", table.markdown()]
        if self.gates:
            parts += ["## Gates", "\n".join(f"- {gate}" for gate in self.gates)]
        parts.append(f"![{self.title}]({self.name}.png)")
        return "\n\n".join(parts) + "\n"

    def write(self, folder: Path = RESULTS) -> None:
        """Writes `name`.md and `name`.png."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.md").write_text(self.markdown())
        figure = pyplot.figure(figsize=self.size, layout="constrained")
        self.draw(figure)
        figure.savefig(folder / f"{self.name}.png", dpi=130)
        pyplot.close(figure)


def main(run: Callable[..., Result]) -> None:
    """Runs one benchmark as a script: prints its page, and writes it unless --quick is among the words."""
    import torch

    from .subjects import quieten

    torch.set_num_threads(1)  # the models are small: more threads would wait for each other
    quieten()
    quick = "--quick" in sys.argv
    result = run(quick=quick)
    print(result.markdown())
    if not quick:
        result.write()


def tidy(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.1f}"


def yes(value: bool) -> str:
    return "yes" if value else "**no**"
