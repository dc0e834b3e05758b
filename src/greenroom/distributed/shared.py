"""Weights once for each host: memory that its ranks share.

The masters of all ranks of a host lie in one anonymous file in memory (memfd). It has no name, so nothing is left
of it when its processes are gone, however they went. Each rank maps it twice.

Note [Shared bytes are never written after they were filled]
    Copies to the device read the shared mapping. What the tensors of a released unit show is the private one: reading
    costs no memory, and the first write to a page gives this rank a page of its own. So an edit (a LoRA that is fused,
    a statistic that is written back) stays with the rank that made it, as it would without sharing, and a unit that
    was edited is copied from its own memory from then on.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from greenroom.accelerator import Accelerator
from greenroom.distributed.ranks import Ranks
from greenroom.host import ALIGNMENT, HostUnit
from greenroom.memory import format_bytes

PAGE = mmap.PAGESIZE
# Without a reservation: next to nothing of it is ever written.
_PRIVATE = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
# Ranks wait for each other when this many bytes have been filled, and then let go of what these were filled from.
_BATCH_BYTES = 256 * 2**20
# Of an entry in /proc/self/pagemap (Documentation/admin-guide/mm/pagemap.rst of Linux).
_PRESENT_OR_SWAPPED = 0b11 << 62
_OF_A_FILE = 1 << 61


def share_of(nbytes: int, size: int) -> int:
    """Bytes that each of `size` ranks keeps of `nbytes`: equal shares, aligned for every dtype, the last one padded."""
    return -(-nbytes // (size * ALIGNMENT)) * ALIGNMENT


class SharedMasters:
    """The masters of all units, in memory that the ranks of this host share.

    Args:
        ranks: they all have to make it at the same time, for the same units.
        accelerator: the device for which what is copied gets pinned.
        units: in an order that is equal on every rank.

    Raises:
        RanksError: a rank failed or did not come.
        OSError: there is not enough memory.
    """

    def __init__(self, ranks: Ranks, accelerator: Accelerator, units: Sequence[HostUnit]) -> None:
        self._ranks = ranks
        self._accelerator = accelerator
        self._units = list(units)
        self._starts: list[int] = []
        end = 0
        for unit in units:
            self._starts.append(end)
            end += -(-max(ranks.size * share_of(unit.nbytes, ranks.size), 1) // PAGE) * PAGE
        self.nbytes = end
        self._pinned: list[Any] = []
        self.ranks_here = ranks.local
        shared, private = self._map(max(end, PAGE))
        self._shared: torch.Tensor | None = shared
        self._private: torch.Tensor | None = private

    def _map(self, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        ranks = self._ranks
        leads = ranks.local[0] == ranks.rank
        fd, address = -1, None
        try:
            if leads and len(ranks.local) == 1:
                fd = _memory(nbytes)
            elif leads and hasattr(os, "memfd_create"):
                fd = _memory(nbytes)
                address = f"/proc/{os.getpid()}/fd/{fd}"
            offered = ranks.meeting.answer("shared memory", address)[ranks.local[0]]
            if not leads and offered is not None:
                with contextlib.suppress(OSError):
                    fd = os.open(offered, os.O_RDWR)
            opened = ranks.meeting.answer("shared memory opened", fd >= 0)
            if not all(opened[r] for r in ranks.local):
                warnings.warn(
                    f"the ranks of this host cannot share memory, so that each keeps {format_bytes(nbytes)} of weights",
                    stacklevel=2,
                )
                self.ranks_here = (ranks.rank,)
                if fd >= 0:
                    os.close(fd)
                fd = _memory(nbytes)
            with torch.inference_mode(False):
                shared = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
                private = torch.frombuffer(mmap.mmap(fd, nbytes, flags=_PRIVATE), dtype=torch.uint8)
            return shared, private
        finally:
            if fd >= 0:
                os.close(fd)

    # ------------------------------------------------------------------ filling

    def adopt(self) -> Iterator[HostUnit]:
        """Takes the units over one after the other; each has given up its old memory when it is yielded.

        Every rank of a host reads its share of each unit and no more.
        """
        here = self.ranks_here
        mine = here.index(self._ranks.rank)
        waiting: list[int] = []
        filled = 0
        for i, unit in enumerate(self._units):
            share = share_of(unit.nbytes, len(here))
            shared, _ = self._slabs(i)
            unit.fill(shared, min(mine * share, unit.nbytes), min((mine + 1) * share, unit.nbytes))
            waiting.append(i)
            filled += unit.nbytes
            if filled >= _BATCH_BYTES or i == len(self._units) - 1:
                self._ranks.meeting.answer(f"weights up to {unit.name}", True)
                for k in waiting:
                    shared, private = self._slabs(k)
                    self._units[k].take(private, pinned=False, shared=shared)
                    yield self._units[k]
                waiting, filled = [], 0
        _give_freed_memory_back()

    def _slabs(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        start, nbytes = self._starts[i], self._units[i].nbytes
        assert self._shared is not None and self._private is not None
        return self._shared[start : start + nbytes], self._private[start : start + nbytes]

    def shard(self, unit: HostUnit) -> torch.Tensor:
        """This rank's share of a unit's bytes, padding included."""
        i = next(k for k, u in enumerate(self._units) if u is unit)
        share = share_of(unit.nbytes, self._ranks.size)
        start = self._starts[i] + self._ranks.rank * share
        assert self._shared is not None
        return self._shared[start : start + share]

    # ------------------------------------------------------------------ pinning

    def pin(self, memory: torch.Tensor) -> None:
        """Locks the pages under a part of the shared memory, for copies from it.

        Raises:
            RuntimeError: the system refuses.
        """
        assert self._shared is not None
        first = (memory.data_ptr() - self._shared.data_ptr()) // PAGE * PAGE
        last = -(-(memory.data_ptr() + memory.nbytes - self._shared.data_ptr()) // PAGE) * PAGE
        self._pinned.append(self._accelerator.register(self._shared[first:last]))

    # ------------------------------------------------------------------ edits

    def look(self, units: Sequence[HostUnit]) -> None:
        """Notices units whose master was edited: its version counters moved, or this rank has pages of its own of it.

        Edits through `.data` move no counter. Where the system does not tell about pages, bytes are compared.
        """
        for unit in units:
            unit.look()
        wanted = {id(u) for u in units if u.shared is not None and not u.diverged}
        if not wanted or self._private is None or self._shared is None:
            return
        own = _own_pages(self._private)
        if own is not None and not bool(own.any()):
            return
        for i, (start, unit) in enumerate(zip(self._starts, self._units, strict=True)):
            if id(unit) not in wanted:
                continue
            if own is None:
                unit.diverged = not torch.equal(*self._slabs(i))
            else:
                unit.diverged = bool(own[start // PAGE : -(-(start + unit.nbytes) // PAGE)].any())

    def close(self) -> None:
        """Unlocks the memory; it goes with the last tensor that shows it."""
        for finalizer in self._pinned:
            finalizer()
        self._pinned.clear()
        self._shared = self._private = None


def _give_freed_memory_back() -> None:
    """What the tensors had before is free by now; the C library would keep most of it for itself."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _memory(nbytes: int) -> int:
    """A file without a name, in memory where the system has that."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("greenroom weights", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        # Now, as an error; a page that is missing later would be a signal that ends the process.
        os.posix_fallocate(fd, 0, nbytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def _own_pages(memory: torch.Tensor) -> torch.Tensor | None:
    """Which pages of a private mapping are this process's own; None where the system does not tell."""
    count = -(-memory.nbytes // PAGE)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            file.seek(memory.data_ptr() // PAGE * 8)
            raw = bytearray(file.read(count * 8))
    except OSError:
        return None
    if len(raw) < count * 8:
        return None
    entries = torch.frombuffer(raw, dtype=torch.int64)
    there = entries.bitwise_and(_signed(_PRESENT_OR_SWAPPED)) != 0
    return there & (entries.bitwise_and(_OF_A_FILE) == 0)


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >= 1 << 63 else bits
