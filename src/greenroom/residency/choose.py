"""Which blocks stay on the device, and how large the arena is, under a byte budget or a block count.

The step of a forward is at least ``max(C, S)`` (see `ring`). Fewer streamed bytes lower S; what keeps the
step at the bound is that streamed copy time runs along with compute time everywhere, since an arena of two
blocks cannot store up a lead. So each candidate arena is filled by a sweep that lets the streamed copy time
follow the compute time, and the best fills are refined by exchanging blocks, each exchange judged by the
simulated ring.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from greenroom.residency.curve import TransferCurve
from greenroom.residency.ring import Block, Ring, simulate

# A search step sees this many forwards; the winner is simulated in full.
_SEARCH_FORWARDS = 8
_SEARCH_TIGHT = 1e-3
# Simulated blocks (streamed blocks x forwards) that one choice of up to 60 blocks may cost; longer ones in
# proportion.
_SEARCH_WORK = 70_000
# An arena that cannot hold a block in use beside the next one leaves no time to spare for a late copy; it is
# taken only when it is predicted to be this much faster.
_ONE_SLOT_GAIN = 0.985
# Steps closer than this are equal. Then the first few that copy least are compared on a bus slower by a half:
# measured times drift, and a choice with time to spare keeps its step.
_SAME_STEP = 1e-4
_STRESS = 1.5
_STRESSED = 8
# Copy over compute where no compute time is known.
_UNKNOWN = 3.0
# A step this close to what no choice can beat ends the search.
_GOOD_ENOUGH = 1.001
# Block lists up to this length are searched exhaustively (SDXL's UNet has seven).
_EXHAUSTIVE = 7
# Arenas tried for one resident set, the largest first.
_ARENAS = 12


@dataclass(frozen=True)
class Residency:
    """A resident set and its arena.

    resident: block indices, ascending; arena_bytes: 0 when everything is resident; step_s: predicted seconds
    of a steady forward; bound_s: ``max(C, S)`` of this resident set; device_bytes: residents and arena.
    """

    resident: tuple[int, ...]
    arena_bytes: int
    step_s: float
    bound_s: float
    device_bytes: int


def minimum_bytes(blocks: Sequence[Block]) -> int:
    """The least bytes that ``blocks`` can run in: one arena slot of the largest block (0 for no blocks)."""
    return max((b.bytes for b in blocks), default=0)


def spread(n_blocks: int, n_resident: int) -> tuple[int, ...]:
    """``n_resident`` of ``n_blocks`` equal blocks, as evenly spaced as whole numbers allow, also around the end.

    Raises ValueError unless 0 <= n_resident <= n_blocks.
    """
    if not 0 <= n_resident <= n_blocks:
        raise ValueError(f"n_resident: got {n_resident}, accepted are 0..{n_blocks}")
    return tuple((2 * j + 1) * n_blocks // (2 * n_resident) for j in range(n_resident))


def choose(
    blocks: Sequence[Block],
    budget_bytes: int,
    curve: TransferCurve,
    *,
    gap_s: float = 0.0,
    arena_bytes: int | None = None,
    refine: bool = True,
) -> Residency:
    """The resident set and arena with the least predicted step whose bytes stay within ``budget_bytes``.

    blocks: in execution order, with sizes and compute seconds (all zero: not known yet); gap_s: compute
    seconds between two forwards (non-block layers, scheduler); arena_bytes: an arena given from outside, part
    of the budget, for rings that several components share; refine: False leaves out the exchanges, for a
    first look that costs a tenth. Equal inputs give equal results.

    Raises ValueError when the budget is below `minimum_bytes`, or a given arena below the largest block.
    """
    least = max(minimum_bytes(blocks), arena_bytes or 0)
    if arena_bytes is not None and arena_bytes < minimum_bytes(blocks):
        raise ValueError(f"arena_bytes: got {arena_bytes}, accepted is at least {minimum_bytes(blocks)}")
    if budget_bytes < least:
        raise ValueError(f"budget_bytes: got {budget_bytes}, accepted is at least {least}")
    task = _Task(blocks, curve, gap_s)
    task.work = task.work if refine else 0
    if task.total_bytes + (arena_bytes or 0) <= budget_bytes:
        return task.result(frozenset(range(len(blocks))), arena_bytes or 0)
    return _search(task, _arenas(task, budget_bytes, arena_bytes), budget_bytes, grow=arena_bytes is None)


def resident_count(
    blocks: Sequence[Block],
    n: int,
    curve: TransferCurve,
    *,
    slots: int = 2,
    gap_s: float = 0.0,
) -> Residency:
    """The best ``n`` resident blocks, the arena holding ``slots`` of the largest streamed block.

    A count above the number of blocks means all of them. Raises ValueError for a negative count or no slot.
    """
    if n < 0:
        raise ValueError(f"n: got {n}, accepted is a count >= 0")
    if slots < 1:
        raise ValueError(f"slots: got {slots}, accepted is a count >= 1")
    task = _Task(blocks, curve, gap_s)
    if n >= len(blocks):
        return task.result(frozenset(range(len(blocks))), 0)
    task.costs = [1] * len(blocks)
    return _search(task, [_Frame(lambda widest: slots * widest, frozenset(), n)], None, grow=False)


class _Task:
    """The numbers of one choice as plain lists, and what each candidate costs."""

    def __init__(self, blocks: Sequence[Block], curve: TransferCurve, gap_s: float) -> None:
        self.sizes = [b.bytes for b in blocks]
        self.blocks = blocks
        self.curve = curve
        self.copies = [curve.seconds(b.bytes) for b in blocks]
        self.computes = [b.compute_s for b in blocks]
        if not any(self.computes):
            # Nothing measured yet: every choice with the same bytes would look alike. In proportion to the
            # copies, and shorter, residents are spread evenly, which is right whatever comes.
            self.computes = [copy / _UNKNOWN for copy in self.copies]
        self.costs = self.sizes  # what a resident takes from the limit: bytes, or one for a count
        self.gap_s = gap_s
        self.total_bytes = sum(self.sizes)
        self.compute_s = sum(self.computes) + gap_s
        self.copy_s = sum(self.copies)
        self.work = _SEARCH_WORK * max(len(blocks), 60) // 60
        self._known: dict[tuple[frozenset[int], int], float] = {}

    def step(self, resident: frozenset[int], arena: int) -> float:
        key = (resident, arena)
        if key in self._known:
            return self._known[key]
        ring = Ring(self.sizes, self.copies, self.computes, resident, arena, self.gap_s)
        self.work -= 5 * len(ring.streamed) + 20
        step = ring.steady(_SEARCH_FORWARDS, _SEARCH_TIGHT)
        self._known[key] = step
        return step

    def stressed(self, candidate: _Candidate) -> float:
        """Step of a candidate on a slower bus."""
        copies = [copy * _STRESS for copy in self.copies]
        ring = Ring(self.sizes, copies, self.computes, candidate.resident, candidate.arena, self.gap_s)
        return ring.steady(_SEARCH_FORWARDS, _SEARCH_TIGHT)

    @property
    def least_cost(self) -> int:
        return min(self.costs, default=0)

    def critical(self, candidate: _Candidate) -> list[int]:
        """Streamed blocks on the critical path of a candidate."""
        ring = Ring(self.sizes, self.copies, self.computes, candidate.resident, candidate.arena, self.gap_s)
        self.work -= 5 * len(ring.streamed) + 20
        return ring.critical() if ring.streamed else []

    def streamed_s(self, resident: frozenset[int]) -> float:
        return self.copy_s - sum(self.copies[i] for i in resident)

    def result(self, resident: frozenset[int], arena: int) -> Residency:
        steady = simulate(self.blocks, resident, arena, self.curve, gap_s=self.gap_s)
        compute = sum(b.compute_s for b in self.blocks) + self.gap_s
        held = sum(self.sizes[i] for i in resident) + arena
        bound = max(compute, self.streamed_s(resident))
        return Residency(tuple(sorted(resident)), arena, steady.step_s, bound, held)


@dataclass(frozen=True)
class _Frame:
    """One way to split the limit: an arena, the blocks too large for it, and what is left for further residents.

    arena: bytes for a given largest streamed block; limit: total cost of the residents, the forced included.
    """

    arena: Callable[[int], int]
    forced: frozenset[int]
    limit: int


@dataclass(frozen=True)
class _Candidate:
    frame: _Frame
    resident: frozenset[int]
    arena: int
    step_s: float
    streamed_s: float
    one_slot: bool

    def key(self) -> tuple[float, float, int]:
        return (self.step_s, self.streamed_s, self.arena)

    def result(self, task: _Task) -> Residency:
        return task.result(self.resident, self.arena)


def _arenas(task: _Task, budget: int, given: int | None) -> list[_Frame]:
    """The arenas worth a look: a few multiples of each of the larger block sizes, and given ones alone."""
    if given is not None:
        return [_Frame(_fixed(given), frozenset(), budget - given)]
    frames: list[_Frame] = []
    for widest in _some(sorted(set(task.sizes), reverse=True), 6):
        forced = frozenset(i for i, size in enumerate(task.sizes) if size > widest)
        forced_bytes = sum(task.sizes[i] for i in forced)
        for halves in (4, 2, 3, 6, 8):
            arena = widest * halves // 2
            if forced_bytes + arena <= budget:
                frames.append(_Frame(_fixed(arena), forced, budget - arena))
    return frames


def _fixed(arena: int) -> Callable[[int], int]:
    return lambda widest: arena


def _some(values: Sequence[int], count: int) -> list[int]:
    """At most ``count`` of the values, the first three of them and an even choice of the rest."""
    if len(values) <= count:
        return list(values)
    rest = values[3:]
    return [*values[:3], *(rest[i * len(rest) // (count - 3)] for i in range(count - 3))]


def _search(task: _Task, frames: Sequence[_Frame], budget: int | None, *, grow: bool) -> Residency:
    pool: dict[tuple[frozenset[int], int], _Candidate] = {}

    whole = budget if grow else None
    spends = (None,) if whole is None else (None, whole)

    def enter(frame: _Frame, resident: frozenset[int]) -> None:
        for spend in spends:
            candidate = _judge(task, frame, resident, spend)
            pool.setdefault((candidate.resident, candidate.arena), candidate)

    def good() -> bool:
        """Whether no other choice can be noticeably faster: none streams less than the roomiest frame's."""
        two_slots = min((c.streamed_s for c in pool.values() if not c.one_slot), default=math.inf)
        one_slot = min(c.streamed_s for c in pool.values()) / _ONE_SLOT_GAIN
        floor = max(task.compute_s, min(two_slots, one_slot))
        return _fastest(pool.values()).step_s <= floor * _GOOD_ENOUGH

    for frame in frames:
        # The even ones first: where nothing else tells candidates apart, the first one stays.
        if len(set(task.sizes)) == 1:
            enter(frame, frozenset(spread(len(task.sizes), min(len(task.sizes), frame.limit // task.costs[0]))))
        enter(frame, _fill(task, frame, 0, 0.5))
        enter(frame, _head(task, frame))
        if grow:  # no more residents than must be, and all the rest for the arena
            enter(frame, frame.forced)
    if not good() and whole is not None and len(task.sizes) <= _EXHAUSTIVE:
        for bits in range(1 << len(task.sizes)):
            resident = frozenset(i for i in range(len(task.sizes)) if bits >> i & 1)
            for candidate in _every_arena(task, resident, whole):
                pool.setdefault((candidate.resident, candidate.arena), candidate)
        return _pick(task, pool.values()).result(task)
    if not good():
        for frame in _distinct_frames(pool.values(), 4):
            for level in _some(sorted(set(task.sizes)), 4):
                for start in (0.5, 0.1, 1.0):
                    enter(frame, _fill(task, frame, level, start))
    if task.work > 0 and not good():
        seeds = _distinct_frames(pool.values(), 7)
        share = task.work // max(1, len(seeds))
        for frame in seeds:
            seed = min((c for c in pool.values() if c.frame is frame), key=_Candidate.key)
            for candidate in _refine(task, seed, task.work - share, whole):
                pool.setdefault((candidate.resident, candidate.arena), candidate)
            if good():
                break
        for seed in sorted(pool.values(), key=_Candidate.key)[:3] if whole is not None else ():
            for candidate in _every_arena(task, seed.resident, whole or 0):
                pool.setdefault((candidate.resident, candidate.arena), candidate)
    return _pick(task, pool.values()).result(task)


def _distinct_frames(pool: Iterable[_Candidate], count: int) -> list[_Frame]:
    """The frames of the best candidates, each once."""
    frames: list[_Frame] = []
    for candidate in sorted(pool, key=_Candidate.key):
        if all(candidate.frame is not f for f in frames):
            frames.append(candidate.frame)
    return frames[:count]


def _judge(task: _Task, frame: _Frame, resident: frozenset[int], whole: int | None) -> _Candidate:
    """Simulate a resident set, in the frame's arena or in all that the ``whole`` budget leaves."""
    sizes = [size for i, size in enumerate(task.sizes) if i not in resident]
    if not sizes:
        arena = 0
    elif whole is None:
        arena = frame.arena(max(sizes))
    else:
        arena = whole - sum(task.sizes[i] for i in resident)
    pair = max((a + b for a, b in zip(sizes, [*sizes[1:], sizes[0]], strict=True)), default=0)
    step = task.step(resident, arena)
    return _Candidate(frame, resident, arena, step, task.streamed_s(resident), pair > arena)


def _every_arena(task: _Task, resident: frozenset[int], whole: int) -> Iterator[_Candidate]:
    """A resident set in each of the larger arenas that place its blocks differently.

    A lap of the ring ends where the next block would not fit, so only sums of consecutive streamed blocks
    matter. More is not always better: what is skipped at the end of a lap depends on it.
    """
    sizes = [size for i, size in enumerate(task.sizes) if i not in resident]
    room = whole - task.total_bytes + sum(sizes)
    if not sizes or room < max(sizes):
        return
    sums: set[int] = set()
    for start in range(len(sizes)):
        total = 0
        for k in range(start, start + 2 * len(sizes)):
            total += sizes[k % len(sizes)]
            if total > room:
                break
            sums.add(total)
    for arena in sorted((a for a in sums if a >= max(sizes)), reverse=True)[:_ARENAS]:
        yield _judge(task, _Frame(_fixed(arena), resident, whole - arena), resident, None)


def _fastest(pool: Collection[_Candidate]) -> _Candidate:
    """The least step; one slot only where it gains enough."""
    best = min(pool, key=_Candidate.key)
    roomy = min((c for c in pool if not c.one_slot), key=_Candidate.key, default=best)
    return roomy if best.one_slot and best.step_s > roomy.step_s * _ONE_SLOT_GAIN else best


def _pick(task: _Task, pool: Collection[_Candidate]) -> _Candidate:
    """The fastest; among equals the one that stands a slower bus best, then the one that copies least."""
    best = _fastest(pool)
    limit = best.step_s * (1 + _SAME_STEP)
    near = [c for c in pool if c.step_s <= limit and (best.one_slot or not c.one_slot)]
    near.sort(key=lambda c: (c.streamed_s, c.arena))
    if len(near) == 1:
        return near[0]
    return min(near[:_STRESSED], key=lambda c: (round(task.stressed(c) / best.step_s, 3), c.streamed_s, c.arena))


def _head(task: _Task, frame: _Frame) -> frozenset[int]:
    """The leading blocks that fit, the plain choice that no other may lose to."""
    chosen = set(frame.forced)
    room = frame.limit - sum(task.costs[i] for i in chosen)
    for i, cost in enumerate(task.costs):
        if i not in chosen and cost <= room:
            chosen.add(i)
            room -= cost
    return frozenset(chosen)


def _fill(task: _Task, frame: _Frame, level: int, start: float) -> frozenset[int]:
    """A swept resident set over the blocks of at least ``level`` bytes that uses up the frame's limit."""
    able = [i not in frame.forced and size >= level for i, size in enumerate(task.sizes)]
    return _top_up(task, frame, _sweep(task, frame, able, start) if any(able) else set(frame.forced))


def _sweep(task: _Task, frame: _Frame, able: Sequence[bool], start: float) -> set[int]:
    """Residents such that the streamed copy time keeps pace with compute, as many as the limit takes.

    For a target S of streamed copy seconds, block i becomes resident when the copy time so far exceeds
    ``S / C`` times the compute time so far by half a block; the smallest S that the limit allows is bisected.
    """
    copies, computes, costs = task.copies, task.computes, task.costs
    forced_cost = sum(costs[i] for i in frame.forced)

    def taken(target: float) -> tuple[set[int], int]:
        pace = target / task.compute_s if task.compute_s > 0 else 0.0
        chosen = set(frame.forced)
        cost = forced_cost
        debt = 0.0
        for i, copy in enumerate(copies):
            debt += copy - pace * computes[i]
            if i in frame.forced:
                debt -= copy
            elif able[i] and debt >= copy * start:
                debt -= copy
                chosen.add(i)
                cost += costs[i]
        return chosen, cost

    low, high = 0.0, 2.0 * task.copy_s
    best = set(frame.forced)
    best_cost = forced_cost
    for _ in range(14):
        target = 0.5 * (low + high)
        chosen, cost = taken(target)
        if cost <= frame.limit:
            high = target
            if cost >= best_cost:
                best, best_cost = chosen, cost
        else:
            low = target
    return best


def _top_up(task: _Task, frame: _Frame, chosen: set[int]) -> frozenset[int]:
    """Spend what is left of the limit, each time on the block farthest from other residents among the largest."""
    chosen = set(chosen)
    costs, copies = task.costs, task.copies
    n = len(costs)
    room = frame.limit - sum(costs[i] for i in chosen)
    while room >= task.least_cost:
        fitting = [i for i in range(n) if costs[i] <= room and i not in chosen]
        if not fitting:
            break
        widest = max(copies[i] for i in fitting)
        gaps = _gaps(chosen, n)
        best = max((i for i in fitting if copies[i] >= widest), key=lambda i: (gaps[i], -i))
        chosen.add(best)
        room -= costs[best]
    return frozenset(chosen)


def _gaps(chosen: set[int], n: int) -> list[int]:
    """Distance of each block to the nearest resident, around the end of the forward too."""
    if not chosen:
        return [n] * n
    gaps = [n] * n
    for order in (range(2 * n), range(2 * n - 1, -1, -1)):
        away = n
        for k in order:
            i = k % n
            away = 0 if i in chosen else away + 1
            if away < gaps[i]:
                gaps[i] = away
    return gaps


def _refine(task: _Task, seed: _Candidate, stop: int, whole: int | None) -> Iterator[_Candidate]:
    """Exchange streamed blocks on the critical path for residents; ``stop`` is the work to leave.

    Late acceptance (Burke and Bykov, 2017): an exchange is kept when it is no worse than the state some
    rounds ago, which crosses the plateaus that a pattern repeated along the forward makes.
    """
    rng = random.Random(0)
    frame, now, best = seed.frame, seed, seed
    past = [seed.step_s] * 12
    turn = 0
    hot = task.critical(now)
    while task.work > stop and hot:
        task.work -= 10  # repeated states are looked up, yet must not go on for ever
        pick = hot if rng.random() < 0.75 else [i for i in range(len(task.sizes)) if i not in now.resident]
        s = pick[rng.randrange(len(pick))]
        free = sorted(now.resident - frame.forced, key=lambda r: abs(r - s))
        resident = set(now.resident)
        # Where the arena takes what is left over, fewer residents can be the better choice.
        shrink = whole is not None and rng.random() < 0.5
        if not (shrink and free) or rng.random() < 0.6:
            resident.add(s)
        else:
            resident.discard(free.pop(rng.randrange(len(free))))
        room = frame.limit - sum(task.costs[i] for i in resident)
        while room < 0 and free:
            r = free.pop(min(int(rng.expovariate(0.5)), len(free) - 1))
            resident.discard(r)
            room += task.costs[r]
        if room < 0:
            continue
        chosen = frozenset(resident) if shrink else _top_up(task, frame, resident)
        candidate = _judge(task, frame, chosen, whole)
        if candidate.step_s <= max(past[turn % len(past)], now.step_s):
            if candidate.resident != now.resident:
                now = candidate
                hot = task.critical(now)
            if now.key() < best.key():
                best = now
                yield best
        past[turn % len(past)] = now.step_s
        turn += 1
