"""One thread that owns the device: everything that touches it happens there, one thing at a time.

Note [First come, first served]
    Requests are served in the order in which they came. What an operator asks for (a new budget, sleep, a report)
    goes before them and never interrupts one.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from greenroom.distributed import RanksError
from greenroom.engine.errors import QueueFull, RequestCancelled, WorkerDied
from greenroom.engine.job import RUNNING, Job, OmniResult

# How long an idle worker sleeps before it looks whether it is still wanted, in seconds.
_LOOK = 1.0


class Worker:
    """Runs jobs.

    Args:
        setup: run on the worker's thread before anything else; what it raises ends the worker.
        run: runs one job.
        clean_up: run on the worker's thread when an error has ended it; what it raises is not told.
        max_waiting: most jobs that may wait; None for no limit.
    """

    def __init__(
        self,
        setup: Callable[[], None],
        run: Callable[[Job], OmniResult],
        clean_up: Callable[[], None],
        max_waiting: int | None = None,
    ) -> None:
        self._clean_up = clean_up
        self._setup = setup
        self._run = run
        self.max_waiting = max_waiting
        self._jobs: deque[Job] = deque()
        self._orders: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._condition = threading.Condition()
        self._stopping = False
        self.paused = False
        """Set by an order: jobs wait until it is unset, orders are still carried out."""
        self._dead: BaseException | None = None
        self._typical_s = 1.0
        self.current: Job | None = None
        self.ready: Future[None] = Future()
        self.thread = threading.Thread(target=self._main, name="greenroom-worker", daemon=True)
        self.thread.start()

    # ------------------------------------------------------------------ for callers

    @property
    def alive(self) -> bool:
        return self._dead is None and not self._stopping and self.thread.is_alive()

    @property
    def cause(self) -> BaseException | None:
        """What ended the worker, or None."""
        return self._dead

    @property
    def waiting(self) -> int:
        """Jobs that wait."""
        return len(self._jobs)

    def submit(self, job: Job) -> Job:
        """Puts a job at the end of the queue.

        Raises:
            QueueFull: as many jobs as allowed are waiting.
            WorkerDied: nobody would ever run it.
        """
        with self._condition:
            self._check_alive()
            if self.max_waiting is not None and len(self._jobs) >= self.max_waiting:
                ahead = len(self._jobs) + (self.current is not None)
                raise QueueFull(len(self._jobs), max(1, min(600, round(ahead * self._typical_s))))
            self._jobs.append(job)
            self._condition.notify()
        return job

    def order(self, what: Callable[[], Any]) -> Future[Any]:
        """Has `what` run on the worker's thread as soon as the running job is done.

        Raises:
            WorkerDied: nobody would ever run it.
        """
        future: Future[Any] = Future()
        with self._condition:
            self._check_alive()
            self._orders.append((what, future))
            self._condition.notify()
        return future

    def sweep(self) -> None:
        """Ends jobs that were given up while they wait, so that they take no place in the queue."""
        with self._condition:
            given_up = [(job, error) for job in self._jobs if (error := job.given_up())]
            for job, _ in given_up:
                self._jobs.remove(job)
        for job, error in given_up:
            job.finish(None, error)

    def stop(self, timeout_s: float | None = None, *, cancel: bool = True) -> bool:
        """Ends the worker after the running job; True if it ended in time.

        Args:
            timeout_s: how long to wait; None for as long as it takes.
            cancel: give up the running job and those that wait; otherwise they are finished first, for as long as
                `timeout_s` lets them, and given up then.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if not cancel:
            while self.alive and (self._jobs or self.current):
                if deadline is not None and time.monotonic() > deadline:
                    break
                time.sleep(0.02)
        with self._condition:
            self._stopping = True
            jobs = [*self._jobs, *([self.current] if self.current else [])]
            for job in jobs:
                job.cancel("the engine is shutting down")
            self._condition.notify()
        if self.thread is threading.current_thread():
            return False
        left = None if deadline is None else max(1.0, deadline - time.monotonic())
        self.thread.join(left)
        return not self.thread.is_alive()

    def _check_alive(self) -> None:
        if not self.alive:
            raise WorkerDied(f"the worker has ended ({self._dead!r})" if self._dead else "the engine was shut down")

    # ------------------------------------------------------------------ the thread

    def _main(self) -> None:
        try:
            self._setup()
        except BaseException as error:
            self._die(error)
            self.ready.set_exception(error)
            return
        self.ready.set_result(None)
        try:
            while self._turn():
                pass
            self._die(None)
        except BaseException as error:
            # On this thread, which may still hold what a computation takes: nobody else can give it back.
            with contextlib.suppress(Exception):
                self._clean_up()
            self._die(error)

    def _turn(self) -> bool:
        with self._condition:
            while not (self._orders or self._stopping or (self._jobs and not self.paused)):
                self._condition.wait(_LOOK)
            if self._stopping:
                return False
            order = self._orders.popleft() if self._orders else None
            if order is None:
                self.current = self._jobs.popleft()
        if order is not None:
            self._carry_out(*order)
        elif self.current is not None:
            self._serve(self.current)
        return True

    def _carry_out(self, what: Callable[[], Any], future: Future[Any]) -> None:
        try:
            future.set_result(what())
        except BaseException as error:
            future.set_exception(error)
            if isinstance(error, _DEVICE_FAILED) or not isinstance(error, Exception):
                raise

    def _serve(self, job: Job) -> None:
        result: OmniResult | None = None
        error: BaseException | None = None
        started = time.monotonic()
        try:
            job.check()
            job.started = started
            job.tell(state=RUNNING, phase="encode")
            result = self._run(job)
        except Exception as caught:
            error = caught
        except BaseException as caught:
            self.current = None
            job.finish(None, WorkerDied(f"the worker ended while it served this request ({caught!r})"))
            raise
        if error is None:
            self._typical_s = 0.7 * self._typical_s + 0.3 * (time.monotonic() - started)
        self.current = None
        job.finish(result, error)
        if isinstance(error, _FATAL):
            # The device's context may be unusable: the next request must not find that out.
            what = "a rank is missing" if isinstance(error, RanksError) else "the device failed"
            raise WorkerDied(f"{what}: {error}")
        # This frame is part of the error's traceback: together they would wait for the garbage collector.
        error = None

    def _die(self, error: BaseException | None) -> None:
        with self._condition:
            self._dead = error
            self._stopping = True
            jobs, orders = list(self._jobs), list(self._orders)
            self._jobs.clear()
            self._orders.clear()
        for job in jobs:
            if error is None:
                job.finish(None, RequestCancelled("the engine is shutting down"))
            else:
                job.finish(None, WorkerDied(f"the worker has ended ({error!r})"))
        for _, future in orders:
            future.set_exception(WorkerDied("the worker has ended"))


# A broken device, and in a request ranks that have lost one of theirs: neither serves anything any more. An order that
# ranks do not agree upon leaves them as they were.
_DEVICE_FAILED: type[Exception] = getattr(torch, "AcceleratorError", WorkerDied)
_FATAL: tuple[type[Exception], ...] = (_DEVICE_FAILED, WorkerDied, RanksError)
