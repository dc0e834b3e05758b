"""Copies from pageable host memory, through a small ring of pinned buffers and on a thread of its own.

A copy from pageable memory makes the caller wait for all of it. Here a thread moves the bytes into pinned memory and
enqueues the rest of the way, so that the host can go on enqueueing computation. Pinned masters that are copied
meanwhile go through the same thread, so that copies keep their order.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from greenroom.accelerator import Accelerator

# Of one buffer: large enough that starting a copy does not count, small beside any block.
CHUNK_BYTES = 32 * 2**20
BUFFERS = 2


class Stager:
    """The ring and its thread.

    Args:
        accelerator: the device.
        stream: the copy stream.
        chunk_bytes: size of one pinned buffer.

    Raises:
        RuntimeError: so much memory could not be pinned.
    """

    def __init__(self, accelerator: Accelerator, stream: Any, chunk_bytes: int) -> None:
        self.stream = stream
        with torch.inference_mode(False):
            self._buffers = [accelerator.host_buffer(chunk_bytes, pin=True) for _ in range(BUFFERS)]
        self._free = [accelerator.new_event() for _ in range(BUFFERS)]
        self._used = [False] * BUFFERS
        self._turn = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="greenroom-staging")
        self._latest: Future[None] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that are pinned."""
        return sum(b.nbytes for b in self._buffers)

    def copy(self, target: torch.Tensor, master: torch.Tensor, ready: Any, timed: Any, *, pinned: bool) -> Future[None]:
        """Copies `master` to `target`, uint8 tensors of one size, in the order of calls.

        Returns:
            Done when `ready` was recorded on the copy stream: only then may another stream be made to wait for it.
        """
        self._latest = self._thread.submit(self._copy, target, master, ready, timed, pinned)
        return self._latest

    def _copy(self, target: torch.Tensor, master: torch.Tensor, ready: Any, timed: Any, pinned: bool) -> None:
        with torch.inference_mode(False), torch.no_grad(), self.stream:
            if pinned:
                target.copy_(master, non_blocking=True)
            else:
                chunk = self._buffers[0].numel()
                for start in range(0, master.numel(), chunk):
                    self._through(target[start : start + chunk], master[start : start + chunk])
        ready.record(self.stream)
        if timed is not None:
            timed.record(self.stream)

    def _through(self, target: torch.Tensor, source: torch.Tensor) -> None:
        turn = self._turn
        self._turn = (turn + 1) % BUFFERS
        if self._used[turn]:
            self._free[turn].synchronize()
        staged = self._buffers[turn][: source.numel()]
        staged.copy_(source)
        target.copy_(staged, non_blocking=True)
        self._free[turn].record(self.stream)
        self._used[turn] = True

    def drain(self) -> None:
        """Waits until everything was enqueued. What failed is told to those who wait for it, not here."""
        if self._latest is not None:
            self._latest.exception()

    def close(self) -> None:
        """Ends the thread and gives the pinned memory back."""
        self._thread.shutdown(wait=True)
        for free, used in zip(self._free, self._used, strict=True):
            if used:
                free.synchronize()
        self._buffers.clear()
