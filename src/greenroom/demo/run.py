"""``greenroom demo``: a picture drawn by a pipeline that does not fit into the device's memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from greenroom.demo.pictures import enlarge
from greenroom.demo.pipeline import CALL_KWARGS, load_pipeline
from greenroom.demo.plots import memory_plot
from greenroom.demo.stage import EmulatedStage, Measurement, Stage, find_stage
from greenroom.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

RESIDENT = "resident"
STRATEGIES: dict[str, dict[str, Any]] = {
    "model-level": {"mode": "module", "components": ["dit", "text_encoder"]},
    "layerwise": {"mode": "layer", "components": ["dit", "text_encoder"]},
}
SEED = 0


def run(prompt: str, out: Path, console: Console, device: str | None = None) -> int:
    """Draws ``prompt`` resident, model-level and layerwise; prints a table, writes pictures and a plot to ``out``.

    Uses the accelerator present, else the emulated one; ``device`` names another. On the emulated one the
    memory is made just too small for the resident pipeline: halfway between the most that a strategy needs
    and what the resident pipeline needs, both measured first.

    Returns 0 if every picture has the same bits as the never-offloaded one, 1 if not, 2 if the demo cannot
    run here (said on ``console``).
    """
    if not prompt.strip():
        console.print('[red]The prompt is empty.[/] Try: greenroom demo "a handwritten seven"')
        return 2
    try:
        stage = find_stage(device)
    except ImportError as error:
        console.print("[yellow]There is no accelerator here, and the emulated one cannot be built:[/]")
        console.print(str(error), markup=False)
        return 2
    except ConfigError as error:
        console.print(str(error), style="red", markup=False)
        return 2
    try:
        return _Show(prompt, out, console, stage).run()
    finally:
        stage.close()


@dataclass(frozen=True)
class _Row:
    name: str
    run: Measurement | None  # None: it did not fit
    same: bool | None


class _Show:
    def __init__(self, prompt: str, out: Path, console: Console, stage: Stage) -> None:
        self._prompt, self._out, self._console, self._stage = prompt, out, console, stage

    def run(self) -> int:
        console, stage = self._console, self._stage
        console.print(f"Drawing [bold]{escape(repr(self._prompt))}[/] on {stage.name}.")
        console.print("(The demo pipeline knows the ten digits and nothing else.)")
        with Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        ) as progress:
            task = progress.add_task("loading the pipeline", total=None)

            def now(what: str) -> None:
                progress.update(task, description=what)

            weights = _weight_bytes(load_pipeline())
            needs = self._needs(now) if isinstance(stage, EmulatedStage) else {}
            capacity = self._limit(needs)
            if needs and capacity is None:
                console.print("[red]Offloading saved no memory here, so there is nothing to show.[/]")
                return 1
            reference = needs[RESIDENT].pixels if needs else None
            rows = []
            for name in (RESIDENT, *STRATEGIES):
                now(f"drawing: {name}")
                measured = self._attempt(name)
                if measured is not None and reference is None and name == RESIDENT:
                    reference = measured.pixels
                same = None
                if measured is not None and reference is not None:
                    same = np.array_equal(measured.pixels, reference)
                rows.append(_Row(name, measured, same))
        self._tell_resident(rows[0], weights, needs.get(RESIDENT), capacity)
        console.print(self._table(rows))
        self._files(rows, needs.get(RESIDENT), capacity)
        failed = [row.name for row in rows[1:] if row.run is None or row.same is False]
        if failed:
            console.print(f"[red]Not as promised: {', '.join(failed)}.[/]")
        return 1 if failed else 0

    def _needs(self, now: Callable[[str], None]) -> dict[str, Measurement]:
        """Every way measured once on a device with room for all of them."""
        needs = {}
        for name in (RESIDENT, *STRATEGIES):
            now(f"measuring what it needs: {name}")
            needs[name] = self._measure(name)
        return needs

    def _limit(self, needs: dict[str, Measurement]) -> int | None:
        if not needs or not isinstance(self._stage, EmulatedStage):
            return None
        least = max(needs[name].peak for name in STRATEGIES)
        most = needs[RESIDENT].peak
        if least >= most:
            return None
        capacity = (least + most) // 2
        self._stage.limit(capacity)
        return capacity

    def _attempt(self, name: str) -> Measurement | None:
        try:
            return self._measure(name)
        except torch.OutOfMemoryError:
            return None

    def _measure(self, name: str) -> Measurement:
        # Loaded anew each time: what one way of placing the pipeline leaves behind must not help the next.
        pipe: Any = load_pipeline()
        handle: Any = None

        def place() -> None:
            nonlocal handle
            if name == RESIDENT:
                pipe.to(self._stage.device)
            else:
                import greenroom

                handle = greenroom.offload(pipe, STRATEGIES[name], device=self._stage.device)

        def draw() -> np.ndarray:
            generator = torch.Generator().manual_seed(SEED)
            with torch.no_grad():
                pixels: np.ndarray = pipe(self._prompt, generator=generator, output_type="np", **CALL_KWARGS).images[0]
            return pixels

        try:
            measured = self._stage.measure(place, draw)
            if measured.moved is None:
                moved = handle.report().copied if handle is not None else _weight_bytes(pipe)
                measured = replace(measured, moved=moved)
            return measured
        finally:
            if handle is not None:
                handle.disable()
            pipe.to("cpu")

    def _tell_resident(self, row: _Row, weights: int, need: Measurement | None, capacity: int | None) -> None:
        if row.run is not None:
            self._console.print(
                f"The whole pipeline ({weights / 1e6:.1f} MB of weights) fits into this device's memory; "
                "watch how much less of it the strategies need."
            )
            return
        room = "less" if capacity is None else f"{capacity / 1e6:.1f} MB"
        wish = f", with its work {need.peak / 1e6:.1f} MB" if need is not None else ""
        self._console.print(
            f"Resident: [yellow]torch.OutOfMemoryError[/], as it should be. The pipeline has {weights / 1e6:.1f} MB of "
            f"weights{wish}, and the device has {room}. Offloaded, it fits:"
        )

    def _table(self, rows: list[_Row]) -> Table:
        table = Table(title="One picture, three ways of placing the pipeline")
        table.add_column("strategy")
        for heading in ("peak device memory", "moved to the device", self._stage.clock):
            table.add_column(heading, justify="right")
        table.add_column("same bits")
        for row in rows:
            if row.run is None:
                table.add_row(row.name, "[yellow]out of memory[/]", "", "", "")
                continue
            moved = "" if row.run.moved is None else f"{row.run.moved / 1e6:.1f} MB"
            same = {True: "[green]yes[/]", False: "[red]NO[/]", None: "not comparable"}[row.same]
            table.add_row(row.name, f"{row.run.peak / 1e6:.1f} MB", moved, f"{row.run.seconds * 1e3:.1f} ms", same)
        if self._stage.emulated:
            table.caption = "Virtual time is modelled by the emulated accelerator, not measured."
        return table

    def _files(self, rows: list[_Row], roomy: Measurement | None, capacity: int | None) -> None:
        console, out = self._console, self._out
        out.mkdir(parents=True, exist_ok=True)
        written: list[tuple[str, Path]] = []
        drawn = [row for row in rows if row.run is not None]
        for row in drawn:
            assert row.run is not None
            image = Image.fromarray((row.run.pixels * 255).round().astype(np.uint8))
            small = out / f"{row.name}-{image.width}x{image.height}.png"
            image.save(small)
            large = out / f"{row.name}.png"
            enlarge(image).save(large)
            written.append(("picture", large))
        runs = {row.name: row.run for row in rows if row.run is not None}
        if RESIDENT not in runs and roomy is not None:
            runs = {f"{RESIDENT}, on a device with room for it": roomy, **runs}
        plot = memory_plot(runs, capacity, self._stage.clock, out / "memory.png")
        if drawn and drawn[-1].run is not None:
            console.print(_in_letters(drawn[-1].run.pixels), highlight=False)
        for kind, path in [*written, ("memory over time", plot)]:
            console.print(f"{kind}: {path}", highlight=False, markup=False, soft_wrap=True)


def _weight_bytes(pipe: Any) -> int:
    modules = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    return sum(weight.nbytes for module in modules for weight in module.parameters())


def _in_letters(pixels: np.ndarray) -> str:
    """The picture in half-block characters, two rows of pixels to a line, dark ink drawn."""
    ink = pixels.mean(axis=2) < 0.5
    glyphs = {(False, False): " ", (True, False): "▀", (False, True): "▄", (True, True): "█"}
    lines = [
        "".join(glyphs[bool(upper), bool(lower)] for upper, lower in zip(ink[i], ink[i + 1], strict=True))
        for i in range(0, len(ink) - 1, 2)
    ]
    return "\n".join(lines)
