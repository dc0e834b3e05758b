"""Moving units onto the device: flat copies on a stream of their own, and the ring through which blocks pass.

Note [When a block may compute, when its bytes may be overwritten]
    A copy is followed by its `ready` event on the copy stream, and the compute stream waits for it before the
    first kernel of the block. After the last kernel of the block a `free` event is recorded on the compute stream,
    and the copy stream waits for it before it writes the same bytes again. Both waits happen on the device: in
    the steady state the host enqueues and goes on. Copies are serial on one stream, so a block that was fetched and
    never used needs no event before its bytes are overwritten.

Note [An unexpected order is never wrong]
    What comes next is a guess. A block that was not fetched, because the forward skipped, repeated or reordered
    blocks, because an exception or a second caller came in between, is copied at once and computes as soon as that
    copy is done: one exposed copy, the right values.
"""

from __future__ import annotations

import itertools
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from greenroom.accelerator import Accelerator
from greenroom.errors import OffloadError
from greenroom.host import HostUnit, references
from greenroom.staging import Copy, Span, Stager

Kept = Callable[[HostUnit, torch.Tensor], None]
"""Told of a unit that has left `slab`, its bytes on the device, while somebody kept a view of them."""

# Forwards after which a call that nobody ends is no longer recorded.
_LONGEST_CALL = 10_000


class DeviceCopy:
    """A whole unit in a device buffer of its own, for as long as this object lives."""

    def __init__(self, unit: HostUnit, buffer: torch.Tensor, ready: Any) -> None:
        self.unit = unit
        self.buffer = buffer
        self.ready = ready
        self.layout = unit.layout
        self.views = unit.views(buffer)
        self.addresses = [v.data_ptr() for v in self.views]
        self.references = references(buffer)


class CopyProbe(Protocol):
    """Who times copies."""

    def span(self) -> Span:
        """Events to record right before and right after a copy."""

    def copied(self, name: str, nbytes: int, span: Span, copy: Copy) -> None:
        """Told of a copy that was asked for, and of the events around it."""


