"""Several ranks behind one queue: requests go to free ranks, in the order in which they come."""

from __future__ import annotations

import logging
import os
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch

from greenroom.accelerator import rank_devices
from greenroom.config import OffloadConfig, parse_config
from greenroom.engine.errors import QueueFull, RequestCancelled, WorkerDied
from greenroom.engine.facts import ModelFacts
from greenroom.engine.figures import Figures
from greenroom.engine.job import QUEUED, RUNNING, Job, OmniResult, Request
from greenroom.engine.omni import EngineStatus, RankStatus, find_device, generate_each
from greenroom.engine.ranks.launch import Launcher, Processes
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
)
from greenroom.engine.sampling import OmniDiffusionSamplingParams
from greenroom.errors import ConfigError, GreenroomError, NotSupportedError
from greenroom.handle import Report
from greenroom.loading import LoadReport, check_dtype
from greenroom.memory import Memory
from greenroom.strategies.sharing import wanted

log = logging.getLogger("greenroom.ranks")

# Seconds between two looks for cancellations, silent ranks and processes that should have ended.
_LOOK = 0.1
# Seconds that other ranks get to say why they did not start, after the first has: the first is not always the cause.
_GRACE = 2.0
# Seconds that a figure may take; one that takes longer is told as it was.
_PATIENCE = 2.0
# Seconds until a new process must have given its first sign of life: it imports all that it needs before.
_FIRST = 120.0
# Seconds for a rank to end by itself beyond what its request gets.
_LEAVING = 5.0


@dataclass
class _Order:
    """Something that all ranks do when no request runs."""

    what: str
    words: Mapping[str, Any]
    future: Future[list[Any]]
    asked: dict[int, Future[Any]] | None = None


