"""The front's thread: who is given which request, who lives, and what becomes of the rest when a rank does not.

Note [One thread decides]
    Everything about ranks changes on this thread, which hears them, looks after them and hands out requests, one thing
    at a time; callers leave what they want in a queue and wait for a future. It starts the processes as well, because
    they end with the thread that started them.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from greenroom.engine.errors import RequestCancelled, RequestRefused, WorkerDied
from greenroom.engine.figures import Figures
from greenroom.engine.job import QUEUED, RUNNING, Job, Request
from greenroom.engine.ranks.launch import Launcher
from greenroom.engine.ranks.link import GONE, READY, STARTING, Link
from greenroom.engine.ranks.wire import (
    Answer,
    Begin,
    Cancel,
    Dying,
    NotStarted,
    Outcome,
    Progress,
    Ready,
    Stop,
    Submit,
    packed,
)
from greenroom.errors import GreenroomError

log = logging.getLogger("greenroom.ranks")

# Seconds between two looks for cancellations, silent ranks and processes that should have ended.
_LOOK = 0.1
# Seconds that other ranks get to say why they did not start, after the first has: the first is not always the cause.
_GRACE = 2.0
# Seconds until a new process must have given its first sign of life: it imports all that it needs before.
_FIRST = 120.0
# Seconds for a rank to end by itself beyond what its request gets.
_LEAVING = 5.0


@dataclass
class _Order:
    """Something that all ranks do when no request runs; `then` is called, on the front's thread, when all have."""

    what: str
    words: Mapping[str, Any]
    then: Callable[[], None]
    future: Future[list[Any]]
    asked: dict[int, Future[Any]] | None = None