class Copier:
    """The copy stream, and copies of whole units into buffers of their own.

    The thread that computes and one that takes part in gathers may send copies at the same time.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.stream = accelerator.new_stream()
        self.copied_bytes = 0
        self.copies = 0
        self.probe: CopyProbe | None = None
        self.stager: Stager | None = None
        """Set while there are masters that are not pinned."""
        self.on_kept: Kept | None = None
        self._sending = threading.RLock()  # taken again where garbage is collected while it is held

    def fill(self, buffer: torch.Tensor, unit: HostUnit, ready: Any) -> Copy:
        """Asks for one flat copy of the unit's master into `buffer`, as `send` does."""
        return self.send(buffer, unit.source, ready, name=unit.name, pinned=unit.pinned and not unit.diverged)

    def send(self, target: torch.Tensor, source: torch.Tensor, ready: Any, *, name: str, pinned: bool) -> Copy:
        """Asks for one flat copy from host memory to the device, and for `ready` after it.

        Args:
            target, source: uint8 tensors of one size.
            ready: event to record on the copy stream.
            name: of what is copied, for timelines.
            pinned: whether `source` is page-locked.

        Returns:
            What to wait for before another stream waits for `ready`.
        """
        with self._sending:
            self.copied_bytes += source.nbytes
            self.copies += 1
            probe = self.probe
            span = None if probe is None else probe.span()
            if self.stager is not None:
                copy = self.stager.copy(target, source, ready, span, pinned=pinned)
            else:
                copy = self._enqueue(target, source, ready, span)
            if probe is not None and span is not None:
                probe.copied(name, source.nbytes, span, copy)
        return copy

    def _enqueue(self, target: torch.Tensor, source: torch.Tensor, ready: Any, span: Span | None) -> Copy:
        with self.accelerator.on(self.stream):
            if span is not None:
                span[0].record(self.stream)
            target.copy_(source, non_blocking=True)
            ready.record(self.stream)
            if span is not None:
                span[1].record(self.stream)
        return Copy()

    def finish(self) -> None:
        """Waits until no copy that was asked for reads host memory any more.

        Memory that was registered with a device goes at once when its tensors do, whoever still copies from it. So
        this comes before a master is dropped.
        """
        with self._sending:
            stager = self.stager
        if stager is not None:
            stager.drain()
        self.stream.synchronize()

    def end_staging(self) -> int:
        """Closes the staging ring, if there is one, and returns the bytes that it had pinned."""
        with self._sending:
            stager, self.stager = self.stager, None
        if stager is None:
            return 0
        nbytes = stager.nbytes
        stager.close()
        return nbytes

    def load(self, units: Sequence[HostUnit]) -> list[DeviceCopy]:
        """Brings units in and binds them; the compute stream waits for the copies, the host does not.

        Raises:
            torch.OutOfMemoryError: not all fit; none is bound and what was allocated is free again.
        """
        accelerator = self.accelerator
        with torch.inference_mode(False), torch.no_grad():
            for unit in units:
                if unit.edited:
                    unit.absorb()
            copies: list[DeviceCopy] = []
            try:
                # Allocated before anything is enqueued, so that too little memory leaves nothing in flight.
                for unit in units:
                    copies.append(DeviceCopy(unit, accelerator.empty(unit.nbytes), accelerator.new_event()))
                # The memory may still be in use by earlier work of the compute stream, from which it was freed.
                allocated = accelerator.new_event()
                allocated.record(accelerator.current_stream())
                self.stream.wait_event(allocated)
                for sent in [self.fill(copy.buffer, copy.unit, copy.ready) for copy in copies]:
                    sent.enqueued()
            except BaseException as error:
                self.settle()
                # A traceback that somebody keeps must not keep the memory.
                copies.clear()
                copy = None
                traceback.clear_frames(error.__traceback__)
                raise
            # Also what makes it safe to free the buffers in the order of the compute stream.
            for copy in copies[-1:]:
                accelerator.current_stream().wait_event(copy.ready)
            for copy in copies:
                copy.unit.bind(copy.views, copy.addresses)
        return copies

    def drop(self, copies: list[DeviceCopy], *, thorough: bool = False) -> None:
        """Releases units that `load` brought in and frees their device memory."""
        for copy in copies:
            self._release(copy, thorough)
        copies.clear()

    def _release(self, copy: DeviceCopy, thorough: bool) -> None:
        copy.unit.release(thorough=thorough)
        if references(copy.buffer) > copy.references and self.on_kept is not None:
            self.on_kept(copy.unit, copy.buffer)

    def fix(self, blocks: Sequence[StreamedBlock]) -> None:
        """Gives blocks buffers of their own, in which they stay.

        Raises:
            torch.OutOfMemoryError: they do not all fit; none is fixed.
        """
        blocks = [b for b in blocks if b.fixed is None]
        for block in blocks:
            block.unit.release()
            if block.stay is not None:
                block.stay.wanted = False
                block.stay = None
        for block, copy in zip(blocks, self.load([b.unit for b in blocks]), strict=True):
            block.fixed = copy

    def unfix(self, blocks: Sequence[StreamedBlock], *, thorough: bool = False) -> None:
        """Lets fixed blocks pass through a ring again and frees their buffers."""
        for block in blocks:
            if block.fixed is not None:
                fixed, block.fixed = block.fixed, None
                self._release(fixed, thorough)

    def hold(self, track: Track, blocks: Sequence[StreamedBlock]) -> None:
        """Keeps blocks of `track` on the device until `unhold`, for a call that runs them many times in a row.

        Raises:
            torch.OutOfMemoryError: they do not all fit; nothing is held.
        """
        loose = [b for b in blocks if b.fixed is None]
        self.fix(loose)
        track.held.append(loose)

    def unhold(self, track: Track) -> None:
        if track.held:
            self.unfix(track.held.pop())

    def settle(self) -> None:
        """Puts the compute stream behind every copy in flight, so that memory they write may be freed on it."""
        if self.stager is not None:
            self.stager.drain()
        done = self.accelerator.new_event()
        done.record(self.stream)
        self.accelerator.current_stream().wait_event(done)


