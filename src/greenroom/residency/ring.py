"""The streaming ring in numbers: where each block lies in the arena, and how long a forward takes.

The machine that is simulated. One forward runs blocks 0..L-1 in order. A resident block stays on the device.
A streamed block is copied into one arena, a ring buffer of bytes: blocks take contiguous intervals in order,
and an interval that would cross the end starts again at offset 0, the leftover being skipped. Copies are
serial, in execution order. A copy starts when the copy before it has ended and every earlier occupant of its
bytes has finished computing; a block computes when the block before it has finished and its own copy has
ended. Forwards follow one another, so the prefetch wraps from the last streamed block to the first of the
next forward.

No schedule of one load per streamed block and forward beats ``max(C, S)``: C the compute time of a forward, S
the copy time of its streamed blocks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from greenroom.residency.curve import TransferCurve

# Forwards simulated before the average is taken as it stands. Near C == S the ring fills by a hair a forward.
MAX_FORWARDS = 96
_TIGHT = 1e-9


@dataclass(frozen=True)
class Block:
    """One block of a component.

    bytes: what it takes in the arena or as a resident, alignment included; > 0.
    compute_s: seconds of compute of one forward of the block; >= 0.
    """

    bytes: int
    compute_s: float

    def __post_init__(self) -> None:
        if not self.bytes > 0:
            raise ValueError(f"Block.bytes: got {self.bytes!r}, accepted is a size > 0")
        if not (math.isfinite(self.compute_s) and self.compute_s >= 0):
            raise ValueError(f"Block.compute_s: got {self.compute_s!r}, accepted are finite seconds >= 0")


@dataclass(frozen=True)
class Steady:
    """The steady state over repeated forwards.

    step_s: seconds from one forward to the next; stall_s: the part of it in which compute waits for a copy;
    bus_idle_share: share of it in which nothing is copied, 0..1; peak_bytes: residents and arena.
    """

    step_s: float
    stall_s: float
    bus_idle_share: float
    peak_bytes: int


def place(sizes: Sequence[int], arena_bytes: int) -> tuple[list[list[int]], int]:
    """Lay repeated forwards of streamed blocks into the ring.

    sizes: bytes of the streamed blocks, in order; arena_bytes: bytes of the ring, at least the largest of
    them. Returns (lags, first): ``lags[f][k]`` says how many streamed blocks before block k of forward f the
    last earlier occupant of its bytes ran (for the first lap: beyond the start, which is free at once). The
    forwards from ``first`` on repeat for ever.
    """
    m = len(sizes)
    if not m:
        return [[]], 0
    lags: list[list[int]] = []
    seen: dict[tuple[int, int, int], int] = {}
    head = lap = last_lap = 0  # offset; index of the first block of this lap and of the one before
    before: list[int] = []  # start offsets of the lap before
    current: list[int] = []
    passed = 0  # blocks of the lap before that this lap has overwritten so far
    k = 0
    while True:
        # The lap that took offset 0 last decides all that follows, so an equal state is the start of a cycle.
        state = (k - lap, k - last_lap, head)
        if state in seen and k:
            return lags, seen[state]
        seen[state] = len(lags)
        row: list[int] = []
        for size in sizes:
            if head + size > arena_bytes:
                head, passed, before, current = 0, 0, current, []
                last_lap, lap = lap, k
            current.append(head)
            head += size
            while passed < len(before) and before[passed] < head:
                passed += 1
            # Compute is in order: waiting for the latest occupant of these bytes waits for the earlier ones.
            row.append(k - (last_lap + passed - 1) if passed else k + 1)
            k += 1
        lags.append(row)


class Ring:
    """The event recurrence of one resident set in one arena; cheap enough for a search to call hundreds of times.

    copies, computes: seconds of each block; gap_s: compute between the last block and the next forward's
    first.
    """

    __slots__ = (
        "_computes",
        "_copies",
        "_first",
        "_lags",
        "_rests",
        "_window",
        "gap_s",
        "streamed",
        "tail_s",
    )

    def __init__(
        self,
        sizes: Sequence[int],
        copies: Sequence[float],
        computes: Sequence[float],
        resident: Collection[int],
        arena_bytes: int,
        gap_s: float,
    ) -> None:
        streamed = [i for i in range(len(sizes)) if i not in resident]
        self.streamed = streamed
        self._copies = [copies[i] for i in streamed]
        self._computes = [computes[i] for i in streamed]
        rests: list[float] = []  # compute of the residents since the last streamed block
        rest = 0.0
        at = 0
        for i in streamed:
            while at < i:
                rest += computes[at]
                at += 1
            rests.append(rest)
            rest = 0.0
            at = i + 1
        self.tail_s = rest + sum(computes[at:])
        self.gap_s = gap_s
        self._rests = rests
        held = [sizes[i] for i in streamed]
        # A place that frees up four forwards later holds nothing back, so a larger arena changes no time here.
        self._lags, self._first = place(held, min(arena_bytes, 5 * sum(held)))
        self._window = max(max(row) for row in self._lags[self._first :]) if streamed else 1

    def forwards(self, count: int) -> float:
        """Seconds of ``count`` forwards, the ring empty and the bus free at the start; no gap after the last."""
        done, bus, comp = [0.0], 0.0, -self.tail_s - self.gap_s
        for f in range(count):
            bus, comp = self._forward(f, done, bus, comp + self.tail_s + self.gap_s)
        return comp + self.tail_s

    def steady(self, max_forwards: int, tight: float = _TIGHT) -> float:
        """Seconds a forward takes once the pattern repeats.

        For the max-plus recurrence x(n+1) = A x(n), the growth rate lies between the least and the greatest
        entry of x(n+p) - x(n) over p, for every n and p (the max-plus Collatz-Wielandt bounds); the
        simulation stops when the two are equal within ``tight``.
        """
        if not self.streamed:
            return self.tail_s + self.gap_s
        done, bus, comp = [0.0], 0.0, 0.0
        hand_over = self.tail_s + self.gap_s
        f = 0
        while f < self._first:
            bus, comp = self._forward(f, done, bus, comp + (hand_over if f else 0.0))
            f += 1
        period = len(self._lags) - self._first
        marks: list[tuple[int, list[float]]] = []
        while True:
            if len(done) >= self._window and f:
                now = [*done[-self._window :], bus]
                for then_f, then in reversed(marks[-4:]):
                    rises = [b - a for a, b in zip(then, now, strict=True)]
                    low, high = min(rises), max(rises)
                    if high - low <= tight * high:
                        return 0.5 * (low + high) / (f - then_f)
                if f >= max_forwards and marks:
                    then_f, then = marks[len(marks) // 2]
                    return (now[-2] - then[-2]) / (f - then_f)
                marks.append((f, now))
            for _ in range(period):
                bus, comp = self._forward(f, done, bus, comp + (hand_over if f else 0.0))
                f += 1

    def critical(self) -> list[int]:
        """Indices of the streamed blocks whose copies set the steady step (on the longest path of a cycle)."""
        period = len(self._lags) - self._first
        count = self._first + -(-5 // period) * period
        done, bus, comp = [0.0], 0.0, 0.0
        late: list[bool] = []  # compute waited for the copy
        full: list[bool] = []  # the copy waited for its place
        rows: list[int] = []
        for f in range(count):
            row = self._row(f)
            rows += row
            comp += self.tail_s + self.gap_s if f else 0.0
            for copy, rest, compute, lag in zip(self._copies, self._rests, self._computes, row, strict=True):
                free = done[-lag]
                full.append(free > bus)
                bus = max(bus, free) + copy
                comp += rest
                late.append(bus > comp)
                comp = max(bus, comp) + compute
                done.append(comp)
        m = len(self.streamed)
        k, copying = len(late) - 1, False
        hot: set[int] = set()
        while k > len(late) - 1 - max(period, 2) * m:
            if copying:
                hot.add(self.streamed[k % m])
                copying = not full[k]
                k -= 1 if copying else rows[k]
            else:
                copying = late[k]
                k -= 0 if copying else 1
        return sorted(hot)

    def _row(self, f: int) -> list[int]:
        first = self._first
        return self._lags[f if f < first else first + (f - first) % (len(self._lags) - first)]

    def _forward(self, f: int, done: list[float], bus: float, comp: float) -> tuple[float, float]:
        finished = done.append
        for copy, rest, compute, lag in zip(self._copies, self._rests, self._computes, self._row(f), strict=True):
            free = done[-lag]
            if free > bus:
                bus = free
            bus += copy
            comp += rest
            if bus > comp:
                comp = bus
            comp += compute
            finished(comp)
        return bus, comp


def simulate(
    blocks: Sequence[Block],
    resident: Collection[int],
    arena_bytes: int,
    curve: TransferCurve,
    forwards: int = MAX_FORWARDS,
    *,
    gap_s: float = 0.0,
) -> Steady:
    """Steady state of streaming ``blocks`` (those not in ``resident``) through an arena.

    resident: block indices; arena_bytes: bytes of the ring (two slots: twice the largest streamed block);
    forwards: simulated at most; gap_s: compute seconds between two forwards. The step is the average over
    whole cycles of the ring's offsets.

    Raises ValueError for an index out of range or an arena smaller than a streamed block.
    """
    chosen = frozenset(resident)
    check(blocks, chosen, arena_bytes)
    ring = Ring(
        [b.bytes for b in blocks],
        [curve.seconds(b.bytes) for b in blocks],
        [b.compute_s for b in blocks],
        chosen,
        arena_bytes,
        gap_s,
    )
    step = ring.steady(forwards)
    compute = sum(b.compute_s for b in blocks) + gap_s
    bus = sum(curve.seconds(blocks[i].bytes) for i in ring.streamed)
    held = sum(blocks[i].bytes for i in chosen) + (arena_bytes if ring.streamed else 0)
    idle = max(0.0, 1.0 - bus / step) if step > 0 else 1.0
    return Steady(step, max(0.0, step - compute), idle, held)


def run_s(
    blocks: Sequence[Block],
    resident: Collection[int],
    arena_bytes: int,
    curve: TransferCurve,
    forwards: int,
    *,
    gap_s: float = 0.0,
) -> float:
    """Seconds of ``forwards`` forwards that begin with an empty ring and a free bus; residents are in place.

    Beyond a few forwards the steady step is added for each. Raises ValueError as `simulate` does.
    """
    chosen = frozenset(resident)
    check(blocks, chosen, arena_bytes)
    if forwards < 1:
        return 0.0
    ring = Ring(
        [b.bytes for b in blocks],
        [curve.seconds(b.bytes) for b in blocks],
        [b.compute_s for b in blocks],
        chosen,
        arena_bytes,
        gap_s,
    )
    head = min(forwards, 4)
    seconds = ring.forwards(head)
    if forwards > head:
        seconds += (forwards - head) * ring.steady(MAX_FORWARDS)
    return seconds


def check(blocks: Sequence[Block], resident: frozenset[int], arena_bytes: int) -> None:
    """Raise ValueError unless the resident indices exist and every streamed block fits the arena."""
    for i in resident:
        if not 0 <= i < len(blocks):
            raise ValueError(f"resident: got block {i!r}, accepted are 0..{len(blocks) - 1}")
    for i, block in enumerate(blocks):
        if i not in resident and block.bytes > arena_bytes:
            raise ValueError(f"arena_bytes: got {arena_bytes}, accepted is at least {block.bytes} (streamed block {i})")