class OmniRanks:
    """`Omni` over several ranks, each a process with a device and an engine of its own.

        with OmniRanks("Qwen/Qwen-Image", data_parallel_size=2, enable_layerwise_offload=True) as omni:
            omni.generate(["a cup of coffee", "a cup of tea"], {"seed": 7})

    Requests wait in one queue and go to whichever rank is free, each to one. A rank that dies fails the request that
    it was serving and turns `status.alive` to False. Where the ranks share nothing that they need in every step, the
    others go on serving; where they gather weights from each other, all of them end. `restart()` starts anew.

    Args:
        model: a diffusers folder or a hub id.
        data_parallel_size: how many requests are computed at once.
        usp: ranks that compute each request together, by Ulysses sequence parallelism; there are
            `data_parallel_size * usp` ranks.
        device: a kind of device, such as "cuda" or "emu"; rank i computes on the device with index i.
        max_queue: most requests that may wait; None for no limit.
        launcher: how the ranks are started; None for processes of this host.
        rank_timeout: seconds without a sign of life after which a rank counts as dead; that those which depend on a
            dead one get to end by themselves; and, steps that take longer aside, that a request has to end in after
            it was given up.
        **words: as for `Omni`.

    Raises:
        ConfigError: a word is not accepted; before anything is started.
        WorkerDied: a rank died while it started.
        Exception: what the first rank that could not start says.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        data_parallel_size: int = 1,
        usp: int = 1,
        device: str | torch.device | None = None,
        max_queue: int | None = None,
        rank_timeout: float = 30.0,
        dtype: Any = None,
        launcher: Launcher | None = None,
        **words: Any,
    ) -> None:
        if isinstance(data_parallel_size, bool) or not isinstance(data_parallel_size, int) or data_parallel_size < 1:
            raise ConfigError("data_parallel_size", data_parallel_size, "a number of ranks, 1 or more")
        if isinstance(usp, bool) or not isinstance(usp, int) or usp < 1:
            raise ConfigError("usp", usp, "a number of ranks, 1 or more")
        if not isinstance(model, str | os.PathLike):
            raise ConfigError(
                "model", type(model).__name__, "a folder or a hub id where several ranks load it, each for itself"
            )
        self._config = _configuration(words)
        check_dtype(dtype)
        if launcher is None:
            devices: Sequence[Any] = rank_devices(find_device(device), data_parallel_size * usp)
            launcher = Processes(devices)
        else:
            devices = [device] * (data_parallel_size * usp)  # each finds its own
        self._launcher = launcher
        words = {**words, "dtype": dtype, "usp": usp}
        self._begins = [Begin(os.fspath(model), {**words, "device": each}) for each in devices]
        self._usp = usp
        # Ranks that gather need each other in every step; those that share host memory only need to start together.
        self._gathers = False
        self._grouped = usp > 1 or (self._config is not None and wanted(self._config))
        self._rank_timeout = rank_timeout
        self.max_queue = max_queue
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._jobs: deque[Job] = deque()
        self._orders: deque[_Order] = deque()
        self._lock = threading.RLock()
        self._links: list[Link] = []
        self._leaving: list[Link] = []
        self._counts: list[dict[str, Any]] = [{"served": 0, "copied": 0, "steps": 0} for _ in devices]
        self._figures: dict[int, Figures] = {}
        self._typical_s = 1.0
        self._asleep = False
        self._budget: int | float | str | None = None
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
        try:
            self._start(range(len(self._begins))).result()
        except BaseException:
            self.shutdown(timeout_s=0)
            raise

    # ------------------------------------------------------------------ generating

    def generate(
        self,
        prompts: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]],
        sampling_params: OmniDiffusionSamplingParams | Mapping[str, Any] | None = None,
        *,
        progress: bool = False,
    ) -> list[OmniResult]:
        """Generates from each prompt, on as many ranks at once as are free; see `Omni.generate`."""
        return generate_each(self, prompts, sampling_params, progress=progress)

    def submit(self, request: Request) -> Job:
        """Puts a request into the queue and returns at once; `job.future` gives the result.

        Raises:
            QueueFull, WorkerDied: it was not taken.
        """
        job = Job(request)
        with self._lock:
            serving = self._serving()
            if self._closed or not serving:
                raise WorkerDied("the engine was shut down" if self._closed else f"no rank is left ({self._cause()})")
            if self.max_queue is not None and len(self._jobs) >= self.max_queue:
                ahead = len(self._jobs) + sum(link.job is not None for link in serving) / self._usp
                seconds = ahead * self._typical_s * self._usp / len(serving)
                raise QueueFull(len(self._jobs), max(1, min(600, round(seconds))))
            self._jobs.append(job)
        self._inbox.put(None)
        return job

    def cancel_swept(self) -> None:
        """Ends waiting jobs that were given up, so that they take no place in the queue."""
        self._inbox.put(None)

    # ------------------------------------------------------------------ looking

    @property
    def status(self) -> EngineStatus:
        with self._lock:
            running = [link.job.id for link in self._links if link.job is not None]
            return EngineStatus(
                alive=not self._closed and all(link.state == READY for link in self._links),
                asleep=self._asleep,
                waiting=len(self._jobs),
                running=running[0] if running else None,
                cause=self._cause(),
                ranks=tuple(
                    RankStatus(link.rank, link.state == READY, link.job.id if link.job else None, link.cause)
                    for link in self._links
                ),
            )

    @property
    def device(self) -> str:
        """The devices, one for each rank."""
        return ", ".join(link.ready.device for link in self._links if link.ready is not None)

    @property
    def config(self) -> OffloadConfig | None:
        """The configuration in force, or None where nothing is offloaded."""
        return self._config

    @property
    def facts(self) -> ModelFacts:
        return self._told().facts

    @property
    def model(self) -> str:
        return self._told().model

    @property
    def load_report(self) -> LoadReport | None:
        """How the first rank loaded; the others did the same."""
        return self._told().load_report

    @property
    def recommended(self) -> dict[str, Any]:
        """Call arguments that the checkpoint recommends."""
        return dict(self.facts.recommended)

    @property
    def makes_videos(self) -> bool:
        """Whether the pipeline makes videos rather than pictures."""
        return self.facts.makes_videos

    def can_take(self, name: str) -> bool:
        """Whether "image" or "mask_image" is taken, by the pipeline or by one that shares its weights."""
        return name in self._told().inputs

    def figures(self) -> list[Figures]:
        """What is measured, for each rank. A rank that does not answer soon is told as it was."""
        links = list(self._links)
        asked = {link.rank: link.ask("figures") for link in links if link.state == READY}
        limit = time.monotonic() + _PATIENCE
        for rank, future in asked.items():
            try:
                self._figures[rank] = future.result(max(0.0, limit - time.monotonic()))[0]
            except Exception:
                continue
        return [self._figures_of(link) for link in links]

    def report(self) -> Report | None:
        """What the first living rank keeps where; `figures` has them all."""
        return next((f.report for f in self.figures() if f.alive and f.report is not None), None)

    def live(self, since: int = 0, rank: int = 0) -> dict[str, Any]:
        """What lies on a rank's device at this moment; see `LiveView.snapshot`.

        Raises:
            ConfigError: there is no such rank.
            WorkerDied: it is gone, or does not answer.
        """
        links = list(self._links)
        if not 0 <= rank < len(links):
            raise ConfigError("rank", rank, f"0 to {len(links) - 1}")
        try:
            found: dict[str, Any] = links[rank].ask("live", {"since": since}).result(_PATIENCE)
        except TimeoutError:
            raise WorkerDied(f"rank {rank} does not answer") from None
        return found

    # ------------------------------------------------------------------ operating

    def set_memory(self, memory_budget: int | float | str) -> Report | None:
        """Changes the memory budget of each rank when none serves a request; results stay the same.

        Raises:
            ConfigError, GreenroomError, ValueError: as `Omni.set_memory`; ranks that had taken it go back.
        """
        Memory.parse(memory_budget, "memory_budget")
        if self._config is None:
            raise ConfigError("memory_budget", memory_budget, "nothing: this pipeline is not offloaded")
        before = self._budget if self._budget is not None else self._config.memory_budget
        try:
            reports = self._order("set_memory", memory_budget=memory_budget).result()
        except Exception:
            if before is not None:
                word = before.to_word() if isinstance(before, Memory) else before
                self._order("set_memory", memory_budget=word).exception()
            raise
        self._budget = memory_budget
        return next((r for r in reports if r is not None), None)

    def sleep(self) -> None:
        """Frees the devices after the running requests; requests that come meanwhile wait for `wake`."""
        self._order("sleep").result()

    def wake(self) -> None:
        """Brings back what `sleep` freed; the next request gives the same bits as before."""
        self._order("wake").result()

    def restart(self) -> None:
        """Starts ranks in place of dead ones. Where the ranks share weights, all of them, once none serves.

        Raises:
            Exception: as when the engine was made; the ranks stay dead.
        """
        with self._lock:
            if self._closed:
                raise WorkerDied("the engine was shut down")
            if not self._launcher.restartable:
                raise NotSupportedError("these ranks were started from outside; have them started anew from there")
            dead = [link.rank for link in self._links if link.state == GONE]
        if not dead:
            return
        self._start(range(len(self._begins)) if self._grouped else dead).result()
        if self._budget is not None:
            self._order("set_memory", memory_budget=self._budget).result()
        if self._asleep:
            self._order("sleep").result()

    def shutdown(self, timeout_s: float | None = None, *, cancel: bool = True) -> bool:
        """Ends all ranks; True if they ended in time, by themselves. Harmless when done already.

        Args:
            timeout_s: how long to wait for the running requests; None for as long as it takes. Processes that are
                still there then are killed.
            cancel: give requests up at their next step, rather than finish them within `timeout_s`.
        """
        with self._lock:
            if self._closing is None:
                self._closing = Future()
                self._closed = True
                self._cancel_on_close = cancel
            if timeout_s is not None:
                limit = time.monotonic() + timeout_s
                self._close_at = limit if self._close_at is None else min(self._close_at, limit)
        self._inbox.put(None)
        ended = self._closing.result()
        self._thread.join()
        return ended

    def __enter__(self) -> OmniRanks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    # ------------------------------------------------------------------ small things

    def _told(self) -> Ready:
        return next(link.ready for link in self._links if link.ready is not None)

    def _figures_of(self, link: Link) -> Figures:
        known = self._figures.get(link.rank)
        if known is None:
            known = Figures(rank=None, device=str(self._begins[link.rank].words["device"]), alive=False)
        alive = link.state == READY
        if not alive:
            known = replace(known, allocated=0, report=None)
        return replace(known, rank=link.rank, alive=alive, **self._counts[link.rank])

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

    def _order(self, what: str, **words: Any) -> Future[list[Any]]:
        order = _Order(what, words, Future())
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
        fresh = {rank: self._launch(rank) for rank in ranks}
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
            link.state, link.ready = READY, message
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
            if link.job is not None and link.told_to_cancel is None and (reason := _given_up(link.job)):
                link.wire.send(Cancel(link.job.id, reason))
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
            # Here and not where it was asked for: until then, a rank that sleeps could be given a request.
            if order.what in ("sleep", "wake"):
                self._asleep = order.what == "sleep"
            order.future.set_result([future.result() for future in order.asked.values()])

    def _hand_out(self) -> None:
        for job in [j for j in self._jobs if _given_up(j)]:
            self._jobs.remove(job)
            _finish_given_up(job)
        if self._asleep or self._orders or self._wanted is not None or self._stops_sent:
            return
        for link in self._serving()[:: self._usp]:
            if not self._jobs:
                return
            mates = self._mates(link)
            if all(m.state == READY and m.job is None for m in mates):
                job = self._jobs.popleft()
                job.started = time.monotonic()
                job.tell(state=RUNNING, phase=QUEUED)
                request = self._for_ranks(job.request)
                for mate in mates:
                    mate.begin(job)
                    mate.wire.send(Submit(request, with_result=mate is link))

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
            _finish_given_up(job)
        while self._orders:
            self._orders.popleft().future.set_exception(WorkerDied("the engine was shut down"))
        left = None if self._close_at is None else max(0.0, self._close_at - now)
        for link in self._links:
            if link.state == READY:
                link.wire.send(Stop(left, cancel=True))
            elif link.state == STARTING:
                link.kill()


def _configuration(words: Mapping[str, Any]) -> OffloadConfig | None:
    """What the words of `Omni` say about offloading, checked; None where they say nothing."""
    legacy = {k: v for k, v in words.items() if k.startswith(("enable_", "dlo_"))}
    config = parse_config(words.get("diffusion_offload_config"), memory=words.get("memory_budget"), **legacy)
    named = words.get("diffusion_offload_config") is not None or words.get("memory_budget") is not None
    return config if named or any(v for k, v in legacy.items() if k.startswith("enable_")) else None


def _given_up(job: Job) -> str | None:
    try:
        job.check()
    except RequestCancelled as error:
        return error.reason
    return None


def _finish_given_up(job: Job) -> None:
    try:
        job.check()
    except RequestCancelled as error:
        job.finish(None, error)


__all__ = ["OmniRanks"]