class _Stay:
    """One stay of a block in the arena, from its copy to the moment its bytes are taken again."""

    __slots__ = ("block", "copy", "free", "ready", "references", "start", "stop", "used", "views", "wanted")

    def __init__(
        self,
        block: StreamedBlock,
        place: tuple[int, int],
        views: tuple[list[torch.Tensor], list[int]],
        copy: Copy,
        ready: Any,
        free: Any,
    ) -> None:
        self.block = block
        self.start, self.stop = place
        self.views = views
        self.copy = copy
        self.ready = ready
        self.free = free
        self.used = False  # `free` was recorded
        self.wanted = True  # fetched for a use that is still expected
        self.references = 0  # to the arena, when the block began to compute


class StreamedBlock:
    """A block of a track: in the arena for a while, or fixed in a buffer of its own."""

    __slots__ = ("_layout", "_views", "fixed", "index", "stay", "track", "unit", "versions")

    def __init__(self, unit: HostUnit, track: Track, index: int) -> None:
        self.unit = unit
        self.track = track
        self.index = index
        self.stay: _Stay | None = None
        self.fixed: DeviceCopy | None = None
        self.versions: list[int] = []
        self._views: dict[int, tuple[torch.Tensor, list[torch.Tensor], list[int]]] = {}
        self._layout = unit.layout

    def views_at(self, arena: torch.Tensor, start: int) -> tuple[torch.Tensor, list[torch.Tensor], list[int]]:
        """The bytes, the tensors and their addresses for a stay at `start`; made once for each place."""
        if self._layout != self.unit.layout:
            self._views.clear()
            self._layout = self.unit.layout
        found = self._views.get(start)
        if found is None:
            with torch.inference_mode(False):
                flat = arena[start : start + self.unit.nbytes]
                views = self.unit.views(flat)
            found = self._views[start] = (flat, views, [v.data_ptr() for v in views])
        return found

    def forget_views(self) -> None:
        self._views.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # see BlockStream


class Track:
    """The streamed blocks of one component in the order in which its forward runs them."""

    def __init__(self, name: str, units: Sequence[HostUnit]) -> None:
        self.name = name
        self.blocks = [StreamedBlock(unit, self, i) for i, unit in enumerate(units)]
        self.order: list[StreamedBlock] = []
        self.position: dict[StreamedBlock, int] = {}
        self.held: list[list[StreamedBlock]] = []
        self._seen: list[StreamedBlock] = []
        self.expect(list(self.blocks))

    def expect(self, order: list[StreamedBlock]) -> None:
        """Sets the order in which the next forward is expected to run the blocks."""
        self.order = order
        self.position = {block: i for i, block in enumerate(order)}

    def clear(self) -> None:
        """Takes the track apart, for when its module is gone."""
        for block in self.blocks:
            block.stay = None
            block.fixed = None
            block.forget_views()
        self.blocks.clear()
        self.held.clear()
        self.begin()
        self.expect([])

    @property
    def streamed(self) -> list[StreamedBlock]:
        return [b for b in self.blocks if b.fixed is None]

    def begin(self) -> None:
        self._seen = []

    def saw(self, block: StreamedBlock) -> None:
        self._seen.append(block)

    @property
    def seen(self) -> list[StreamedBlock]:
        """The blocks that ran since the forward began, in order."""
        return list(self._seen)

    def finish(self) -> None:
        """Learns from a finished forward: an order that the expected one does not contain replaces it.

        A forward that only skipped blocks teaches nothing, since the next one may run them again.
        """
        seen = list(dict.fromkeys(self._seen))
        if not _is_subsequence(seen, self.order):
            missing = [b for b in self.order if b not in set(seen)]
            self.expect(seen + missing)


