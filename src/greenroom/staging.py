"""Copies from pageable host memory, through a small ring of pinned buffers and on a thread of its own.

A copy from pageable memory makes the caller wait for all of it. Here a thread moves the bytes into pinned memory and
enqueues the rest of the way, so that the host can go on enqueueing computation. Pinned masters that are copied
meanwhile go through the same thread, so that copies keep their order.
"""

from __future__ import annotations

import copy
import threading
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from greenroom.accelerator import Accelerator

# Of one buffer: large enough that starting a copy does not count, small beside any block.
CHUNK_BYTES = 32 * 2**20
BUFFERS = 2

Span = tuple[Any, Any]
"""Events right before and right after a copy, on the copy stream."""


class Copy:
    """A copy to the device: enqueued, or by a thread before long.

    An event that is not recorded yet counts as reached. So whoever waits for one that follows the copy, or lets a
    stream wait for it, waits for `enqueued` first.

    Args:
        job: tells what kept the copy from the stream, if anything did. It does not raise it: an exception that a
            future holds keeps the frames that it came through, and with them what was to be copied.
    """

    __slots__ = ("_job",)

    def __init__(self, job: Future[Exception | None] | None = None) -> None:
        self._job = job

    def enqueued(self) -> None:
        """Waits until the copy and the events around it are on the copy stream; raises what kept it from there."""
        failure = self._job.result() if self._job is not None else None
        if failure is not None:
            raise copy.copy(failure)

    def failed(self) -> bool:
        """Whether the copy could not be enqueued; waits until that is known."""
        return self._job is not None and self._job.result() is not None


class Stager:
    """The ring and its thread.

    Args:
        accelerator: the device.
        stream: the copy stream.
        chunk_bytes: size of one pinned buffer.

    Raises:
        RuntimeError: so much memory could not be pinned.

    Note [The end may come on the thread itself]
        Garbage is collected on any thread, and the last module of an offload may be part of it. The thread cannot
        wait for itself: what has been asked for is then done after `close` has returned. Each of these copies still
        holds what it reads and writes, and ends before it lets go of them.
    """

    def __init__(self, accelerator: Accelerator, stream: Any, chunk_bytes: int) -> None:
        self.accelerator = accelerator
        self.stream = stream
        with torch.inference_mode(False):
            self._buffers = [accelerator.host_buffer(chunk_bytes, pin=True) for _ in range(BUFFERS)]
        self._free = [accelerator.new_event() for _ in range(BUFFERS)]
        self._used = [False] * BUFFERS
        self._turn = 0
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="greenroom-staging", initializer=accelerator.make_current
        )
        self._ident = self._thread.submit(threading.get_ident).result()
        self._latest: Future[Exception | None] | None = None
        self._closing = False

    @property
    def nbytes(self) -> int:
        """Bytes that are pinned."""
        return sum(b.nbytes for b in self._buffers)

    def copy(
        self, target: torch.Tensor, master: torch.Tensor, ready: Any, span: Span | None = None, *, pinned: bool
    ) -> Copy:
        """Copies `master` to `target`, uint8 tensors of one size, in the order of calls.

        Args:
            ready: event to record after the copy.
            span: events to record right before and after it.
            pinned: whether `master` is page-locked.
        """
        self._latest = self._thread.submit(self._attempt, target, master, ready, span, pinned)
        return Copy(self._latest)

    def _attempt(self, *words: Any) -> Exception | None:
        try:
            self._copy(*words)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)
            return error.with_traceback(None)
        return None

    def _copy(self, target: torch.Tensor, master: torch.Tensor, ready: Any, span: Span | None, pinned: bool) -> None:
        with torch.inference_mode(False), torch.no_grad(), self.accelerator.on(self.stream):
            if span is not None:
                span[0].record(self.stream)
            if pinned:
                target.copy_(master, non_blocking=True)
            else:
                chunk = self._buffers[0].numel()
                for start in range(0, master.numel(), chunk):
                    self._through(target[start : start + chunk], master[start : start + chunk])
            ready.record(self.stream)
            if span is not None:
                span[1].record(self.stream)
            if self._closing:
                self.stream.synchronize()

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
        """Waits until everything was enqueued. What failed is told to those who wait for it, not here.

        On the thread itself it does not wait, see the Note above.
        """
        if self._latest is not None and threading.get_ident() != self._ident:
            self._latest.result()

    def close(self) -> None:
        """Ends the thread and gives the pinned memory back, once all copies have ended."""
        self._closing = True
        self._thread.submit(self._give_back)
        self._thread.shutdown(wait=threading.get_ident() != self._ident)

    def _give_back(self) -> None:
        for free, used in zip(self._free, self._used, strict=True):
            if used:
                free.synchronize()
        self._buffers.clear()
