"""Several ranks behind one queue: requests go to free ranks, in the order in which they come."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as PatienceEnded  # not the built-in one before Python 3.11
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch

from greenroom.accelerator import find_device, rank_devices
from greenroom.config import OffloadConfig
from greenroom.engine.errors import QueueFull, WorkerDied
from greenroom.engine.facts import ModelFacts
from greenroom.engine.figures import Figures
from greenroom.engine.job import Job, OmniResult, Request
from greenroom.engine.prompts import Prompt, SamplingWords, generate_each
from greenroom.engine.ranks.dispatch import Dispatch
from greenroom.engine.ranks.launch import Launcher, Processes
from greenroom.engine.ranks.link import GONE, READY, Link
from greenroom.engine.ranks.wire import BEAT, Begin, Ready
from greenroom.engine.status import EngineStatus, RankStatus
from greenroom.engine.words import LOADING, configuration, with_budget
from greenroom.errors import ConfigError, NotSupportedError
from greenroom.handle import Report
from greenroom.loading import LoadReport, check_dtype
from greenroom.strategies.sharing import wanted

# Seconds that a figure may take; one that takes longer is told as it was.
_PATIENCE = 2.0


class OmniRanks(Dispatch):
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
        if isinstance(rank_timeout, bool) or not isinstance(rank_timeout, int | float) or rank_timeout <= 2 * BEAT:
            raise ConfigError(
                "rank_timeout", rank_timeout, f"more than {2 * BEAT:g} seconds; ranks are heard every {BEAT:g}"
            )
        if not isinstance(model, str | os.PathLike):
            raise ConfigError(
                "model", type(model).__name__, "a folder or a hub id where several ranks load it, each for itself"
            )
        self._config = configuration(words)
        check_dtype(dtype)
        if launcher is None:
            devices: Sequence[Any] = rank_devices(find_device(device), data_parallel_size * usp)
            launcher = Processes(devices)
        else:
            devices = [device] * (data_parallel_size * usp)  # each finds its own
        loading = {name: words[name] for name in LOADING if name in words}
        common = {**loading, "dtype": dtype, "usp": usp, "diffusion_offload_config": self._config}
        begins = [Begin(os.fspath(model), {**common, "device": each}) for each in devices]
        # Ranks that share anything at all have to start together.
        self._grouped = usp > 1 or (self._config is not None and wanted(self._config))
        self.max_queue = max_queue
        super().__init__(begins, launcher, usp, rank_timeout)
        try:
            self._start(range(len(self._begins))).result()
        except BaseException:
            self.shutdown(timeout_s=0)
            raise

    # ------------------------------------------------------------------ generating

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingWords = None,
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
            free = 0 if self._asleep else sum(link.job is None for link in serving) // self._usp
            if self.max_queue is not None and len(self._jobs) >= self.max_queue + free:
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
        return ", ".join(ready.device for _, ready in sorted(self._ready.items()))

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

    def can_take(self, name: str) -> bool:
        """Whether "image" or "mask_image" is taken, by the pipeline or by one that shares its weights."""
        return self.parameters(name) is not None

    def parameters(self, name: str | None = None) -> tuple[str, ...] | None:
        """Parameters that a request may set; see `Omni.parameters`."""
        return self._told().inputs[name]

    def figures(self) -> list[Figures]:
        """What is measured, for each rank. A rank that does not answer soon is told as it was."""
        links = list(self._links)
        asked = {link.rank: link.ask("figures") for link in links if link.state == READY}
        limit = time.monotonic() + _PATIENCE
        for rank, future in asked.items():
            try:
                self._figures[rank] = future.result(max(0.0, limit - time.monotonic()))[0]
            except (PatienceEnded, WorkerDied):
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
        except PatienceEnded:
            raise WorkerDied(f"rank {rank} does not answer") from None
        return found

    # ------------------------------------------------------------------ operating

    def set_memory(self, memory_budget: int | float | str) -> Report | None:
        """Changes the memory budget of each rank when none serves a request; results stay the same.

        Raises:
            ConfigError, GreenroomError, ValueError: as `Omni.set_memory`; ranks that had taken it go back.
        """
        renewed = with_budget(self._config, memory_budget)
        try:
            reports = self._order("set_memory", lambda: self._use(renewed), memory_budget=memory_budget).result()
        except Exception:
            # What another caller has put into force meanwhile stays.
            in_force = self._config
            assert in_force is not None
            with contextlib.suppress(WorkerDied):  # all are gone, or will be: nothing is in force any more
                self._order("restore", lambda: self._use(in_force), config=in_force).exception()
            raise
        return next((r for r in reports if r is not None), None)

    def sleep(self) -> None:
        """Frees the devices after the running requests; requests that come meanwhile wait for `wake`."""
        self._order("sleep", lambda: self._note_asleep(True)).result()

    def wake(self) -> None:
        """Brings back what `sleep` freed; the next request gives the same bits as before."""
        self._order("wake", lambda: self._note_asleep(False)).result()

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
        if self._asleep:
            self.sleep()

    def shutdown(self, timeout_s: float | None = None, *, cancel: bool = True) -> bool:
        """Ends all ranks; True if they ended in time, by themselves. Harmless when done already.

        What is called when a request ends may ask for it too, and is told False at once.

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
        if self._thread is threading.current_thread():
            return False  # asked for by what a request's end has called: it goes on when that returns
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

    def _use(self, config: OffloadConfig) -> None:
        """Notes what is in force: ranks that are started anew begin with it."""
        self._config = config
        self._begins = [replace(b, words={**b.words, "diffusion_offload_config": config}) for b in self._begins]

    def _note_asleep(self, asleep: bool) -> None:
        self._asleep = asleep

    def _told(self) -> Ready:
        return next(ready for _, ready in sorted(self._ready.items()))

    def _figures_of(self, link: Link) -> Figures:
        known = self._figures.get(link.rank)
        if known is None:
            known = Figures(rank=None, device=str(self._begins[link.rank].words["device"]), alive=False)
        alive = link.state == READY
        if not alive:
            known = replace(known, allocated=0, report=None)
        return replace(known, rank=link.rank, alive=alive, **self._counts[link.rank])


__all__ = ["OmniRanks"]