def _is_subsequence(part: list[StreamedBlock], whole: list[StreamedBlock]) -> bool:
    rest = iter(whole)
    return all(any(b is w for w in rest) for b in part)


class BlockStream:
    """The ring: one arena on the device through which the blocks of all tracks pass in the order of use.

    Args:
        copier: the copy stream to use.
        arena_bytes: size of the arena; two of the largest block make it a double buffer.
    """

    gathers = False
    """Whether the blocks come in pieces from several ranks, laid out as these have agreed."""

    def __init__(self, copier: Copier) -> None:
        self.copier = copier
        self.accelerator = copier.accelerator
        self.tracks: list[Track] = []
        self.arena: torch.Tensor | None = None
        self.arena_bytes = 0
        self.misses = 0
        self._stays: deque[_Stay] = deque()
        self._head = 0
        self._last: StreamedBlock | None = None  # last one fetched or used: the guess continues after it
        self._events: list[Any] = []
        self._history: list[Track] = []  # tracks in the order of their forwards in the previous call
        self._calls: list[Track] = []  # the same for the call that is running
        self._as_before = True  # whether this call has gone like the previous one so far

    # ------------------------------------------------------------------ building

    def attach(self, track: Track) -> None:
        """Lets the blocks of a track pass through this ring."""
        self.tracks.append(track)

    def detach(self, track: Track) -> None:
        """Takes a track off the ring; its blocks are released."""
        self.tracks.remove(track)
        for block in track.blocks:
            self._clear(block)
        if self._last is not None and self._last.track is track:
            self._last = None

    def _clear(self, block: StreamedBlock) -> None:
        if block.fixed is None:
            block.unit.release()
        if block.stay is not None:
            block.stay.wanted = False
            block.stay = None
        block.forget_views()

    def open(self, arena_bytes: int) -> None:
        """Allocates the arena, once.

        Raises:
            torch.OutOfMemoryError: it does not fit.
        """
        self.close_arena()
        with torch.inference_mode(False):
            self.arena = self.accelerator.empty(arena_bytes)
        self.arena_bytes = arena_bytes
        fresh = self.accelerator.new_event()
        fresh.record(self.accelerator.current_stream())
        self.copier.stream.wait_event(fresh)

    def close_arena(self) -> None:
        """Gives the arena back; every block is released first."""
        for track in self.tracks:
            for block in track.blocks:
                self._clear(block)
        if self.arena is not None:
            self.copier.settle()
        self._stays.clear()
        self.arena = None
        self.arena_bytes = 0
        self._head = 0
        self._last = None

    def abandon(self) -> None:
        """Lets go of everything, for when the modules are gone: blocks, stays and tracks know each other."""
        if self.arena is not None:
            self.copier.settle()
        self.tracks.clear()
        self._stays.clear()
        self._history, self._calls = [], []
        self._last = None
        self.arena = None

    @property
    def idle(self) -> bool:
        """Whether nothing was fetched since the ring was opened or the last call ended."""
        return self._last is None

    @property
    def streamed(self) -> list[StreamedBlock]:
        return [b for t in self.tracks for b in t.streamed]

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockStream:
        return _Standstill()  # of a module that is copied, the copy is not offloaded

    def __reduce__(self) -> Any:
        raise OffloadError("a module cannot be pickled while it is offloaded; call handle.disable() first")

    # ------------------------------------------------------------------ the two ends of a block

    def enter(self, block: StreamedBlock) -> None:
        """Called before a block's forward: when it returns, kernels that read its weights may be enqueued."""
        if block.fixed is not None:
            return
        stay = block.stay
        if stay is not None and self._is_stale(block):
            self._forget(stay)
            stay = None
        if stay is None:
            self.misses += 1
            ahead = [s for s in self._stays if s.wanted]
            # The one expected next keeps its place if it may still come, as it does behind an optional block.
            spared = ahead[:1] if ahead and ahead[0].block.track is block.track else []
            for other in ahead[len(spared) :]:
                other.wanted = False
            stay = self._fetch(block, spared=spared)
            self._last = block
            surprised = True
        else:
            surprised = self._skip_to(stay)
        stay.wanted = False
        self._await(stay)
        self.accelerator.current_stream().wait_event(stay.ready)
        block.unit.bind(*stay.views)
        block.track.saw(block)
        if surprised:
            self.pump()
        assert self.arena is not None
        stay.references = references(self.arena)

    def _await(self, stay: _Stay) -> None:
        try:
            stay.copy.enqueued()
        except BaseException:
            self._forget(stay)
            raise

    def leave(self, block: StreamedBlock) -> None:
        """Called after a block's forward, also after a failed one: its bytes are free when its kernels are done."""
        stay = block.stay
        if block.fixed is not None or stay is None:
            return
        assert self.arena is not None
        kept = references(self.arena) > stay.references
        block.unit.release()
        stay.free.record(self.accelerator.current_stream())
        stay.used = True
        if kept and self.copier.on_kept is not None:
            self.copier.on_kept(block.unit, self.arena[stay.start : stay.stop])
        self.pump()

    # ------------------------------------------------------------------ prefetch

    def begin_forward(self, track: Track) -> None:
        """Called before a component's forward. Heals what an interrupted forward left bound."""
        self.heal()
        n = len(self._calls)
        self._as_before = self._as_before and n < len(self._history) and self._history[n] is track
        if n >= _LONGEST_CALL:  # nobody says where a call ends
            self._calls.clear()
            self._as_before = False
        self._calls.append(track)
        track.begin()

    def heal(self) -> None:
        """Releases blocks that a forward which never returned left bound."""
        for stay in list(self._stays):
            if _computes(stay):
                self.leave(stay.block)

    def end_forward(self, track: Track, *, failed: bool = False) -> None:
        """Called after a component's forward."""
        if not failed:
            track.finish()

    def prime(self, *, wait: bool = False) -> None:
        """Fetches what the next forward starts with, as far as the arena has room.

        Args:
            wait: until the copies are enqueued, where a thread does that, so that a failure shows here.
        """
        self.pump()
        if wait:
            for stay in self._stays:
                self._await(stay)

    def end_call(self) -> None:
        """The pipeline's call is over. What was fetched ahead is given up: weights may be edited between calls."""
        self.forget()
        self._history, self._calls = self._calls, []
        self._as_before = True

    def forget(self) -> None:
        """Gives up what was fetched ahead, for when masters may have been edited."""
        for block in self.streamed:
            if block.stay is not None and not block.unit.bound:
                self._forget(block.stay)
        self._last = None

    def pump(self) -> None:
        """Fetches expected blocks for as long as the arena has room for them."""
        if self.arena is None:
            return
        while (block := self._after(self._last)) is not None:
            stay = block.stay
            if stay is not None:
                if stay.wanted or block.unit.bound:
                    return  # everything that is streamed is in the arena already
                self._forget(stay)
            place = self._open_place(block.unit)
            if place is None:
                return
            if block.unit.edited:
                block.unit.absorb()
                continue  # it may have another size now
            self._copy_in(block, place)
            self._last = block

    def _after(self, last: StreamedBlock | None) -> StreamedBlock | None:
        """The streamed block that is expected after `last`."""
        if last is not None:
            following = _first_streamed(last.track.order, last.track.position[last] + 1)
            if following is not None:
                return following
        track = self._next_track(None if last is None else last.track)
        return None if track is None else _first_streamed(track.order)

    def _next_track(self, current: Track | None) -> Track | None:
        """The track whose forward is expected next: as in the previous call, else the same one again."""
        n = len(self._calls)
        if self._as_before and n < len(self._history):
            return self._history[n]
        if current is not None:
            return current
        return next((t for t in self.tracks if _first_streamed(t.order) is not None), None)

    # ------------------------------------------------------------------ places in the arena

    def _fetch(self, block: StreamedBlock, *, spared: Sequence[_Stay]) -> _Stay:
        """Copies a block that is needed now, over anything but a computing block and, if possible, `spared`."""
        unit = block.unit
        if unit.edited:
            unit.absorb()
        if unit.nbytes > self.arena_bytes:
            self.open(2 * unit.nbytes)  # only after an edit that made a block larger than any before
        starts = (self._head, 0, *(s.start for s in self._stays), *(s.stop for s in self._stays))
        for sparing in (spared, ()):
            for start in starts:
                stop = start + unit.nbytes
                over = [s for s in self._stays if s.start < stop and start < s.stop]
                if stop <= self.arena_bytes and not any(_computes(s) or s in sparing for s in over):
                    return self._copy_in(block, start)
        raise OffloadError(
            f"no room in the arena of {self.arena_bytes} bytes for {unit.name} ({unit.nbytes} bytes) while "
            f"others compute: blocks that run inside each other cannot both be streamed"
        )

    def _open_place(self, unit: HostUnit) -> int | None:
        """Where the next block in turn goes, or None while what lies there is still needed."""
        start = self._head if self._head + unit.nbytes <= self.arena_bytes else 0
        stop = start + unit.nbytes
        if stop > self.arena_bytes:
            return None
        for stay in self._stays:
            if stay.start < stop and start < stay.stop and (stay.wanted or _computes(stay)):
                return None
        return start

    def _copy_in(self, block: StreamedBlock, start: int) -> _Stay:
        """Enqueues the copy of `block` to `start`, behind the last use of the bytes there."""
        assert self.arena is not None
        unit = block.unit
        stop = start + unit.nbytes
        keep: deque[_Stay] = deque()
        for other in self._stays:
            if other.start < stop and start < other.stop:
                if other.used:
                    self.copier.stream.wait_event(other.free)
                if other.block.stay is other:
                    other.block.stay = None
                self._events += (other.ready, other.free)
            else:
                keep.append(other)
        ready, free = self._event(), self._event()
        flat, views, addresses = block.views_at(self.arena, start)
        copy = self.copier.fill(flat, unit, ready)
        stay = _Stay(block, (start, stop), (views, addresses), copy, ready, free)
        block.versions = unit.versions()
        block.stay = stay
        keep.append(stay)
        self._stays = keep
        self._head = stop
        return stay

    def _event(self) -> Any:
        return self._events.pop() if self._events else self.accelerator.new_event()

    def _skip_to(self, stay: _Stay) -> bool:
        """Gives up what was fetched before `stay`; True if what was fetched behind it is not what follows it."""
        behind = None
        passed = False
        for other in self._stays:
            if other is stay:
                passed = True
            elif other.wanted:
                if not passed:
                    other.wanted = False
                elif behind is None:
                    behind = other
        if behind is None or behind.block is self._after(stay.block):
            return False
        for other in self._stays:
            other.wanted = False
        self._last = stay.block
        return True

    def _forget(self, stay: _Stay) -> None:
        """The block will be copied again before its next use; the bytes stay taken until they are overwritten."""
        stay.wanted = False
        stay.block.stay = None

    def _is_stale(self, block: StreamedBlock) -> bool:
        """Whether the master was edited in place after its copy was enqueued."""
        unit = block.unit
        return unit.edited or unit.versions() != block.versions


class _Standstill(BlockStream):
    """A ring through which nothing passes."""

    def __init__(self) -> None: ...

    def enter(self, block: StreamedBlock) -> None: ...

    def leave(self, block: StreamedBlock) -> None: ...


def _first_streamed(order: Sequence[StreamedBlock], start: int = 0) -> StreamedBlock | None:
    for block in itertools.islice(order, start, None):
        if block.fixed is None:
            return block
    return None


def _computes(stay: _Stay) -> bool:
    return stay.block.stay is stay and stay.block.unit.bound