class Dispatch:
    """Ranks, a queue before them, and the thread that brings the two together.

    Args:
        begins: what each rank is told first.
        launcher: how ranks are started.
        usp: ranks that compute each request together, those that follow each other.
        rank_timeout: seconds of patience, as `OmniRanks` says.
    """

    def __init__(self, begins: Sequence[Begin], launcher: Launcher, usp: int, rank_timeout: float) -> None:
        self._begins = begins
        self._launcher = launcher
        self._usp = usp
        self._rank_timeout = rank_timeout
        # Ranks that gather need each other in every step; those that share host memory only need to start together.
        self._gathers = False
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._jobs: deque[Job] = deque()
        self._orders: deque[_Order] = deque()
        self._lock = threading.RLock()
        self._links: list[Link] = []
        self._leaving: list[Link] = []
        self._counts: list[dict[str, Any]] = [{"served": 0, "copied": 0, "steps": 0} for _ in begins]
        self._figures: dict[int, Figures] = {}
        # What each rank said of itself when it was ready last: true of the one that takes its place, too.
        self._ready: dict[int, Ready] = {}
        self._typical_s = 1.0
        self._asleep = False
        self._wanted: tuple[Sequence[int], Future[None]] | None = None
        self._starting: Future[None] | None = None
        self._started_failing: float | None = None
        self._closing: Future[bool] | None = None
        self._cancel_on_close = True
        self._close_at: float | None = None
        self._stops_sent = False
        self._forced = False
        self._closed = False
        self._thread = threading.Thread(target=self._main, name="greenroom-front", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ for callers, who hold the lock where they look

    def _serving(self) -> list[Link]:
        """Ranks that requests may be given to, now or soon."""
        if self._gathers and any(link.state == GONE for link in self._links):
            return []
        replicas = [self._mates(link) for link in self._links[:: self._usp]]
        return [link for mates in replicas if all(m.state != GONE for m in mates) for link in mates]

    def _mates(self, link: Link) -> list[Link]:
        """The ranks that compute requests together with one, itself included; the first gives the results."""
        first = link.rank - link.rank % self._usp
        return self._links[first : first + self._usp]

    def _cause(self) -> str | None:
        causes = [f"{link.name}: {link.cause}" for link in self._links if link.cause is not None]
        return "; ".join(causes) or None

    def _start(self, ranks: Sequence[int]) -> Future[None]:
        future: Future[None] = Future()
        with self._lock:
            if self._wanted is not None or self._starting is not None or self._closed:
                raise WorkerDied("the engine is being started or shut down already")
            self._wanted = (ranks, future)
        self._inbox.put(None)
        return future

    def _order(self, what: str, then: Callable[[], None] = lambda: None, **words: Any) -> Future[list[Any]]:
        order = _Order(what, words, then, Future())
        with self._lock:
            if self._closed:
                raise WorkerDied("the engine was shut down")
            self._orders.append(order)
        self._inbox.put(None)
        return order.future

    # ------------------------------------------------------------------ the front's thread

    def _main(self) -> None:
        try:
            self._front()
        except BaseException as error:
            # Nobody may wait for a front that is no more.
            log.exception("the front of the ranks has failed")
            with self._lock:
                self._closed = self._stops_sent = True
                for link in self._links:
                    self._lose(link, f"the front has failed: {error}")
                    link.kill()
                self._fail_waiting()
                orders = [order.future for order in self._orders]
                for future in (*orders, self._starting, self._wanted and self._wanted[1]):
                    if future is not None and not future.done():
                        future.set_exception(WorkerDied(f"the front of the ranks has failed: {error}"))
                self._forced = True
                self._closing = self._closing or Future()
        assert self._closing is not None
        self._closing.set_result(not self._forced)

    def _front(self) -> None:
        while True:
            try:
                item = self._inbox.get(timeout=_LOOK)
            except queue.Empty:
                item = None
            with self._lock:
                if item is not None:
                    self._hear(*item)
                self._watch()
                if self._wanted is not None and not any(self._links[r].job for r in self._wanted[0] if self._links):
                    (ranks, future), self._wanted = self._wanted, None
                    try:
                        self._begin(ranks, future)
                    except Exception as error:
                        self._starting = None
                        future.set_exception(error)
                self._carry_out_orders()
                self._hand_out()
                if self._closing is not None and self._close():
                    return

    def _begin(self, ranks: Sequence[int], future: Future[None]) -> None:
        """Starts processes; runs on this thread, which outlives them: see Note [No orphans] in `rank.py`."""
        self._starting, self._started_failing = future, None
        for link in self._links:
            if link.rank in ranks and not link.ended:
                self._lose(link, "it is started anew")
        self._leaving = [link for link in [*self._leaving, *self._links] if not link.ended]
        kept = {link.rank: link for link in self._links if link.rank not in ranks}
        self._launcher.begin()
        fresh: dict[int, Link] = {}
        try:
            for rank in ranks:
                fresh[rank] = self._launch(rank)
        except Exception as error:
            for link in fresh.values():
                link.gone(f"another rank could not be started: {error}")
                link.kill()
            self._leaving += fresh.values()
            raise
        self._links = [fresh.get(rank) or kept[rank] for rank in range(len(self._begins))]

    def _launch(self, rank: int) -> Link:
        launched = self._launcher.launch(rank)
        link = Link(rank, launched.connection, self._inbox, launched.process)
        link.wire.send(self._begins[rank])
        return link

    # ------------------------------------------------------------------ what ranks say

    def _hear(self, link: Link, message: Any) -> None:
        link.seen_at, link.heard = time.monotonic(), True
        if message is None:
            link.closed = True
            self._lose(link, link.exit_words())
        elif link.state == GONE:
            return  # given up already: see Note [An answer belongs to its question] in link.py
        elif isinstance(message, Ready):
            link.state, self._ready[link.rank] = READY, message
            self._gathers = message.gathers
            self._figures[link.rank] = message.figures
        elif isinstance(message, NotStarted):
            link.error = message.error
            self._lose(link, f"it could not start: {message.error}")
        elif isinstance(message, Dying):
            self._lose(link, message.cause)
        elif isinstance(message, Answer):
            link.answered(message)
        elif link.job is not None and isinstance(message, Progress) and message.request_id == link.job.id:
            link.progress(message.changes, tell=link.rank % self._usp == 0)
        elif link.job is not None and isinstance(message, Outcome) and message.request_id == link.job.id:
            self._over(link, link.job, message)

    def _over(self, link: Link, job: Job, outcome: Outcome) -> None:
        """A rank has ended its part of a request; the last one ends the request."""
        now = time.monotonic()
        link.job, link.outcome = None, outcome
        if outcome.result is not None:
            counts, metrics = self._counts[link.rank], outcome.result.metrics
            counts["served"] += 1
            counts["copied"] += metrics.bytes_to_device
            counts["steps"] += metrics.steps
            self._typical_s = 0.7 * self._typical_s + 0.3 * metrics.total_s
        mates = self._mates(link)
        if outcome.error is not None:
            for mate in mates:
                if mate.job is job and mate.end_by is None:
                    mate.end_by = now + self._rank_timeout
        if any(mate.job is job for mate in mates) or job.future.done():
            return
        outcomes = [m.outcome for m in mates if m.outcome is not None and m.outcome.request_id == job.id]
        errors = [o.error for o in outcomes if o.error is not None]
        if errors:
            # What the pipeline or the user says comes first: "a peer went away" is a consequence.
            errors.sort(key=lambda e: not isinstance(e, GreenroomError))
            job.finish(None, self._told_with_cause(errors[0]))
            return
        result = outcomes[0].result
        assert result is not None
        metrics = replace(result.metrics, queue_s=(job.started or job.created) - job.created)
        job.finish(replace(result, metrics=metrics), None)

    def _told_with_cause(self, error: BaseException) -> BaseException:
        """An error, or what lies behind it where a rank has died that others need."""
        if isinstance(error, RequestCancelled) or not self._cause() or not (self._gathers or self._usp > 1):
            return error
        return WorkerDied(f"another rank has ended ({self._cause()}): {error}")

    def _lose(self, link: Link, cause: str) -> None:
        """A rank is gone, or has to go."""
        if link.state == GONE:
            return
        job, link.job = link.job, None
        expected = self._stops_sent
        link.gone(None if expected else cause)
        if not (expected and link.closed):
            link.kill()
        if job is not None and not job.future.done():
            if expected or self._closed:
                job.finish(None, RequestCancelled("the engine is shutting down"))
            else:
                job.finish(None, WorkerDied(f"{link.name} ended while it served this request ({cause})"))
        if not expected and self._starting is None:
            # Those that need it in every step: what they run ends by itself, in an error, or is ended.
            for other in self._links if self._gathers else self._mates(link):
                if other.state != GONE and other.kill_at is None:
                    other.kill_at = time.monotonic() + self._rank_timeout
        if not self._serving() and self._starting is None:
            self._fail_waiting()

    def _fail_waiting(self) -> None:
        jobs = list(self._jobs)
        self._jobs.clear()
        for job in jobs:
            job.finish(None, WorkerDied(f"no rank is left ({self._cause()})"))

    # ------------------------------------------------------------------ what the front does by itself

    def _watch(self) -> None:
        now = time.monotonic()
        for link in self._links:
            if link.job is not None and link.told_to_cancel is None and (given_up := link.job.given_up()):
                link.wire.send(Cancel(link.job.id, given_up.reason))
                link.told_to_cancel = now
            patience = self._rank_timeout if link.heard else max(_FIRST, self._rank_timeout)
            if link.state != GONE and now - link.seen_at > patience:
                self._lose(link, f"no sign of life for {patience:g} s")
            elif link.job is not None and link.end_by is not None and now > link.end_by:
                self._lose(link, "a rank that computed the same request has failed, and this one waits for it")
            elif (limit := link.stuck_for(self._rank_timeout)) is not None:
                self._lose(link, f"it did not end a request within {limit:.0f} s after that was given up")
            elif link.state != GONE and link.kill_at is not None and (now > link.kill_at or link.job is None):
                self._lose(link, f"it cannot go on without another ({self._cause()})")
        self._leaving = [link for link in self._leaving if not link.ended]
        if self._starting is not None:
            self._watch_start(now)

    def _watch_start(self, now: float) -> None:
        assert self._starting is not None
        failed = [link for link in self._links if link.state == GONE]
        coming = [link for link in self._links if link.state == STARTING]
        if failed and self._started_failing is None:
            self._started_failing = now
        if failed and (not coming or now - (self._started_failing or now) > _GRACE):
            for link in coming:
                self._lose(link, "another rank could not start")
            errors = [link.error for link in failed if link.error is not None]
            # Ours say what is wrong; others may only say that a peer went away.
            errors.sort(key=lambda e: not isinstance(e, GreenroomError | OSError))
            future, self._starting = self._starting, None
            future.set_exception(errors[0] if errors else WorkerDied(f"not all ranks started ({self._cause()})"))
            if not self._serving():
                self._fail_waiting()
        elif not failed and not coming:
            future, self._starting = self._starting, None
            future.set_result(None)

    def _carry_out_orders(self) -> None:
        """Orders come before requests, and never interrupt one: see Note [First come, first served] in worker.py."""
        if not self._orders or self._starting is not None:
            return
        order = self._orders[0]
        if order.asked is None:
            if any(link.job is not None for link in self._links):
                return
            order.asked = {link.rank: link.ask(order.what, order.words) for link in self._serving()}
        if not all(future.done() for future in order.asked.values()):
            return
        self._orders.popleft()
        errors = [e for future in order.asked.values() if (e := future.exception()) is not None]
        if errors or not order.asked:
            order.future.set_exception(errors[0] if errors else WorkerDied(f"no rank is left ({self._cause()})"))
        else:
            # Here and not where it was asked for: until then, a rank that sleeps could be given a request, and one that
            # starts could be told what is in force no more.
            order.then()
            order.future.set_result([future.result() for future in order.asked.values()])

    def _hand_out(self) -> None:
        for job, error in [(j, error) for j in self._jobs if (error := j.given_up())]:
            self._jobs.remove(job)
            job.finish(None, error)
        if self._asleep or self._orders or self._wanted is not None or self._stops_sent:
            return
        for link in self._serving()[:: self._usp]:
            if not self._jobs:
                return
            mates = self._mates(link)
            if all(m.state == READY and m.job is None for m in mates):
                self._give(self._jobs.popleft(), mates)

    def _give(self, job: Job, mates: Sequence[Link]) -> None:
        """Gives a request to ranks that compute it together; the first is asked for the result."""
        try:
            request = packed(self._for_ranks(job.request))
        except RequestRefused as error:
            job.finish(None, error)
            return
        job.started = time.monotonic()
        job.tell(state=RUNNING, phase=QUEUED)
        for i, mate in enumerate(mates):
            mate.begin(job)
            mate.wire.send(Submit(job.id, request, with_result=i == 0))

    def _for_ranks(self, request: Request) -> Request:
        """A request as ranks get it: the limit counts from its arrival here, and those together need one seed."""
        params = request.params
        if self._usp > 1 and params.seed is None:
            params = params.copy(seed=secrets.randbelow(2**32))
        return replace(request, params=params, timeout_s=None)

    def _close(self) -> bool:
        """Goes on with the shutdown; True when it is done."""
        now = time.monotonic()
        late = self._close_at is not None and now >= self._close_at
        busy = bool(self._jobs) or any(link.job is not None for link in self._links)
        if not self._stops_sent and (self._cancel_on_close or late or not busy):
            self._stop_all(now)
        if self._stops_sent and self._close_at is not None and now > self._close_at + _LEAVING:
            for link in [*self._links, *self._leaving]:
                if not link.ended and not link.killed:
                    self._forced = True
                    link.kill()
        return self._stops_sent and all(link.ended for link in [*self._links, *self._leaving])

    def _stop_all(self, now: float) -> None:
        self._stops_sent = True
        if self._wanted is not None:
            self._starting, self._wanted = self._wanted[1], None
        if self._starting is not None:
            future, self._starting = self._starting, None
            future.set_exception(WorkerDied("the engine was shut down"))
        while self._jobs:
            job = self._jobs.popleft()
            job.cancel("the engine is shutting down")
            if error := job.given_up():
                job.finish(None, error)
        while self._orders:
            self._orders.popleft().future.set_exception(WorkerDied("the engine was shut down"))
        left = None if self._close_at is None else max(0.0, self._close_at - now)
        for link in self._links:
            if link.state == READY:
                link.wire.send(Stop(left))
            elif link.state == STARTING:
                link.kill()
