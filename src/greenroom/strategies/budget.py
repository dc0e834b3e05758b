"""Keeping a memory budget: the coarsest layout that fits, chosen from what the calls were seen to need.

The first call runs with little on the device, is measured, and from then on every byte of the budget is used. Times
come from the first real forwards and activations from the peaks beside the weights, so nothing has to be guessed
for long, and no call is spent on warming up.

Note [What a budget covers]
    All that this process holds on the device: weights, rings, activations, and tensors that belong to somebody else.
    What is measured as a part's activations is everything beside Greenroom's own bytes at the part's peak. What of it
    was there before the call is looked at again at the start of each: others come and go.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from greenroom import discovery
from greenroom.accelerator import Accelerator
from greenroom.config import OffloadConfig
from greenroom.errors import BudgetExceeded, ConfigError
from greenroom.estimate import Estimate, estimate_call
from greenroom.memory import Memory, format_bytes
from greenroom.residency import Block, BudgetTooSmall, PipelineModel, Plan, TransferCurve, choose, plan_call
from greenroom.residency import Component as Numbers
from greenroom.strategies.draft import Draft
from greenroom.strategies.layout import Layout, Share
from greenroom.strategies.parts import Part
from greenroom.strategies.peaks import Peaks
from greenroom.strategies.probe import Timing
from greenroom.strategies.runtime import Runtime

# Left alone where the budget is whatever is free: contexts, workspaces, fragmentation.
FREE_RESERVE = 0.05
# Of an explicit budget, for what a pipeline holds between its components.
MARGIN = 0.0025
# Below this share of the budget, weights may all come in before anything was measured.
_SURELY_FITS = 0.5
# Before a copy has been timed: any bandwidth will do, since only shares of it are compared.
_UNMEASURED = TransferCurve(0.0, 10e9)
_GUESSED_FORWARDS = 30
_REMEMBERED_PLANS = 16
# Of an estimate, what a call will take for certain.
_CERTAIN = 0.75
# Each time that a part runs out of memory it is given this much more room.
STEP_DOWN = 1.2
# Forwards of one shape that are measured. Those of a DiT follow each other: the second holds what the first gave.
_MEASURED = {discovery.DIT: 2}

Signature = tuple[str, int, tuple[Any, ...]]


@dataclass
class Observed:
    """What was seen of one part.

    Attributes:
        activations: bytes beside the weights at the peak, for each door and shape of inputs.
        forwards: how many of each were measured.
        assumed: bytes to allow for, since it ran out of memory; 0 when it has been measured since.
        timing: of its latest timed forward.
        calls, loads: forwards, and entries after a part that excludes it, in the latest call.
    """

    activations: dict[Signature, int] = field(default_factory=dict)
    forwards: dict[Signature, int] = field(default_factory=dict)
    assumed: int = 0
    timing: Timing | None = None
    calls: int = 0
    loads: int = 1

    @property
    def need(self) -> int:
        return max([self.assumed, *self.activations.values()])


class MemoryKeeper:
    """Keeps a pipeline within a budget of device memory.

    Args:
        accelerator: the device.
        config: which components may leave the device, and how.
        ours: bytes on the device that will be free by then.

    Raises:
        ConfigError: the budget is more than the device has.
    """

    def __init__(self, accelerator: Accelerator, config: OffloadConfig, ours: int = 0) -> None:
        self.accelerator = accelerator
        self.config = config
        self.budget = resolve_budget(config.memory_budget, accelerator, ours)
        self.curve: TransferCurve | None = None
        self.plan: Plan | None = None
        self.peaks = Peaks(accelerator)
        self.observed: dict[str, Observed] = {}
        self.out_of_memory = 0
        """How often a component ran out of memory and was run again."""
        self._sequence: list[Part] = []
        self._inputs: Any = None  # of the component that is at work
        self._warned = False
        self._recovering = False
        self._plans: dict[Any, Plan] = {}
        self._measured: Signature | None = None
        self._careful = True
        self._learned = False
        self.refuses = False
        """Whether calls that the budget cannot hold are refused; otherwise they are served, with a warning."""
        self.excess: str | None = None
        """How the latest call did not fit, where that was found out when it had computed."""
        self._too_large: dict[tuple[str, Signature], int] = {}
        self._others: int | None = None  # bytes of others on the device, at the start of the latest call

    # ------------------------------------------------------------------ choosing

    def require_fit(self, draft: Draft) -> None:
        """Raises ConfigError where not even the least of what `draft` may keep fits; it says what would."""
        self.observed = {part.name: Observed() for part in draft.parts}
        self._plan(draft)

    def first_layout(self, runtime: Runtime) -> Layout:
        """Before anything was measured: everything if it surely fits, else as little as possible.

        Raises:
            ConfigError: not even that fits; it says what would.
        """
        self.observed = {part.name: Observed() for part in runtime.parts}
        self.peaks.forget()  # what was there before is none of this offload's
        self._careful = False
        plan = self._plan(runtime)
        weights = sum(u.nbytes for part in runtime.parts for u in part.units)
        if weights <= _SURELY_FITS * self.budget:
            self.plan = plan
            return self._layout(runtime, plan)
        return self.least_layout(runtime)

    def least_layout(self, runtime: Runtime) -> Layout:
        """As little on the device as possible, until the first call was measured."""
        self._careful = True
        self.plan = None
        return self._least(runtime)

    def _plan(self, runtime: Runtime | Draft) -> Plan:
        try:
            return self._plan_within(runtime, self.limit())
        except BudgetTooSmall as error:
            raise too_small(self.budget, error) from error

    def _plan_within(self, runtime: Runtime | Draft, limit: int) -> Plan:
        question = (self._model(runtime), limit, self.curve or _UNMEASURED)
        if question not in self._plans:
            if len(self._plans) >= _REMEMBERED_PLANS:
                self._plans.clear()
            self._plans[question] = plan_call(*question)
        return self._plans[question]

    def limit(self) -> int:
        """Bytes that may be used: the budget, or what the device has where that is less by now."""
        free, _ = self.accelerator.free_and_total()
        return min(self.budget, self.accelerator.allocated() + free)

    def _model(self, runtime: Runtime | Draft) -> PipelineModel:
        components = []
        foreign = self._foreign(runtime)
        reserved = int(self.budget * MARGIN) + runtime.shared_bytes
        for part in runtime.parts:
            seen = self.observed[part.name]
            times = seen.timing.block_s if seen.timing is not None else ()
            blocks = tuple(
                Block(b.unit.nbytes, times[b.index] if times else 0.0) for b in part.blocks if b.unit.tensors
            )
            reserved += part.pinned_down.nbytes
            components.append(
                Numbers(
                    name=part.name,
                    role=_ROLES.get(part.role, "other"),
                    other_bytes=part.other_bytes,
                    blocks=blocks,
                    calls=seen.calls or (_GUESSED_FORWARDS if part.role == discovery.DIT else 1),
                    loads=seen.loads,
                    other_s=seen.timing.other_s if seen.timing is not None else 0.0,
                    activation_bytes=max(seen.need, foreign),
                    group=part.group if part.role in _ENCODERS else None,
                    strategies=self._allowed(part),
                )
            )
        return PipelineModel(tuple(components), reserved)

    def room(self, runtime: Runtime, part: Part) -> int:
        """Bytes that are left beside what is on the device and what `part` needs to compute."""
        left = self.limit() - runtime.device_bytes() - int(self.budget * MARGIN)
        need = max(self.observed[part.name].need, self._foreign(runtime))
        # Half of it, while what it needs is not known.
        return max(0, left - need) if self.observed[part.name].activations else max(0, left - need) // 2

    def _foreign(self, runtime: Runtime | Draft) -> int:
        """Bytes on the device that are neither weights nor rings: tensors of the user, of other pipelines."""
        device = self.accelerator.device
        mine = runtime.device_bytes()
        for part in runtime.parts:  # a pipeline that has not been taken over may be on the device itself
            mine += sum(t.nbytes for u in part.units if u.master is None for t in u.tensors if t.device == device)
        return max(0, self.accelerator.allocated() - mine)

    def _allowed(self, part: Part) -> tuple[str, ...]:
        config = self.config
        named = discovery.TEXT_ENCODER if part.role == discovery.IMAGE_ENCODER else part.role
        whole = part.role in (discovery.IMAGE_ENCODER, discovery.VAE)
        chosen = named in config.components or (
            config.mode == "auto" and part.role == discovery.VAE and not config.components_explicit
        )
        if not chosen:
            return ("resident",)
        if config.mode == "module":
            return ("resident", "swap")
        if config.mode == "layer":
            return ("resident",) if whole else ("resident", "stream")
        return ("resident", "swap") if whole else ("resident", "swap", "stream")

    def _layout(self, runtime: Runtime, plan: Plan) -> Layout:
        shares = {}
        for part in runtime.parts:
            chosen = plan.component(part.name)
            real = [b.index for b in part.blocks if b.unit.tensors]
            resident = frozenset(real[i] for i in chosen.resident)
            streams = len(resident) < len(real)
            own = chosen.arena_bytes if streams and chosen.hold == "phase" else 0
            shares[part.name] = Share("always" if chosen.hold == "always" else "phase", resident, own)
        return Layout(shares, plan.shared_arena_bytes)

    def _least(self, runtime: Runtime, slots: int = 2) -> Layout:
        """As little on the device as the configuration allows at any time."""
        shares = {}
        for part in runtime.parts:
            allowed = self._allowed(part)
            every = frozenset(b.index for b in part.blocks)
            widest = max((b.unit.nbytes for b in part.blocks), default=0)
            if "stream" in allowed and widest:
                shares[part.name] = Share("phase", frozenset(), slots * widest)
            else:
                shares[part.name] = Share("phase" if "swap" in allowed else "always", every)
        layout = Layout(shares)
        if slots > 1 and self._weights(runtime, layout) > self.budget:
            return self._least(runtime, 1)
        return layout

    def _weights(self, runtime: Runtime, layout: Layout, beside: Part | None = None) -> int:
        """The most bytes of weights and rings that `layout` has on the device at any one time, or beside a part."""
        always = layout.arena_bytes + runtime.shared_bytes
        phases: dict[str, int] = {}
        for part in runtime.parts:
            share = layout.shares[part.name]
            held = part.other_bytes + share.arena_bytes
            held += sum(b.unit.nbytes for b in part.blocks if b.index in share.resident)
            always += part.pinned_down.nbytes
            if share.hold == "always":
                always += held
            else:
                phases[part.group] = phases.get(part.group, 0) + held
        if beside is not None:
            return always + phases.get(beside.group, 0)
        return always + max(phases.values(), default=0)

    def _replan(self, runtime: Runtime, *, seen: bool = True) -> None:
        """The best layout for all that is known by now; a budget that turned out too small keeps the least.

        Where that was not seen but told ahead from other shapes, nothing is said: it may well fit.
        """
        try:
            plan = self._plan(runtime)
        except ConfigError as error:
            self.plan = None
            if seen and not self._warned:
                self._warned = True
                warnings.warn(
                    f"the memory budget of {format_bytes(self.budget)} cannot be kept: the last call needed "
                    f"{error.accepted} ({error.hint}); as little as possible stays on the device",
                    stacklevel=2,
                )
            layout = self._least(runtime, 1)
        else:
            self.plan = plan
            layout = self._layout(runtime, plan)
        if layout != runtime.layout:
            runtime.apply(layout)

    def changed(self, runtime: Runtime) -> None:
        """Adapters came or went, or weights were replaced by others of another size."""
        if any(seen.activations for seen in self.observed.values()):
            self._replan(runtime)

    def set_budget(self, runtime: Runtime, memory: Memory | None) -> None:
        """Another budget from now on; blocks move out or in, nothing is loaded anew.

        Raises:
            ConfigError: nothing fits into it; the old one stays.
        """
        old = self.budget
        self.budget = resolve_budget(memory, self.accelerator, runtime.device_bytes())
        known = {name: (dict(seen.activations), seen.assumed) for name, seen in self.observed.items()}
        try:
            if self.refuses:
                self._forget_too_large(runtime)
            plan = self._plan(runtime)
        except ConfigError:
            self.budget = old
            for name, (activations, assumed) in known.items():
                self.observed[name].activations, self.observed[name].assumed = activations, assumed
            raise
        self.excess = None
        measured = all(bool(seen.activations) == bool(known[name][0]) for name, seen in self.observed.items())
        measured = measured and self.measured
        self.plan = plan if measured else None
        if self.curve is None:  # everything was resident so far: the first copies are to be timed
            for seen in self.observed.values():
                seen.forwards.clear()
        if measured:
            runtime.apply(self._layout(runtime, plan))
        else:
            runtime.apply(self.first_layout(runtime) if not self.measured else self.least_layout(runtime))
        self.peaks.forget()  # they were those of another budget

    def _forget_too_large(self, runtime: Runtime) -> None:
        """Plans no longer for shapes that the budget cannot hold: their calls will be refused."""
        for part in runtime.parts:
            seen = self.observed[part.name]
            seen.assumed = 0
            for signature, beside in list(seen.activations.items()):
                if self._excess(runtime, part, beside) is not None:
                    del seen.activations[signature]
                    seen.forwards.pop(signature, None)
                    self._too_large[part.name, signature] = max(0, beside - (self._others or 0))

    # ------------------------------------------------------------------ watching

    def entering(self, runtime: Runtime, part: Part, door: str, inputs: Any) -> None:
        if door == "child" or len(runtime.occupancy.inside) > 1:
            return
        if not self._sequence:
            self.excess = None  # of a call that failed before it was told
            self.peaks.begin_call()
            self._look_at_others(runtime)
        self._sequence.append(part)
        self._inputs = (door, inputs)
        signature = _signature(door, inputs)
        seen = self.observed[part.name]
        if self.refuses and (told := self._told_ahead(runtime, part, signature)) is not None:
            self._inputs = None
            raise BudgetExceeded(told)
        fresh = seen.forwards.get(signature, 0) < _MEASURED.get(part.role, 1)
        self._measured = signature if fresh else None
        if signature not in seen.activations and seen.activations:
            likely = _scaled(seen.activations, signature)
            if likely > seen.need:
                # More than ever before: room is made before it fails.
                seen.assumed = likely
                self._replan(runtime, seen=False)

    def _look_at_others(self, runtime: Runtime) -> None:
        """At the start of a call: what others have on the device by now is no longer, or is now, beside the weights."""
        now = self._foreign(runtime)
        if self._others is None:
            self._others = now
            return
        more = now - self._others
        if abs(more) <= int(self.budget * MARGIN):
            return
        self._others = now
        for part in self.observed.values():
            part.activations = {signature: max(0, n + more) for signature, n in part.activations.items()}
        if self.measured and not self._careful:
            self._replan(runtime)

    def entered(self, runtime: Runtime, part: Part, door: str) -> None:
        if self._measured is None:
            return
        self.peaks.restart()
        if door == "forward":
            runtime.start_timing(part)

    def left(self, runtime: Runtime, part: Part, door: str, failed: bool) -> None:
        if len(runtime.occupancy.inside) > 0:
            return
        self._inputs = None
        if self._measured is None:
            return
        signature, self._measured = self._measured, None
        timing = runtime.stop_timing(part, failed=failed)
        if failed:
            self._recovering = False
            return
        seen = self.observed[part.name]
        self.peaks.note()
        beside = max(0, self.accelerator.peak() - runtime.device_bytes())
        if self.refuses and (told := self._excess(runtime, part, beside)) is not None:
            # Not learned: it will not come again, and those that fit get back the room that they had.
            self._too_large[part.name, signature] = max(0, beside - (self._others or 0))
            self.excess = told
            seen.assumed = 0
            self._recovering = False
            self._learned = True
            return
        known = 0 if self._recovering else seen.activations.get(signature, 0)
        seen.activations[signature] = max(beside, known)
        count = seen.forwards[signature] = seen.forwards.get(signature, 0) + 1
        seen.assumed = 0
        self._learned = True
        if timing is not None and not (seen.timing is not None and seen.timing.like(timing) and self.curve is not None):
            seen.timing = timing
            copies = [c for s in self.observed.values() if s.timing is not None for c in s.timing.copies]
            if copies:
                self.curve = _fit(copies) or self.curve
        if self._recovering:
            self._recovering = False
            self._replan(runtime)
        elif self._careful and part.role == discovery.DIT and count == _MEASURED[discovery.DIT]:
            self._fill(runtime, part)

    def _fill(self, runtime: Runtime, part: Part) -> None:
        """In the middle of the first call: the room beside a DiT that has been measured is its blocks' to fill."""
        share = runtime.layout.shares[part.name]
        seen = self.observed[part.name]
        blocks = [b for b in part.blocks if b.unit.tensors]
        if share.hold != "phase" or len(share.resident) == len(blocks):
            return
        fixed = self._weights(runtime, runtime.layout.with_share(part.name, Share("phase", frozenset())))
        room = self.budget - int(self.budget * MARGIN) - fixed - seen.need
        if room <= share.arena_bytes:
            return
        times = seen.timing.block_s if seen.timing is not None else (0.0,) * len(part.blocks)
        numbers = [Block(b.unit.nbytes, times[b.index]) for b in blocks]
        gap = seen.timing.other_s if seen.timing is not None else 0.0
        best = choose(numbers, room, self.curve or _UNMEASURED, gap_s=gap)
        resident = frozenset(blocks[i].index for i in best.resident)
        arena = best.arena_bytes if len(resident) < len(blocks) else 0
        runtime.apply(runtime.layout.with_share(part.name, Share("phase", resident, arena)))

    def _told_ahead(self, runtime: Runtime, part: Part, signature: Signature) -> str | None:
        """What to say of inputs that need more than there is, as far as that is known or certain."""
        beside = self._too_large.get((part.name, signature))
        if beside is not None:
            return self._excess(runtime, part, beside + (self._others or 0))
        door, elements, _ = signature
        largest = max((s[1] for s in self.observed[part.name].activations if s[0] == door), default=0)
        if elements <= largest:
            return None
        with runtime.aside(part):
            estimate = self._estimated(runtime, part)
        if estimate is None:
            return None
        foreign = self._foreign(runtime)
        return self._excess(runtime, part, int(_CERTAIN * estimate.nbytes) + foreign, estimate.upper + foreign)

    def _excess(self, runtime: Runtime, part: Part, beside: int, will_do: int | None = None) -> str | None:
        """What to say where `beside` bytes do not fit beside the least of weights that `part` can do with.

        Args:
            will_do: bytes that are sure to be enough, where `beside` are only sure to be needed.
        """
        weights = self._weights(runtime, self._least(runtime, 1), part)
        if weights + beside <= self.budget:
            return None
        smallest = int((weights + (will_do or beside)) / (1 - MARGIN)) + 1
        return (
            f"{part.name} does not fit into the memory budget of {format_bytes(self.budget)} ({self.budget} bytes): it "
            f"needs {format_bytes(beside)}{' at the least' if will_do else ''} beside {format_bytes(weights)} of "
            f"weights; accepted: a budget of at least {smallest} bytes ({format_bytes(smallest)}"
            f"{', estimated' if will_do else ''}) for this component"
        )

    def call_ended(self, runtime: Runtime) -> None:
        self.peaks.end_call()
        self._inputs = None
        sequence, self._sequence = self._sequence, []
        for part in {id(p): p for p in sequence}.values():
            seen = self.observed[part.name]
            loads = 0
            there = False
            for other in sequence:
                if other is part:
                    loads += not there
                    there = True
                elif part.excludes(other):
                    there = False
            calls = sum(p is part for p in sequence)
            if (calls, loads) != (seen.calls, seen.loads):
                seen.calls, seen.loads = calls, loads
                self._learned = True
        if self._learned:
            self._learned = self._careful = False
            self._replan(runtime)

    @property
    def why(self) -> str:
        """How the layout was chosen."""
        if self.plan is not None:
            return self.plan.why
        if self.measured and not self._careful:
            return "as little as possible: the budget is too small for what a call needed"
        return "as little as possible until a call was measured"

    @property
    def measured(self) -> bool:
        return any(seen.activations for seen in self.observed.values())

    # ------------------------------------------------------------------ running out

    def shrink(self, runtime: Runtime, part: Part, error: torch.OutOfMemoryError) -> None:
        """Gives `part` more room than it had; the caller runs it again.

        Raises:
            torch.OutOfMemoryError: nothing is left to give; the message has the plan.
        """
        self.out_of_memory += 1
        seen = self.observed[part.name]
        runtime.stop_timing(part, failed=True)
        least = self._least(runtime, 1)
        while True:
            self.accelerator.empty_cache()
            limit = self.limit()
            room = limit - self._weights(runtime, runtime.layout)
            seen.assumed = int(max(room, seen.need) * STEP_DOWN) + 1
            exhausted = runtime.layout == least
            try:
                layout = self._layout(runtime, self._plan_within(runtime, limit))
            except BudgetTooSmall:
                layout = least
            if exhausted:
                raise torch.OutOfMemoryError(self._exhausted(runtime, part, room)) from error
            try:
                runtime.apply(layout)
                break
            except torch.OutOfMemoryError as again:
                error = again.with_traceback(None)
        # The attempt that follows is the one to measure.
        if self._measured is None and self._inputs is not None:
            self._measured = _signature(*self._inputs)
        self._recovering = True
        self.peaks.restart()

    def _exhausted(self, runtime: Runtime, part: Part, room: int) -> str:
        weights = self._weights(runtime, runtime.layout)
        with runtime.aside(part):
            beside = max(0, self.accelerator.allocated() - runtime.device_bytes())
            smallest = int((weights + beside + self._estimate(runtime, part, room)) / (1 - MARGIN)) + 1
        return (
            f"{part.name} does not fit into the memory budget of {format_bytes(self.budget)} ({self.budget} bytes); "
            f"accepted: at least {smallest} bytes ({format_bytes(smallest)}, estimated). With nothing left to give, "
            f"{format_bytes(weights)} of weights are on the device and its activations need more than the "
            f"{format_bytes(max(room, 0))} beside them.\n{describe(runtime)}"
        )

    def _estimate(self, runtime: Runtime, part: Part, room: int) -> int:
        """Bytes of activations that should do for the call that has just failed."""
        estimate = self._estimated(runtime, part)
        return max(2 * max(room, 1) if estimate is None else estimate.upper, int(room * STEP_DOWN))

    def _estimated(self, runtime: Runtime, part: Part) -> Estimate | None:
        """Of the inputs that are at work; None for a part that cannot be run without their values."""
        module = runtime.module(part)
        if module is None or self._inputs is None:
            return None
        door, (args, kwargs) = self._inputs
        try:
            return estimate_call(module, getattr(type(module), door), args, kwargs)
        except Exception:  # whatever the module does with values that it does not have
            return None


