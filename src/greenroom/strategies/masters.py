"""The host's memory that an offload holds: masters, page-locked as far as asked and allowed, and the staging ring."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch

from greenroom.accelerator import Accelerator
from greenroom.config import OffloadConfig
from greenroom.host import HostUnit
from greenroom.memory import format_bytes
from greenroom.staging import BUFFERS, CHUNK_BYTES, Stager
from greenroom.streaming import Copier


def pins(config: OffloadConfig, accelerator: Accelerator, nbytes: int) -> bool:
    """Whether the words let `nbytes` in all be page-locked."""
    pin = config.pin_memory
    return (pin if isinstance(pin, bool) else nbytes <= pin) and not accelerator.is_cpu


def host_memory(accelerator: Accelerator, nbytes: int, *, pin: bool, policy: str) -> tuple[torch.Tensor, bool]:
    """`nbytes` of host memory as uint8, and whether it is page-locked.

    Args:
        accelerator: for which it is page-locked.
        nbytes: how much.
        pin: whether it is to be page-locked.
        policy: as `pin_failure_policy` of the configuration; unless it is "fail", refused memory is pageable.

    Raises:
        RuntimeError: the system refused to lock it, and the policy is to fail.
    """
    with torch.inference_mode(False):
        if pin:
            try:
                return accelerator.host_buffer(nbytes, pin=True), True
            except RuntimeError:
                if policy == "fail":
                    raise
        return accelerator.host_buffer(nbytes, pin=False), False


class Masters:
    """Adopts units and counts their bytes.

    Args:
        accelerator: for which memory is page-locked.
        config: whether it is to be (`pin_memory`), and what happens where the system refuses (`pin_failure_policy`).
        copier: is given a staging ring where masters are pageable.
    """

    def __init__(self, accelerator: Accelerator, config: OffloadConfig, copier: Copier) -> None:
        self.accelerator = accelerator
        self.config = config
        self.copier = copier
        self.pinned_bytes = 0
        self.pageable_bytes = 0
        self._refused = 0  # bytes that the system did not lock
        self._staging_bytes = 0

    def adopt(self, unit: HostUnit) -> None:
        """Copies a unit into a master of its own.

        Raises:
            RuntimeError: memory could not be locked, and the policy is to fail.
        """
        slab, pinned = self._allocate(unit.nbytes)
        unit.fill(slab, 0, unit.nbytes)
        unit.take(slab, pinned=pinned)
        unit.renew = self._renew
        self._count(unit.nbytes, pinned)

    def disown(self, unit: HostUnit) -> None:
        """Gives the tensors of a unit that is not on the device memory of their own."""
        if unit.master is not None:
            self._count(-unit.nbytes, unit.pinned)
            self.copier.finish()
        unit.restore()

    def _allocate(self, nbytes: int) -> tuple[torch.Tensor, bool]:
        wanted = self._may_pin(nbytes)
        slab, pinned = host_memory(self.accelerator, nbytes, pin=wanted, policy=self.config.pin_failure_policy)
        self._refused += nbytes * (wanted and not pinned)
        return slab, pinned

    def _renew(self, unit: HostUnit, nbytes: int) -> tuple[torch.Tensor, bool]:
        """Memory for the next master of a unit whose present one goes."""
        assert unit.master is not None
        self.copier.finish()
        slab, pinned = self._allocate(nbytes)
        self._count(-unit.master.nbytes, unit.pinned)
        self._count(nbytes, pinned)
        return slab, pinned

    def lock(self, memory: torch.Tensor, pin: Callable[[torch.Tensor], None]) -> bool:
        """Page-locks memory that is there already, with `pin`.

        Returns:
            Whether it did.

        Raises:
            RuntimeError: `pin` failed, and the policy is to fail.
        """
        locked = self._may_pin(memory.nbytes)
        if locked:
            try:
                pin(memory)
            except NotImplementedError:
                locked = False  # such devices copy through the staging ring
            except RuntimeError:
                if self.config.pin_failure_policy == "fail":
                    raise
                locked = False
            if not locked:
                self._refused += memory.nbytes
        self._count(memory.nbytes, locked)
        return locked

    def _may_pin(self, nbytes: int) -> bool:
        return pins(self.config, self.accelerator, self.pinned_bytes + self._staging_bytes + nbytes)

    def _count(self, nbytes: int, pinned: bool) -> None:
        if pinned:
            self.pinned_bytes += nbytes
        else:
            self.pageable_bytes += nbytes

    # ------------------------------------------------------------------ copies from pageable masters

    def reserve_staging(self, units: Sequence[HostUnit]) -> None:
        """Sets aside, of a pin budget that is too small for all masters, what staging the others takes."""
        pin = self.config.pin_memory
        if not isinstance(pin, bool) and sum(u.nbytes for u in units) > pin:
            self._staging_bytes = BUFFERS * max(512, min(CHUNK_BYTES, pin // (8 * BUFFERS)) // 512 * 512)

    def stage(self, widest: int) -> None:
        """Opens the staging ring if there are masters that are not pinned.

        Args:
            widest: bytes of the largest unit.
        """
        if self._refused:
            warnings.warn(
                f"{format_bytes(self._refused)} of weights could not be pinned and stay pageable: their copies take "
                "longer",
                stacklevel=2,
            )
        if self.pageable_bytes:
            self.open_stager(widest)

    def open_stager(self, widest: int) -> None:
        """Opens the staging ring, if there is none."""
        if self.accelerator.is_cpu or self.copier.stager is not None:
            return
        chunk = self._staging_bytes // BUFFERS or min(CHUNK_BYTES, widest)
        try:
            self.copier.stager = Stager(self.accelerator, self.copier.stream, chunk)
        except RuntimeError:
            return  # plain copies from pageable memory work, and make the host wait
        self.pinned_bytes += self.copier.stager.nbytes

    def end_staging(self) -> None:
        """Closes the staging ring; when it returns, no copy reads a master any more."""
        self.copier.finish()
        self.pinned_bytes -= self.copier.end_staging()
