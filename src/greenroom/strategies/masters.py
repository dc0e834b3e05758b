"""The host's memory that an offload holds: masters, page-locked as far as asked and allowed, and the staging ring."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence

import torch

from greenroom.accelerator import Accelerator
from greenroom.config import OffloadConfig
from greenroom.host import HostUnit
from greenroom.memory import format_bytes
from greenroom.staging import BUFFERS, CHUNK_BYTES, Stager
from greenroom.streaming import Copier


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
        pinned = self._may_pin(unit.nbytes)
        try:
            unit.adopt(functools.partial(self.accelerator.host_buffer, pin=pinned), pinned=pinned)
        except RuntimeError:
            if not pinned or self.config.pin_failure_policy == "fail":
                raise
            pinned = False
            self._refused += unit.nbytes
            unit.adopt(functools.partial(self.accelerator.host_buffer, pin=False), pinned=False)
        self._count(unit.nbytes, pinned)

    def disown(self, unit: HostUnit) -> None:
        """Gives the tensors of a unit that is not on the device memory of their own."""
        if unit.master is not None:
            self._count(-unit.nbytes, unit.pinned)
        unit.restore()

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
        """Whether the configuration lets `nbytes` more be page-locked."""
        pin = self.config.pin_memory
        wanted = pin if isinstance(pin, bool) else self.pinned_bytes + self._staging_bytes + nbytes <= pin
        return wanted and not self.accelerator.is_cpu

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