_ENCODERS = (discovery.TEXT_ENCODER, discovery.IMAGE_ENCODER)
_ROLES = {
    discovery.DIT: "dit",
    discovery.TEXT_ENCODER: "text_encoder",
    discovery.IMAGE_ENCODER: "text_encoder",
    discovery.VAE: "vae",
}


def describe(runtime: Runtime) -> str:
    """A line for each part: what its share of the device is."""
    lines = []
    for part in runtime.parts:
        stays = part.rest.nbytes + sum(b.unit.nbytes for b in part.blocks if b.index in part.share.resident)
        text = f"  {part.name}: {part.placement}, {format_bytes(stays)} {part.share.hold}"
        if part.streamed:
            text += f", {len(part.streamed)} of {len(part.blocks)} blocks streamed"
        lines.append(text)
    return "\n".join(lines)


def too_small(budget: int, error: BudgetTooSmall) -> ConfigError:
    where = ", ".join(f"{what} {format_bytes(n)}" for what, n in error.items if n)
    return ConfigError(
        "memory_budget",
        budget,
        f"at least {error.minimum_bytes} bytes ({format_bytes(error.minimum_bytes)}) for this pipeline",
        f"in its largest phase, {error.phase}: {where}",
    )


def resolve_budget(memory: Memory | None, accelerator: Accelerator, ours: int = 0) -> int:
    """The budget in bytes; None is what is free now, less a reserve of 5 % of the device."""
    free, total = accelerator.free_and_total()
    if memory is None:
        return max(1, min(free + ours, total) - int(FREE_RESERVE * total))
    budget = memory.resolve(total)
    if budget > total:
        raise ConfigError("memory_budget", str(memory), f"at most the {format_bytes(total)} of {accelerator.device}")
    return budget


def _signature(door: str, inputs: Any) -> Signature:
    """The door and the shapes of all tensors, with their number of elements."""
    shapes: list[tuple[int, ...]] = []
    _shapes(inputs, shapes)
    return door, sum(_numel(s) for s in shapes), tuple(shapes)


def _numel(shape: Iterable[int]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n


def _shapes(value: Any, found: list[tuple[int, ...]]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(tuple(value.shape))
    elif isinstance(value, dict):
        for item in value.values():
            _shapes(item, found)
    elif isinstance(value, list | tuple):
        for item in value:
            _shapes(item, found)


def _scaled(known: dict[Signature, int], signature: Signature) -> int:
    """What inputs of a new shape may need, from those of known ones: as much more as there are more elements."""
    door, elements, _ = signature
    alike = {s: n for s, n in known.items() if s[0] == door} or known
    return max(int(n * max(1.0, elements / max(1, s[1]))) for s, n in alike.items())


def _fit(copies: list[tuple[int, float]]) -> TransferCurve | None:
    try:
        return TransferCurve.fit(copies)
    except ValueError:
        return None
