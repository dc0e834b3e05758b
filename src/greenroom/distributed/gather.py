"""Blocks put together on the device from the shares of all ranks.

A block passes through two stages: this rank's share is copied from the host into a *shard slot*, then the shares of
all ranks are gathered into a *block slot*, whose bytes are laid out like the block's master. There are two slots of
each kind, for all components, allocated once: while one block computes, the next is gathered and the share of the one
after it is copied.

Note [The row of gathers is the same on every rank]
    A gather that one rank begins and another does not would hang both. Gathers come in passes: a pass brings the
    streamed blocks of one component by, each once, in a fixed order, and then the first two of the component that is
    likely to be next. Which passes there are, the ranks decide together (`step.py`); inside a pass a rank can go
    slowly or fast, skip blocks, or fail, and the pass is completed all the same. All that the guess about the next
    pass depends on is known to every rank.

Note [A block that does not come by is copied whole]
    An order that differs from the declared one is learned by all ranks together. A block that runs twice, in yet
    another order, or outside a pass, and one whose weights this rank has edited, is copied from this host's memory by
    itself. It costs an exposed copy and concerns no other rank.

Note [When a slot may be overwritten]
    The copy of a share waits for the gather that read the shard slot before, the gather for the block that computed
    from the block slot before, and the block for its gather: events on the copy stream, the gathering stream and the
    compute stream. Where a block was not used, gathers being serial on one stream is enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from greenroom.distributed.errors import RanksError, in_short
from greenroom.host import references
from greenroom.streaming import BlockStream, Copier, DeviceCopy, StreamedBlock, Track

SLOTS = 2
# torch has renamed it; the arguments are the same.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

# How often the order of a component's blocks is learned: one that differs from forward to forward has none.
_REORDERINGS = 3

Shard = tuple[torch.Tensor, bool]


class _Piece:
    """A streamed block as it is gathered, for good: what this rank edits later does not change what it contributes."""

    __slots__ = ("block", "layout", "nbytes", "pinned", "shard", "share", "views")

    def __init__(self, block: StreamedBlock, shard: torch.Tensor, pinned: bool) -> None:
        self.block = block
        self.shard = shard
        self.pinned = pinned
        self.share = shard.nbytes
        self.nbytes = block.unit.nbytes
        self.layout = block.unit.layout
        self.views: dict[int, tuple[list[torch.Tensor], list[int]]] = {}  # for each slot


class _Slot:
    """A block slot, the shard slot that belongs to it, and what is in them."""

    def __init__(self, block: torch.Tensor, shard: torch.Tensor, ready: Any, free: Any, copied: Any) -> None:
        self.block = block
        self.shard = shard
        self.ready = ready  # gathered
        self.free = free  # computed
        self.copied = copied  # the share has arrived
        self.piece: _Piece | None = None
        self.item = -1  # its place in the row of all gathers
        self.passed = True  # this rank does not need what is in it, or not any more
        self.used = False  # `free` was recorded for what is in it
        self.filled = False  # `ready` was recorded
        self.work: Any = None


class Gatherer:
    """The slots, and the row of gathers.

    Args:
        copier: the copy stream.
        size: of the group to gather in, which is set before the first pass; nothing else may use it.
    """

    def __init__(self, copier: Copier, size: int) -> None:
        self.copier = copier
        self.accelerator = copier.accelerator
        self.group: Any = None
        self.size = size
        self.stream = self.accelerator.new_stream()
        self.tracks: list[Track] = []
        self.issued = 0
        """Gathers begun so far; equal on every rank at the end of a pass."""
        self._every: dict[Track, list[_Piece]] = {}
        self._rows: dict[Track, list[_Piece]] = {}  # without the blocks that stay on the device
        self._resident: dict[Track, frozenset[int]] = {}
        self._reordered: Counter[Track] = Counter()
        self.order_seen: tuple[int, list[int]] | None = None
        """A component, by its place in `tracks`, and the order in which its blocks ran here, where that is another."""
        self._slots: list[_Slot] = []
        self._after: dict[Track, Counter[Track]] = {}  # how often which component followed
        self._latest: Track | None = None
        self._row: list[_Piece] = []  # of the pass that is under way, or was last
        self._next: list[_Piece] = []  # of the pass that is likely to follow
        self._first = 0  # where in the row of all gathers the pass begins
        self._at = 0  # the first block of the pass that has not gone by

    def add(self, track: Track, blocks: Sequence[StreamedBlock], shards: Sequence[Shard]) -> None:
        """Lets the streamed blocks of a component be gathered, in this order; before `open`.

        Args:
            shards: for each block this rank's share of its bytes, and whether that is page-locked.
        """
        self.tracks.append(track)
        self._rows[track] = self._every[track] = [_Piece(b, *s) for b, s in zip(blocks, shards, strict=True)]

    def keep(self, track: Track, resident: frozenset[int]) -> None:
        """From the next pass on, these blocks of a component stay on the device and are not gathered; on all ranks."""
        self._resident[track] = resident
        self._rows[track] = [p for p in self._every[track] if p.block.index not in resident]

    def reorder(self, track: Track, order: Sequence[int]) -> None:
        """From the next pass on, the blocks of a component come by in this order, by their indices; on all ranks."""
        place = {index: i for i, index in enumerate(order)}
        self._every[track] = sorted(self._every[track], key=lambda p: place.get(p.block.index, len(place)))
        self._reordered[track] += 1
        self.keep(track, self._resident.get(track, frozenset()))
        self.order_seen = None

    def observe(self, track: Track, seen: Sequence[StreamedBlock]) -> None:
        """The order in which a forward that did not fail ran the blocks."""
        ran = list(dict.fromkeys(b.index for b in seen))
        known = [p.block.index for p in self._every[track]]
        rest = iter(known)
        if all(i in rest for i in ran) or self._reordered[track] >= _REORDERINGS:
            return
        self.order_seen = self.tracks.index(track), ran + [i for i in known if i not in set(ran)]

    @property
    def longest(self) -> int:
        """The most blocks that any component has."""
        return max((len(row) for row in self._every.values()), default=0)

    def pieces(self, track: Track) -> list[_Piece]:
        """What a pass of the component gathers."""
        return list(self._rows.get(track, ()))

    def blocks(self, track: Track) -> list[StreamedBlock]:
        """All blocks of a component that may be gathered."""
        return [p.block for p in self._every.get(track, ())]

    @property
    def slot_bytes(self) -> int:
        """Device bytes of all slots."""
        block, shard = self._sizes()
        return SLOTS * (block + shard)

    def _sizes(self) -> tuple[int, int]:
        share = max((p.share for row in self._every.values() for p in row), default=0)
        return self.size * share, share

    def open(self) -> None:
        """Allocates the slots.

        Raises:
            torch.OutOfMemoryError: they do not fit.
        """
        block, shard = self._sizes()
        accelerator = self.accelerator
        with torch.inference_mode(False):
            blocks, shards = accelerator.empty(SLOTS * block), accelerator.empty(SLOTS * shard)
        self._slots = [
            _Slot(
                blocks[i * block : (i + 1) * block],
                shards[i * shard : (i + 1) * shard],
                accelerator.new_event(),
                accelerator.new_event(),
                accelerator.new_event(),
            )
            for i in range(SLOTS)
        ]
        fresh = accelerator.new_event()
        fresh.record(accelerator.current_stream())
        self.copier.stream.wait_event(fresh)
        self.stream.wait_event(fresh)

    def close(self) -> None:
        """Gives the slots back, behind all gathers that still write them."""
        if self._slots:
            self.copier.settle()
            done = self.accelerator.new_event()
            done.record(self.stream)
            self.accelerator.current_stream().wait_event(done)
        self._slots.clear()
        for row in self._every.values():
            for piece in row:
                piece.views.clear()

    def let_go(self) -> None:
        """Drops the process group and what is left of its work."""
        self.group = None
        for slot in self._slots:
            slot.work = None

    def abandon(self) -> None:
        self.close()
        self.tracks.clear()
        self._rows.clear()
        self._every.clear()
        self._row, self._next, self._latest = [], [], None
        self._after.clear()

    # ------------------------------------------------------------------ passes

    def begin(self, track: Track) -> None:
        """A pass of `track` begins; on every rank, after the same passes."""
        if self._latest is not None:
            self._after.setdefault(self._latest, Counter())[track] += 1
        ahead = self.issued - (self._first + len(self._row))  # 0 or SLOTS
        self._row = self._rows[track]
        self._next = self._rows[self._follower(track)]
        self._latest = track
        expected = [self._piece_at(i) for i in range(min(ahead, self._count))]
        fetched = [self._slot(self.issued - ahead + i).piece for i in range(ahead)]
        if ahead and fetched == expected:
            self._first = self.issued - ahead
        else:
            self._first = self.issued
        for slot in self._slots:
            slot.passed = True
        for item in range(self._first, self.issued):
            self._slot(item).passed = False
        self._at = 0
        self._pump()

    def _follower(self, track: Track) -> Track:
        """The component whose pass is likely to follow one of `track`: the one that did so most often."""
        seen = self._after.get(track)
        return seen.most_common(1)[0][0] if seen else track

    def _piece_at(self, i: int) -> _Piece:
        """Block `i` of the pass, or beyond its end one of the next."""
        n = len(self._row)
        return self._row[i] if i < n else self._next[(i - n) % len(self._next)]

    @property
    def _count(self) -> int:
        """Gathers of the pass that is under way, with those ahead of the next."""
        return len(self._row) + (SLOTS if self._next else 0)

    def _slot(self, item: int) -> _Slot:
        return self._slots[item % SLOTS]

    def take(self, block: StreamedBlock) -> _Slot | None:
        """The slot that holds `block`, which is about to compute; None if it does not come by in this pass any more."""
        i = next((k for k in range(self._at, len(self._row)) if self._row[k].block is block), None)
        if i is None or not self._go_to(i):
            return None
        self._at = i + 1
        return self._slot(self._first + i)

    def _go_to(self, i: int) -> bool:
        """Lets all blocks before block `i` pass by; False if it cannot come, since others compute in both slots."""
        while True:
            before = self.issued
            while self._at < min(i, self.issued - self._first):
                self._slot(self._first + self._at).passed = True
                self._at += 1
            self._pump()
            if self.issued - self._first > i:
                return True
            if self.issued == before:
                return False

    def pass_by(self, slot: _Slot) -> None:
        """What is in `slot` is not used by this rank."""
        slot.passed = True
        self._pump()

    def put(self, slot: _Slot) -> None:
        """The kernels of the block in `slot` have been enqueued."""
        slot.free.record(self.accelerator.current_stream())
        slot.used = slot.passed = True
        self._pump()

    def finish(self) -> None:
        """The pass ends for this rank: what it did not use goes by.

        Raises:
            RanksError: a gather failed.
        """
        end = self._first + len(self._row)
        while self.issued < self._first + self._count:
            for slot in self._slots:
                slot.passed = slot.passed or slot.item < end
            try:
                self._pump()
            except RanksError:
                raise
            except RuntimeError:
                # The other ranks cannot do without this gather; a copy that fails once more is a broken device.
                self._pump()
        for slot in self._slots:
            slot.passed = slot.item < end
        self._at = len(self._row)
        self.check()

    def check(self) -> None:
        """Raises RanksError if a gather is known to have failed."""
        for slot in self._slots:
            if slot.work is not None:
                try:
                    with self.accelerator.on(self.stream):
                        slot.work.wait()
                except RuntimeError as error:
                    raise RanksError(f"a gather failed: {in_short(error)}") from error

    def _pump(self) -> None:
        """Begins gathers for as long as slots are free, up to the first blocks of the next pass."""
        while self.issued < self._first + self._count:
            slot = self._slot(self.issued)
            if not slot.passed:
                return
            self._gather(slot, self._piece_at(self.issued - self._first))
            self.issued += 1

    def _gather(self, slot: _Slot, piece: _Piece) -> None:
        copier = self.copier
        if slot.filled:
            copier.stream.wait_event(slot.ready)  # the shard slot was read
        with torch.inference_mode(False), torch.no_grad():
            share = slot.shard[: piece.share]
            whole = slot.block[: self.size * piece.share]
            name = piece.block.unit.name
            copier.send(share, piece.shard, slot.copied, name=name, pinned=piece.pinned).enqueued()
            self.stream.wait_event(slot.copied)
            if slot.used:
                self.stream.wait_event(slot.free)
            try:
                with self.accelerator.on(self.stream):
                    slot.work = all_gather(whole, share, group=self.group, async_op=True)
                    slot.work.wait()  # of this stream, not of the host
            except RuntimeError as error:
                raise RanksError(f"a gather failed: {in_short(error)}") from error
            slot.ready.record(self.stream)
        slot.filled, slot.used, slot.passed = True, False, False
        slot.piece, slot.item = piece, self.issued


class GatherStream(BlockStream):
    """Blocks on their way through the slots of a `Gatherer`, in passes that somebody else grants.

    Args:
        copier: the copy stream.
        gatherer: whose slots the blocks come in.
        ask: begins a pass of a component, when all ranks do; told the track.
        end: ends it; told the track.
    """

    gathers = True

    def __init__(
        self, copier: Copier, gatherer: Gatherer, ask: Callable[[Track], None], end: Callable[[Track], None]
    ) -> None:
        super().__init__(copier)
        self.gatherer = gatherer
        self._ask = ask
        self._end = end
        self._running: Track | None = None
        self._inside: dict[StreamedBlock, tuple[_Slot, int]] = {}
        self._alone: dict[StreamedBlock, list[DeviceCopy]] = {}

    # ------------------------------------------------------------------ the two ends of a forward

    def begin_forward(self, track: Track) -> None:
        """Waits until all ranks begin a pass of the component.

        Raises:
            RanksError: the ranks are not together any more.
        """
        self.heal()
        track.begin()
        if self._running is None and not all(b.fixed is not None for b in self.gatherer.blocks(track)):
            self._ask(track)
            self._running = track

    def end_forward(self, track: Track, *, failed: bool = False) -> None:
        if not failed:
            self.gatherer.observe(track, track.seen)
        if self._running is track:
            self._running = None
            self._end(track)

    def heal(self) -> None:
        for block in [*self._inside, *self._alone]:
            self.leave(block)
        running, self._running = self._running, None
        if running is not None:
            self._end(running)

    # ------------------------------------------------------------------ the two ends of a block

    def enter(self, block: StreamedBlock) -> None:
        if block.fixed is not None or block in self._alone:
            return
        block.track.saw(block)
        slot = self.gatherer.take(block) if self._running is block.track else None
        unit = block.unit
        piece = None if slot is None else slot.piece
        if unit.edited:
            unit.absorb()
        unit.look()
        if slot is None or piece is None or unit.diverged or unit.shared is None or unit.layout != piece.layout:
            if slot is not None:
                self.gatherer.pass_by(slot)
            self.misses += 1
            self._alone[block] = self.copier.load([unit])
            return
        self.accelerator.current_stream().wait_event(slot.ready)
        unit.bind(*self._views(piece, slot))
        self._inside[block] = (slot, references(slot.block))

    def _views(self, piece: _Piece, slot: _Slot) -> tuple[list[torch.Tensor], list[int]]:
        key = id(slot)
        if key not in piece.views:
            views = piece.block.unit.views(slot.block[: piece.nbytes])
            piece.views[key] = (views, [v.data_ptr() for v in views])
        return piece.views[key]

    def leave(self, block: StreamedBlock) -> None:
        copies = self._alone.pop(block, None)
        if copies is not None:
            self.copier.drop(copies)
            return
        found = self._inside.pop(block, None)
        if found is None:
            return
        slot, before = found
        kept = references(slot.block) > before
        block.unit.release()
        if kept and self.copier.on_kept is not None:
            self.copier.on_kept(block.unit, slot.block)
        self.gatherer.put(slot)

    # ------------------------------------------------------------------ what a ring does by itself, and this does not

    @property
    def idle(self) -> bool:
        return False

    def prime(self, *, wait: bool = False) -> None: ...

    def pump(self) -> None: ...

    def end_call(self) -> None: ...

    def forget(self) -> None: ...

    def open(self, arena_bytes: int) -> None: ...

    def close_arena(self) -> None:
        for block in [*self._inside, *self._alone]:
            self.leave(block)

    def abandon(self) -> None:
        self._inside.clear()
        self._alone.clear()
        self.tracks.clear()
        self._running = None
