"""What `offload()` returns: a look inside, and the way back."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from greenroom.config import OffloadConfig
from greenroom.discovery import DIT
from greenroom.distributed.ranks import Standing
from greenroom.errors import BudgetExceeded, ConfigError, OffloadError
from greenroom.memory import Memory, format_bytes
from greenroom.strategies.budget import MemoryKeeper
from greenroom.strategies.calls import running, unwatch
from greenroom.strategies.in_common import CommonKeeper
from greenroom.strategies.parts import Part
from greenroom.strategies.peaks import Peaks
from greenroom.strategies.probe import Timing
from greenroom.strategies.runtime import Runtime, reference_to
from greenroom.strategies.sleep import fall_asleep, wake_up


@dataclass(frozen=True)
class ComponentReport:
    """One component of the pipeline; all figures in bytes.

    Attributes:
        name: its dotted path from the pipeline.
        role: "dit", "text_encoder", "image_encoder", "vae", "companion" or "other".
        placement: "resident", "swap" or "stream".
        weights: all parameters and buffers, shared ones once.
        resident: what stays on the device.
        moved: what this process copies to the device when the component is used once.
        blocks: number of blocks known.
        streamed_blocks: number of blocks that pass through the arena.
        pageable: host bytes that are not pinned; they reach the device through the staging ring.
        note: what could not be moved and stays on the device, and whether blocks are gathered from several ranks.
    """

    name: str
    role: str
    placement: str
    weights: int
    resident: int
    moved: int
    blocks: int
    streamed_blocks: int
    pageable: int = 0
    note: str = ""


@dataclass(frozen=True)
class StepReport:
    """One forward of a DiT in the steady state; seconds on the device's clock.

    Attributes:
        name: the component.
        predicted: what the plan expects.
        bound: what no schedule beats: the larger of computing and copying.
        measured: the latest timed forward.
        compute: of it, computing.
        stall: of it, waiting for copies.
        bus_idle: share of it in which nothing was copied.
    """

    name: str
    predicted: float
    bound: float
    measured: float
    compute: float
    stall: float
    bus_idle: float


@dataclass(frozen=True)
class Report:
    """What an offload keeps where; all figures in bytes.

    Attributes:
        strategy: "model-level", "layerwise" or "distributed-layerwise".
        device: where the pipeline computes.
        components: one line for each component.
        arena: device bytes through which streamed blocks pass.
        pinned: page-locked host bytes.
        pageable: host bytes that are not locked.
        device_weights: the most device bytes that weights take at any one time, activations not counted.
        copied: bytes copied to the device since the offload was enabled.
        misses: blocks that were needed before they had been fetched.
        why: how the strategy was chosen.
        budget: device bytes to keep within, None without a budget. The fields below are filled with a budget only.
        predicted_peak: device bytes at the peak of a call, None before a call was measured.
        peak: device bytes at the highest peak since the budget was set.
        latest_peak: the same of the latest call.
        out_of_memory: how often a component ran out of memory and was run again with less on the device.
        steps: for each DiT whose forward was timed, what was predicted and measured.
        asleep: whether the offload sleeps; what is said of the device then holds again after `wake`.
    """

    strategy: str
    device: str
    components: tuple[ComponentReport, ...]
    arena: int
    pinned: int
    pageable: int
    device_weights: int
    copied: int
    misses: int
    why: str = ""
    budget: int | None = None
    predicted_peak: int | None = None
    peak: int = 0
    latest_peak: int = 0
    out_of_memory: int = 0
    steps: tuple[StepReport, ...] = ()
    asleep: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The same as plain JSON types."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{self.strategy} on {self.device}: at most {format_bytes(self.device_weights)} of weights on the device "
            f"(arena {format_bytes(self.arena)}), host {format_bytes(self.pinned)} pinned, "
            f"{format_bytes(self.pageable)} pageable"
        ]
        for c in self.components:
            blocks = f", {c.streamed_blocks} of {c.blocks} blocks streamed" if c.placement == "stream" else ""
            lines.append(
                f"  {c.name:<24} {c.role:<14} {c.placement:<9} {format_bytes(c.weights):>10}, "
                f"{format_bytes(c.resident)} resident, {format_bytes(c.moved)} moved a pass{blocks}"
                + (f", {format_bytes(c.pageable)} pageable" if c.pageable else "")
                + (f"; {c.note}" if c.note else "")
            )
        if self.asleep:
            lines.append("  asleep: nothing of it is on the device until wake()")
        if self.budget is not None:
            predicted = "not yet known" if self.predicted_peak is None else format_bytes(self.predicted_peak)
            lines.append(
                f"  budget {format_bytes(self.budget)}: peak {predicted} predicted, {format_bytes(self.peak)} measured"
                + (f", ran out of memory {self.out_of_memory} times" if self.out_of_memory else "")
            )
        for s in self.steps:
            lines.append(
                f"  {s.name}: a forward takes {_ms(s.measured)} measured, {_ms(s.predicted)} predicted, "
                f"{_ms(s.bound)} at best; {_ms(s.stall)} of it waiting for copies, the bus idle {s.bus_idle:.0%} of it"
            )
        if self.why:
            lines.append(f"  {self.why}")
        return "\n".join(lines)


class Handle:
    """An enabled offload. Dropping the handle changes nothing; `disable` undoes the offload."""

    def __init__(
        self, pipeline: Any, runtime: Runtime, config: OffloadConfig, renew: Callable[[Any, Runtime], Handle]
    ) -> None:
        self._renew = renew  # `api.renew`, which this room lies below
        self._pipeline = reference_to(pipeline)
        self._runtime = weakref.ref(runtime)
        self.config = config

    @property
    def enabled(self) -> bool:
        runtime = self._current()
        return runtime is not None and runtime.enabled

    def _current(self) -> Runtime | None:
        """The runtime, or the one that took its place when a pipeline that shares components was offloaded."""
        runtime = self._runtime()
        if runtime is None or not runtime.enabled:
            reference = getattr(self._pipeline(), "__dict__", {}).get("_greenroom", lambda: None)
            found = reference()
            if found is not None and found.enabled and found.config == self.config:
                self._runtime, runtime = reference, found
        return runtime

    def _enabled_runtime(self) -> Runtime:
        runtime = self._current()
        if runtime is None or not runtime.enabled:
            raise OffloadError("this offload was disabled, or its pipeline is gone; call greenroom.offload again")
        runtime.require_staying()
        return runtime

    @property
    def ranks(self) -> Standing | None:
        """How the ranks that share the weights stand; None where nothing is shared.

        Raises:
            OffloadError: the offload is no longer enabled.
        """
        sharing = self._enabled_runtime().sharing
        return None if sharing is None else sharing.standing

    def report(self) -> Report:
        """What is where, and what was moved so far.

        Raises:
            OffloadError: the offload is no longer enabled.
        """
        return report_of(self._enabled_runtime())

    def set_memory(self, memory: int | float | str | None) -> None:
        """Changes the memory budget between two calls: blocks move out or in, nothing is loaded anew.

        Args:
            memory: "12GiB", bytes, "80%", or None for what is free now, less a reserve.

        Raises:
            ConfigError: not an amount, or nothing fits into it; the old budget stays.
            OffloadError: the offload has no budget, it sleeps, or a call is running.
        """
        runtime = self._enabled_runtime()
        budget = None if memory is None else Memory.parse(memory, "memory")
        keeper = runtime.keeper
        if not isinstance(keeper, MemoryKeeper | CommonKeeper):
            raise OffloadError(
                "set_memory: this offload was enabled without a budget; call greenroom.offload(pipe, memory=...)"
            )
        runtime.require_awake()
        with runtime.occupancy.lock:
            require_between_calls(runtime, "set_memory()")
            with memory_as_given(budget):
                keeper.set_budget(runtime, budget)
            runtime.memory_since = (memory,)

    def refuse_excess(self) -> None:
        """From now on a call that the budget cannot hold raises BudgetExceeded, which says what would do.

        Otherwise such a call is served with as little of the weights as possible, and a warning is given. Inputs
        larger than any before are judged by an estimate from their shapes, which refuses what is certainly too much;
        what turns out to be too much later is told by `raise_excess`. Nothing to do without a budget.
        """
        keeper = self._enabled_runtime().keeper
        if isinstance(keeper, MemoryKeeper):
            keeper.refuses = True

    def raise_excess(self) -> None:
        """Raises BudgetExceeded, once, where a call has turned out not to fit into the budget."""
        keeper = self._enabled_runtime().keeper
        if isinstance(keeper, MemoryKeeper) and keeper.excess is not None:
            told, keeper.excess = keeper.excess, None
            raise BudgetExceeded(told)

    def require_gathered(self) -> None:
        """Raises RanksError where weights of a call came from other ranks and are known not to have arrived.

        The end of a diffusers pipeline's call does that by itself; this is for pipelines that do not say where it is.
        """
        runtime = self._current()
        if runtime is not None and runtime.sharing is not None:
            runtime.sharing.require_gathered()

    @property
    def budget(self) -> int | None:
        """Device bytes to keep within, None without a budget."""
        runtime = self._current()
        keeper = runtime.keeper if runtime is not None else None
        return keeper.budget if isinstance(keeper, MemoryKeeper | CommonKeeper) else None

    @property
    def parts(self) -> tuple[Part, ...]:
        """The components as they are at work, for those who watch: to be read only, also while a call is running."""
        runtime = self._current()
        return () if runtime is None else tuple(runtime.parts)

    def sleep(self) -> None:
        """Frees the device memory of the offload for others; weights stay where they are anyway, on the host.

        Until `wake`, a call of the pipeline raises OffloadError: what was freed may be somebody else's by then. What
        was edited on the device is kept. Harmless when it sleeps already.

        Raises:
            OffloadError: a call of the pipeline is running, or the offload was disabled.
        """
        runtime = self._enabled_runtime()
        with runtime.occupancy.lock:
            require_between_calls(runtime, "sleep()")
            fall_asleep(runtime)

    def wake(self) -> None:
        """Brings back what `sleep` freed; results are the same to the bit. Harmless when it is awake.

        Raises:
            torch.OutOfMemoryError: others have taken the memory; the offload sleeps on.
            OffloadError: the offload was disabled.
        """
        runtime = self._enabled_runtime()
        with runtime.occupancy.lock:
            wake_up(runtime)

    def disable(self) -> None:
        """Undoes the offload: hooks, placement and memory are as they were before. Harmless when done already.

        Raises:
            OffloadError: a call of the pipeline is running. Or something failed halfway: every weight is whole, calls
                are refused, and `disable` may be called again until all is as it was.
            torch.OutOfMemoryError: the pipeline was on the device before, and there is no room for it there now; the
                offload goes on as it was, unless the message says that `disable` has begun.
        """
        runtime = self._current()
        if runtime is None or not runtime.enabled:
            return
        with runtime.occupancy.lock:
            require_between_calls(runtime, "disable()")
            release(self._pipeline(), runtime)

    def record(self) -> None:
        """Times the next forward of every component, for `timeline` and `plot`."""
        self._enabled_runtime().time_next_forwards()

    def timeline(self, path: str | Path | None = None) -> dict[str, Any]:
        """The latest timed forward of each component, as a trace for chrome://tracing or Perfetto.

        With a memory budget the first forwards are timed anyway; `record` times the next ones.

        Args:
            path: where to write it as JSON, if anywhere.

        Returns:
            The trace as a dictionary; times are in microseconds on the device's clock.

        Raises:
            OffloadError: no forward was timed yet.
        """
        from greenroom.telemetry.trace import chrome_trace

        trace = chrome_trace(self._timings())
        if path is not None:
            Path(path).write_text(json.dumps(trace))
        return trace

    def plot(self, path: str | Path) -> None:
        """Draws what `timeline` has: copies and computation side by side, and device memory over time.

        Args:
            path: the picture to write; its ending chooses the format.

        Raises:
            OffloadError: no forward was timed yet.
        """
        from greenroom.telemetry.plot import plot_timings

        runtime = self._enabled_runtime()
        keeper = runtime.keeper
        budget = keeper.budget if isinstance(keeper, MemoryKeeper) else None
        plot_timings(self._timings(), Path(path), budget=budget)

    def _timings(self) -> dict[str, Timing]:
        runtime = self._enabled_runtime()
        if not runtime.timings:
            raise OffloadError("no forward was timed yet; call handle.record(), then the pipeline")
        return dict(runtime.timings)

    @contextlib.contextmanager
    def materialized(self, module: nn.Module) -> Iterator[nn.Module]:
        """Inside the block, the tensors of `module` hold their values on the device, in memory of their own.

        What is changed in place is written back to the host when the block ends. The pipeline cannot be called inside.

        Args:
            module: a component of the pipeline that is offloaded, or a module inside one.

        Raises:
            OffloadError: `module` is none of those, or the offload sleeps.
        """
        runtime = self._enabled_runtime()
        runtime.require_awake()
        if not isinstance(module, nn.Module) or not runtime.holds(module):
            plain = module is None or isinstance(module, str | int | float)
            raise OffloadError(
                f"materialized: {repr(module) if plain else type(module).__name__} is no part of what this handle "
                "offloads; accepted: a module, which is one of "
                f"{', '.join(part.name for part in runtime.parts)} or lies inside one"
            )
        with runtime.occupancy.lock, runtime.materialized(module):
            yield module

    def rescan(self) -> None:
        """Looks at the pipeline again after its modules were edited: adapters loaded, layers or weights replaced.

        Raises:
            OffloadError: the pipeline is gone, the offload sleeps, or a call is running.
        """
        pipeline = self._pipeline()
        runtime = self._enabled_runtime()
        if pipeline is None:
            raise OffloadError("the pipeline of this offload is gone")
        runtime.require_awake()
        self._runtime = self._renew(pipeline, runtime)._runtime

    def __repr__(self) -> str:
        runtime = self._current()
        if runtime is None or not runtime.enabled:
            return "<greenroom offload, disabled>"
        if runtime.leaving:
            return "<greenroom offload, half undone: disable() is to be called again>"
        return f"<greenroom offload of {type(self._pipeline()).__name__}>\n{report_of(runtime)}"


def require_between_calls(runtime: Runtime, call: str) -> None:
    """Refuses `call`, which moves weights, while a pipeline that `runtime` serves is called, by whichever thread.

    The rest of that call would find its inputs on the device and the weights elsewhere. The caller holds the lock of
    the runtime's occupancy.

    Raises:
        OffloadError: naming `call`.
    """
    if runtime.occupancy.busy():
        raise OffloadError(f"{call} was called from inside a component; call it between two calls")
    caller = running(p for reference in runtime.pipelines if (p := reference()) is not None)
    if caller is not None:
        raise OffloadError(
            f"{call} was called while a call of {type(caller).__name__} is running; call it when that has returned"
        )


@contextlib.contextmanager
def memory_as_given(memory: Memory | None) -> Iterator[None]:
    """Inside the block, an error about the budget shows it in the words in which it was given.

    Raises:
        ConfigError: as raised inside.
    """
    try:
        yield
    except ConfigError as error:
        if error.field != "memory_budget" or memory is None or memory.given is None:
            raise
        raise ConfigError(error.field, memory.given, error.accepted, error.hint) from error


def release(pipeline: Any, runtime: Runtime) -> None:
    """Takes the runtime off the pipeline, and off those that share its components."""
    runtime.disable()
    unwatch(pipeline)


def _unmovable(tensors: list[torch.Tensor]) -> str:
    if not tensors:
        return ""
    kinds = ", ".join(sorted({type(t).__name__ for t in tensors}))
    return f"{len(tensors)} tensors of kind {kinds} cannot be moved and stay where they are"


def report_of(runtime: Runtime) -> Report:
    components = []
    arena = runtime.layout.arena_bytes if runtime.asleep else runtime.stream.arena_bytes
    if runtime.sharing is not None:
        arena += runtime.sharing.device_bytes
    always = arena + runtime.shared_bytes
    phases: dict[str, int] = {}
    for part in runtime.parts:
        blocks = [b for b in part.blocks if b.unit.tensors]
        streamed = part.streamed
        moved = sum(b.unit.nbytes for b in streamed)
        stays = part.other_bytes + sum(b.unit.nbytes for b in blocks) - moved
        pageable = sum(u.nbytes for u in part.units if not u.pinned)
        note = _unmovable(part.unmovable)
        if runtime.sharing is not None and runtime.gathers(part):
            moved, loose = runtime.sharing.shares(part)
            pageable += loose - sum(b.unit.nbytes for b in streamed if not b.unit.pinned)
            note = "; ".join(filter(None, (note, f"gathered from {runtime.sharing.ranks.size} ranks")))
        if part.share.hold == "phase":
            phases[part.group] = phases.get(part.group, 0) + stays + part.share.arena_bytes
            resident = part.pinned_down.nbytes
            moved += stays
        else:
            resident = part.pinned_down.nbytes + stays
        always += resident
        components.append(
            ComponentReport(
                name=part.name,
                role=part.role,
                placement=part.placement,
                weights=part.nbytes,
                resident=resident,
                moved=moved,
                blocks=len(blocks),
                streamed_blocks=len(streamed),
                pageable=pageable,
                note=note,
            )
        )
    companions = phases.pop("companion", 0)
    return Report(
        strategy=runtime.strategy.value,
        device=str(runtime.accelerator.device),
        components=tuple(components),
        arena=arena,
        pinned=runtime.masters.pinned_bytes,
        pageable=runtime.masters.pageable_bytes,
        device_weights=always + max(phases.values(), default=0) + companions,
        copied=runtime.copier.copied_bytes,
        misses=sum(stream.misses for stream in runtime.streams),
        asleep=runtime.asleep,
        **_kept(runtime),
    )


def _kept(runtime: Runtime) -> dict[str, Any]:
    """What only an offload with a budget knows."""
    keeper = runtime.keeper
    if isinstance(keeper, CommonKeeper):
        return {
            "why": "the same blocks stay on every rank, as many as the rank with the least room allows",
            "budget": keeper.budget,
            **_peaks(keeper.peaks),
            "out_of_memory": keeper.out_of_memory,
        }
    if not isinstance(keeper, MemoryKeeper):
        return {"why": "chosen by the configuration"}
    steps = []
    for part in runtime.parts:
        timing = keeper.observed[part.name].timing
        plan = keeper.plan.component(part.name) if keeper.plan is not None else None
        if part.role != DIT or timing is None or plan is None:
            continue
        compute = sum(timing.block_s) + timing.other_s
        copying = sum(seconds for _, seconds in timing.copies)
        steps.append(
            StepReport(
                name=part.name,
                predicted=plan.step_s,
                bound=plan.bound_s,
                measured=timing.forward_s,
                compute=compute,
                stall=max(0.0, timing.forward_s - compute),
                bus_idle=max(0.0, 1 - copying / timing.forward_s) if timing.forward_s else 1.0,
            )
        )
    return {
        "why": keeper.why,
        "budget": keeper.budget,
        "predicted_peak": keeper.plan.peak_bytes if keeper.plan is not None and keeper.measured else None,
        **_peaks(keeper.peaks),
        "out_of_memory": keeper.out_of_memory,
        "steps": tuple(steps),
    }


def _peaks(peaks: Peaks) -> dict[str, int]:
    peaks.note()
    return {"peak": peaks.highest, "latest_peak": peaks.latest}


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


__all__ = ["ComponentReport", "Handle", "Report"]
