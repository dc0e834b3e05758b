"""The plan of a whole pipeline call under a byte budget.

A call runs in phases: each encoder group, each DiT, the VAE. A component either stays on the device between
the phases or comes in for its own phase, and then each call pays for bringing it in; either way it is there
whole or streams its blocks. The plans are enumerated from the coarsest to the finest; the least predicted
time of a call wins, and the coarser one where the difference is small.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from greenroom.residency.choose import Residency, choose, minimum_bytes
from greenroom.residency.curve import TransferCurve
from greenroom.residency.ring import Block, run_s

ROLES = ("text_encoder", "dit", "vae", "other")
STRATEGIES = ("resident", "swap", "stream")
_ROLE_STRATEGIES = {
    "text_encoder": STRATEGIES,
    "dit": STRATEGIES,
    "vae": ("resident", "swap"),
    "other": ("resident",),
}
# Predictions closer than this are a tie, which the coarser plan wins: it has fewer moving parts.
_TIE = 0.01
# Plans this close to the fastest after a first look get a closer one, this many of them at most.
_CLOSE = 1.05
_LOOKS = 4
# Residents that a phase brings in for less gain than this are left out.
_THIN = 1.001


@dataclass(frozen=True)
class Component:
    """One component of a pipeline, in numbers.

    role: one of `ROLES`; other_bytes: weights and buffers outside the blocks; blocks: in execution order;
    calls: forwards of one pipeline call (for a DiT: steps x forwards a step); loads: how often a call enters
    the component's phase; other_s: compute seconds of a forward outside the blocks; activation_bytes: peak of
    what a forward allocates; group: components of one group are on the device together (default: text
    encoders share a group, any other component is its own); strategies: what is allowed (default: by role; a
    VAE is never streamed, "other" always resident).

    Raises ValueError naming the field for a value out of range.
    """

    name: str
    role: str
    other_bytes: int
    blocks: tuple[Block, ...] = ()
    calls: int = 1
    loads: int = 1
    other_s: float = 0.0
    activation_bytes: int = 0
    group: str | None = None
    strategies: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"role of {self.name!r}: got {self.role!r}, accepted are {', '.join(ROLES)}")
        for what in ("other_bytes", "calls", "other_s", "activation_bytes"):
            if not getattr(self, what) >= 0:
                raise ValueError(f"{what} of {self.name!r}: got {getattr(self, what)!r}, accepted is >= 0")
        if self.loads < 1:
            raise ValueError(f"loads of {self.name!r}: got {self.loads!r}, accepted is >= 1")
        if self.strategies is not None and not (self.strategies and set(self.strategies) <= set(STRATEGIES)):
            accepted = ", ".join(STRATEGIES)
            raise ValueError(f"strategies of {self.name!r}: got {self.strategies!r}, accepted: {accepted}")

    @property
    def total_bytes(self) -> int:
        return self.other_bytes + sum(b.bytes for b in self.blocks)

    @property
    def compute_s(self) -> float:
        """Compute seconds of one forward."""
        return self.other_s + sum(b.compute_s for b in self.blocks)

    @property
    def phase(self) -> str:
        if self.group is not None:
            return self.group
        return "text_encoders" if self.role == "text_encoder" else self.name

    @property
    def allowed(self) -> tuple[str, ...]:
        return self.strategies if self.strategies is not None else _ROLE_STRATEGIES[self.role]


@dataclass(frozen=True)
class PipelineModel:
    """All components of a pipeline and what else takes device memory.

    reserved_bytes: device bytes that no plan may use (context, workspaces, fragmentation).
    Raises ValueError for two components of one name.
    """

    components: tuple[Component, ...]
    reserved_bytes: int = 0

    def __post_init__(self) -> None:
        names = [c.name for c in self.components]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"components: got {name!r} twice, accepted are distinct names")

    @property
    def phases(self) -> tuple[str, ...]:
        """Names of the phases in the order of a call."""
        ordered = sorted(self.components, key=lambda c: ROLES.index(c.role))
        return tuple(dict.fromkeys(c.phase for c in ordered))


@dataclass(frozen=True)
class ComponentPlan:
    """What one component does.

    strategy: "resident" (whole, always), "swap" (whole, in its phase), "stream" (by block); hold: "always" or
    "phase", the time that its bytes outside the blocks and its resident blocks are on the device; resident:
    block indices (all for resident and swap); arena_bytes: ring that it streams through, shared as `Plan`
    says; held_bytes: bytes on the device without the arena; refill_bytes: copied each time the phase begins;
    step_s and bound_s: predicted steady forward and its lower bound; seconds: predicted time in one call, the
    refills included.
    """

    name: str
    strategy: str
    hold: str
    resident: tuple[int, ...]
    arena_bytes: int
    held_bytes: int
    refill_bytes: int
    step_s: float
    bound_s: float
    seconds: float


@dataclass(frozen=True)
class Phase:
    """Predicted device bytes (reserve, weights, arenas, activations) and seconds of one phase of a call."""

    name: str
    peak_bytes: int
    seconds: float


@dataclass(frozen=True)
class Alternative:
    """A plan that was weighed: its name, and its predicted call time in seconds if it fits."""

    label: str
    call_s: float | None


@dataclass(frozen=True)
class Plan:
    """The plan of a pipeline call.

    shared_arena_bytes: one ring for all components that stream with hold "always" (their phases exclude each
    other); those with hold "phase" have their own, which lives as long as their phase. call_s: predicted
    seconds of one call; peak_bytes: the largest phase.
    """

    components: tuple[ComponentPlan, ...]
    phases: tuple[Phase, ...]
    shared_arena_bytes: int
    budget_bytes: int
    peak_bytes: int
    call_s: float
    label: str
    why: str
    alternatives: tuple[Alternative, ...] = field(default=())

    def component(self, name: str) -> ComponentPlan:
        """The part of one component; raises KeyError for an unknown name."""
        for part in self.components:
            if part.name == name:
                return part
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        return json.loads(json.dumps(asdict(self)))

    def digest(self) -> str:
        """Hex SHA-256 of what the ranks have to agree on: everything but the text."""
        content = {k: v for k, v in self.to_dict().items() if k not in ("why", "alternatives")}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class BudgetTooSmall(ValueError):
    """No plan fits.

    minimum_bytes: the smallest budget that one does; phase: its largest phase; items: (what, bytes) of that
    phase.
    """

    def __init__(self, budget: int, minimum: int, label: str, phase: str, items: Sequence[tuple[str, int]]):
        self.budget_bytes = budget
        self.minimum_bytes = minimum
        self.phase = phase
        self.items = tuple(items)
        parts = ", ".join(f"{what} {_size(nbytes)}" for what, nbytes in items if nbytes)
        super().__init__(
            f"memory_budget: got {budget} bytes ({_size(budget)}), accepted is at least {minimum} "
            f"({_size(minimum)}): {label}, phase {phase}: {parts}"
        )


def plan_call(model: PipelineModel, budget_bytes: int, curve: TransferCurve) -> Plan:
    """The plan with the least predicted time of one call within ``budget_bytes`` on the device.

    Weighed are: everything resident; groups that come in for their phase; a streamed DiT with encoders
    resident, streamed too, or brought in per call; streamed encoders beside a resident DiT; a streamed DiT
    whose residents leave the device to the encoders, or the two experts to one another. A plan within 1 % of
    the fastest wins when it is coarser. Deterministic.

    Raises BudgetTooSmall, with the smallest budget that works and where its bytes go.
    """
    weighed: list[_Weighed] = []
    known: _Known = {}
    for rank, option in enumerate(_options(model)):
        draft = _Draft(model, option, curve, known)
        weighed.append(_Weighed(draft, draft.least()[0], draft.optimistic_s(budget_bytes), rank))
    fitting = sorted((w for w in weighed if w.needs <= budget_bytes), key=lambda w: (w.optimistic, w.rank))
    if not fitting:
        least = min(weighed, key=lambda w: (w.needs, w.rank))
        needs, phase, items = least.draft.least()
        raise BudgetTooSmall(budget_bytes, needs, least.draft.label, phase, items)
    for entry in fitting:
        if entry.may_win(fitting):
            entry.plan = entry.draft.fill(budget_bytes, refine=False)
    # The first look is right within a few per cent: what is near the fastest is worth a closer one.
    close = [w for w in fitting if w.call_s <= _fastest(fitting) * _CLOSE]
    for entry in sorted(close, key=lambda w: (w.call_s, w.rank))[:_LOOKS]:
        closer = entry.draft.fill(budget_bytes, refine=True)
        if closer.call_s < entry.call_s:
            entry.plan = closer
    winner = min(_tying(fitting), key=_Weighed.order)
    plan = winner.plan
    assert plan is not None  # whatever ties was filled
    alternatives = tuple(Alternative(w.draft.label, w.plan.call_s if w.plan is not None else None) for w in weighed)
    return Plan(
        components=plan.components,
        phases=plan.phases,
        shared_arena_bytes=plan.shared_arena_bytes,
        budget_bytes=budget_bytes,
        peak_bytes=plan.peak_bytes,
        call_s=plan.call_s,
        label=plan.label,
        why=_why(winner, plan, weighed, budget_bytes),
        alternatives=alternatives,
    )


@dataclass
class _Weighed:
    draft: _Draft
    needs: int
    optimistic: float
    rank: int
    plan: Plan | None = None

    @property
    def call_s(self) -> float:
        return self.plan.call_s if self.plan is not None else math.inf

    def order(self) -> tuple[tuple[int, int], float, int]:
        return (self.draft.coarseness, self.call_s, self.rank)

    def may_win(self, others: Sequence[_Weighed]) -> bool:
        """Whether it could be faster than all, or as fast and coarser, if bus and compute never waited."""
        fastest = _fastest(others)
        if self.optimistic < fastest:
            return True
        coarsest = min((w.draft.coarseness for w in _tying(others)), default=(math.inf, math.inf))
        return self.optimistic <= fastest * (1 + _TIE) and self.draft.coarseness < coarsest


def _fastest(weighed: Sequence[_Weighed]) -> float:
    return min((w.call_s for w in weighed), default=math.inf)


def _tying(weighed: Sequence[_Weighed]) -> list[_Weighed]:
    limit = _fastest(weighed) * (1 + _TIE)
    return [w for w in weighed if w.plan is not None and w.call_s <= limit]


# A component's part in an option: strategy and hold.
_Part = tuple[str, str]
_RESIDENT: _Part = ("resident", "always")
_SWAP: _Part = ("swap", "phase")
_STREAM: _Part = ("stream", "always")
_STREAM_PHASE: _Part = ("stream", "phase")
_GRAIN = {_RESIDENT: 0, _SWAP: 1, _STREAM: 2, _STREAM_PHASE: 3}


def _options(model: PipelineModel) -> Iterator[dict[str, _Part]]:
    """The ladder: each assignment of strategies once, coarse ones first.

    The smaller encoders may stay while the larger move (CLIP beside T5); DiTs are alike, so that experts are.
    """
    encoders = sorted((c for c in model.components if c.role == "text_encoder"), key=lambda c: (c.total_bytes, c.name))
    seen: set[tuple[_Part, ...]] = set()
    found: list[dict[str, _Part]] = []
    for dit in (_RESIDENT, _SWAP, _STREAM, _STREAM_PHASE):
        for vae in (_RESIDENT, _SWAP):
            for moving in range(len(encoders) + 1):
                for encoder in (_SWAP, _STREAM, _STREAM_PHASE) if moving else (_RESIDENT,):
                    movers = {c.name for c in encoders[len(encoders) - moving :]}
                    option: dict[str, _Part] = {}
                    for c in model.components:
                        wish = {"dit": dit, "vae": vae}.get(c.role, _RESIDENT)
                        if c.name in movers:
                            wish = encoder
                        option[c.name] = _granted(c, wish)
                    key = tuple(option.values())
                    if key not in seen:
                        seen.add(key)
                        found.append(option)
    # Stable: equal grains keep the order of the loops.
    found.sort(key=lambda o: _coarseness(o.values()))
    return iter(found)


def _granted(component: Component, wish: _Part) -> _Part:
    """The wish where the component allows it, else the coarsest that it allows."""
    if wish[0] == "stream" and not component.blocks:
        wish = _SWAP if wish == _STREAM_PHASE else _RESIDENT
    if wish[0] in component.allowed:
        return wish
    for part in (_RESIDENT, _SWAP, _STREAM):
        if part[0] in component.allowed:
            return part
    raise AssertionError("a component allows at least one strategy")  # checked when it was made


def _coarseness(parts: Any) -> tuple[int, int]:
    grains = [_GRAIN[p] for p in parts]
    return (max(grains, default=0), sum(grains))


# Choices made so far, by component, budget and given arena: assignments differ in few components.
_Known = dict[tuple[str, int, "int | None", bool], Residency]


class _Draft:
    """One assignment of strategies: what it needs at least, and its best filling under a budget."""

    def __init__(self, model: PipelineModel, option: dict[str, _Part], curve: TransferCurve, known: _Known) -> None:
        self.known = known
        self.refine = False
        self.model = model
        self.option = option
        self.curve = curve
        self.coarseness = _coarseness(option.values())
        self.streams = [c for c in model.components if option[c.name] == _STREAM]
        # DiTs first: they run most often, so room goes to them before the encoders.
        self.streams.sort(key=lambda c: (c.role != "dit", -c.calls * c.total_bytes))

    @property
    def label(self) -> str:
        if all(part == _RESIDENT for part in self.option.values()):
            return "everything resident"
        words = {_RESIDENT: "resident", _SWAP: "per call", _STREAM: "streamed"}
        words[_STREAM_PHASE] = "streamed in phase"
        return ", ".join(f"{name} {words[part]}" for name, part in self.option.items())

    def items(self, phase: str, slots: int) -> list[tuple[str, int]]:
        """(what, bytes) on the device in a phase, no block resident that need not be."""
        found: list[tuple[str, int]] = [("reserved", self.model.reserved_bytes)]
        for c in self.model.components:
            part = self.option[c.name]
            if part == _RESIDENT or (part == _SWAP and c.phase == phase):
                found.append((f"{c.name} weights", c.total_bytes))
            elif part == _STREAM or (part == _STREAM_PHASE and c.phase == phase):
                found.append((f"{c.name} weights outside the blocks", c.other_bytes))
            if part == _STREAM_PHASE and c.phase == phase:
                found.append((f"{c.name} arena", slots * minimum_bytes(c.blocks)))
        if self.streams:
            found.append(("shared arena", slots * self.widest))
        active = [c.activation_bytes for c in self.model.components if c.phase == phase]
        found.append(("activations", max(active, default=0)))
        return found

    @property
    def widest(self) -> int:
        return max((minimum_bytes(c.blocks) for c in self.streams), default=0)

    def least(self, slots: int = 1) -> tuple[int, str, list[tuple[str, int]]]:
        """The least bytes of this assignment, the phase that takes them, and its items."""
        best: tuple[int, str, list[tuple[str, int]]] = (self.model.reserved_bytes, "idle", [])
        for phase in self.model.phases:
            items = self.items(phase, slots)
            total = sum(nbytes for _, nbytes in items)
            if total > best[0] or best[1] == "idle":
                best = (total, phase, items)
        return best

    def optimistic_s(self, budget: int) -> float:
        """A call time that no filling beats: compute and copies side by side, all the budget for residents."""
        total = 0.0
        for c in self.model.components:
            part = self.option[c.name]
            compute = c.calls * c.compute_s
            if part == _SWAP:
                compute += c.loads * self.curve.seconds(c.total_bytes)
            elif part[0] == "stream":
                streamed = max(0, c.total_bytes - budget) / self.curve.bytes_per_s
                compute = max(compute, (c.calls - c.loads) * streamed)
            total += compute
        return total

    def fill(self, budget: int, *, refine: bool) -> Plan:
        """The best residents and arenas that the budget allows; the budget is at least `least`."""
        self.refine = refine
        slots = 2 if self.least(2)[0] <= budget else 1
        rooms = {phase: budget - sum(nbytes for _, nbytes in self.items(phase, slots)) for phase in self.model.phases}
        parts: dict[str, ComponentPlan] = {}
        shared = self._fill_streams(rooms, slots, parts)
        for phase in self.model.phases:
            room = rooms[phase] + (slots * self.widest - shared)
            room -= sum(parts[c.name].held_bytes - c.other_bytes for c in self.streams)
            self._fill_phase(phase, room, slots, parts)
        components = tuple(parts.get(c.name) or self._whole(c) for c in self.model.components)
        phases = tuple(self._phase(name, components, shared) for name in self.model.phases)
        return Plan(
            components=components,
            phases=phases,
            shared_arena_bytes=shared,
            budget_bytes=budget,
            peak_bytes=max((p.peak_bytes for p in phases), default=self.model.reserved_bytes),
            call_s=sum(p.seconds for p in phases),
            label=self.label,
            why="",
        )

    def _fill_streams(self, rooms: dict[str, int], slots: int, parts: dict[str, ComponentPlan]) -> int:
        """Residents of the components that stream between resident ones; returns the bytes of their one ring."""
        if not self.streams:
            return 0
        room = min(rooms.values())
        arena = slots * self.widest
        if len(self.streams) == 1:
            only = self.streams[0]
            chosen = self._choose(only, room + arena)
            parts[only.name] = self._streamed(only, chosen, "always")
            return chosen.arena_bytes
        dits = [c for c in self.streams if c.role == "dit"]
        for at, c in enumerate(self.streams):
            # Experts that alternate get equal shares of the room by their traffic; encoders what is left.
            rivals = [d for d in dits if d in self.streams[at:]] if c in dits else [c]
            traffic = sum(d.calls * d.total_bytes for d in rivals)
            share = room * c.calls * c.total_bytes // traffic if traffic else room
            chosen = self._choose(c, share + arena, arena)
            part = self._streamed(c, chosen, "always")
            parts[c.name] = part
            room -= part.held_bytes - c.other_bytes
        return arena

    def _fill_phase(self, phase: str, room: int, slots: int, parts: dict[str, ComponentPlan]) -> None:
        """Residents and rings of the components that stream in this phase alone, the busiest first."""
        members = [c for c in self.model.components if c.phase == phase and self.option[c.name] == _STREAM_PHASE]
        members.sort(key=lambda c: -c.calls * c.total_bytes)
        for c in members:
            least = slots * minimum_bytes(c.blocks)
            chosen = self._choose(c, least + room)
            part = self._streamed(c, chosen, "phase")
            bare = self._choose(c, least)
            thin = self._streamed(c, bare, "phase")
            # Blocks that are used once are not worth keeping: bringing them in is what streaming does anyway.
            if thin.seconds <= part.seconds * _THIN:
                part = thin
            parts[c.name] = part
            room -= part.held_bytes - c.other_bytes + part.arena_bytes - least

    def _choose(self, c: Component, budget: int, arena: int | None = None) -> Residency:
        # More than everything is everything, whatever the budget: one entry serves all roomy ones.
        key = (c.name, min(budget, c.total_bytes + (arena or 0)), arena, self.refine)
        if key not in self.known:
            self.known[key] = choose(
                c.blocks, key[1], self.curve, gap_s=c.other_s, arena_bytes=arena, refine=self.refine
            )
        return self.known[key]

    def _streamed(self, c: Component, chosen: Residency, hold: str) -> ComponentPlan:
        kept = sum(c.blocks[i].bytes for i in chosen.resident)
        refill = c.other_bytes + kept if hold == "phase" else 0
        seconds = 0.0
        if hold == "phase":
            seconds += self.curve.seconds(c.other_bytes)
            seconds += sum(self.curve.seconds(c.blocks[i].bytes) for i in chosen.resident)
            seconds *= c.loads
        for forwards in _shares(c.calls, c.loads):
            seconds += run_s(c.blocks, chosen.resident, chosen.arena_bytes, self.curve, forwards, gap_s=c.other_s)
            seconds += c.other_s if forwards else 0.0
        return ComponentPlan(
            name=c.name,
            strategy="stream",
            hold=hold,
            resident=chosen.resident,
            arena_bytes=chosen.arena_bytes,
            held_bytes=c.other_bytes + kept,
            refill_bytes=refill,
            step_s=chosen.step_s,
            bound_s=chosen.bound_s,
            seconds=seconds,
        )

    def _whole(self, c: Component) -> ComponentPlan:
        strategy, hold = self.option[c.name]
        refill = c.total_bytes if hold == "phase" else 0
        return ComponentPlan(
            name=c.name,
            strategy=strategy,
            hold=hold,
            resident=tuple(range(len(c.blocks))),
            arena_bytes=0,
            held_bytes=c.total_bytes,
            refill_bytes=refill,
            step_s=c.compute_s,
            bound_s=c.compute_s,
            seconds=c.calls * c.compute_s + c.loads * self.curve.seconds(refill),
        )

    def _phase(self, name: str, components: Sequence[ComponentPlan], shared: int) -> Phase:
        peak = self.model.reserved_bytes + shared
        seconds = 0.0
        activations = 0
        for c, part in zip(self.model.components, components, strict=True):
            if part.hold == "always":
                peak += part.held_bytes
            elif c.phase == name:
                peak += part.held_bytes + part.arena_bytes
            if c.phase == name:
                seconds += part.seconds
                activations = max(activations, c.activation_bytes)
        return Phase(name, peak + activations, seconds)


def _shares(total: int, parts: int) -> list[int]:
    """``total`` forwards over ``parts`` entries of the phase."""
    return [total // parts + (1 if i < total % parts else 0) for i in range(parts)]


def _why(winner: _Weighed, plan: Plan, weighed: Sequence[_Weighed], budget: int) -> str:
    text = f"{plan.label}: {_size(plan.peak_bytes)} of {_size(budget)}, {plan.call_s:.3g} s a call predicted"
    coarser = [w for w in weighed if w.draft.coarseness < winner.draft.coarseness and w.plan is None]
    others = [w for w in weighed if w is not winner and w.plan is not None]
    if others:
        best = min(others, key=lambda w: (w.call_s, w.rank))
        text += f"; next best {best.draft.label}, {best.call_s:.3g} s"
    missing = [w for w in coarser if w.needs > budget]
    if missing:
        first = min(missing, key=lambda w: w.rank)
        text += f"; {first.draft.label} needs {_size(first.needs)}"
    return text


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**28 else f"{nbytes / 2**20:.2f} MiB"
