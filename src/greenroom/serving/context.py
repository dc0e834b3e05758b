"""What the routes share: the engine, the limits, and how one waits for a request without keeping anyone waiting."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request as HttpRequest

from greenroom.engine import Engine, Job, OmniResult, Request
from greenroom.engine.media import MediaLimits
from greenroom.serving import limits
from greenroom.serving.errors import ApiError, shutting_down
from greenroom.serving.metrics import Metrics
from greenroom.serving.schemas import Generation
from greenroom.serving.settings import ServerSettings

T = TypeVar("T")
# Seconds between two looks whether the client is still there, and between two signs of life on a stream.
_LOOK = 0.1
_ALIVE = 10.0
# Share of the time for a shutdown that the running step gets; the rest is for answers and for cleaning up.
_PATIENCE = 0.8

log = logging.getLogger("greenroom.serving")


@dataclass
class Context:
    """One server."""

    omni: Engine
    settings: ServerSettings
    metrics: Metrics
    operators: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "greenroom-operator"))
    late: bool = False
    """Whether the running step has outlasted a shutdown: nobody waits for results any more."""
    _limit: float | None = None

    @property
    def leaving(self) -> bool:
        """Whether the server is about to end, and takes nothing new."""
        return self._limit is not None

    @property
    def time_left(self) -> float:
        """Seconds until a shutdown has to be over; all of them where none has begun."""
        if self._limit is None:
            return self.settings.shutdown_timeout
        return max(0.0, self._limit - time.monotonic())

    def close_doors(self) -> None:
        """Has everything that comes from now on refused. May be called in a signal handler."""
        if self._limit is None:
            self._limit = time.monotonic() + self.settings.shutdown_timeout

    async def leave(self) -> None:
        """Gives up all requests, those that run at their next step; returns when each has an outcome to be told."""
        self.close_doors()
        try:
            ended = await asyncio.to_thread(self.omni.shutdown, _PATIENCE * self.time_left)
        except Exception as error:  # a device that fails while it is freed: the requests are over
            log.warning("the engine was not shut down in order: %s", error)
            ended = True
        self.late = not ended

    @property
    def model_name(self) -> str:
        return self.settings.served_model_name or self.omni.model

    @property
    def media_limits(self) -> MediaLimits:
        return MediaLimits(max_bytes=self.settings.max_body, max_pixels=max(self.settings.max_pixels, 2**20))

    def submit(self, kind: str, words: Generation, inputs: dict[str, Any], **more: Any) -> Job:
        """Checks a request against the limits and puts it into the queue.

        Raises:
            ApiError, GreenroomError: it was not taken; nothing happened.
        """
        try:
            if self.leaving:
                raise shutting_down()
            if words.model is not None and words.model not in (self.model_name, self.omni.model):
                raise ApiError(
                    404, f"model {words.model[:200]!r} is not served here; {self.model_name!r} is",
                    param="model", code="model_not_found",
                )  # fmt: skip
            limits.check_known(self.omni, words, limits.input_of(inputs))
            params = words.sampling(**more)
            limits.check(self.omni, self.settings, words, params)
            request = Request({"prompt": words.prompt, **inputs}, params, timeout_s=self.settings.request_timeout)
            return self.omni.submit(request)
        except Exception as error:
            self.metrics.failed(kind, error)
            raise

    async def result(self, kind: str, job: Job, http: HttpRequest) -> OmniResult:
        """Waits for a request; gives it up when the client goes away.

        Raises:
            Exception: what the request failed with.
        """
        future = asyncio.wrap_future(job.future)
        try:
            while not future.done():
                await asyncio.wait({future}, timeout=_LOOK)
                if future.done():
                    break
                if self.late:
                    raise shutting_down()
                if await http.is_disconnected():
                    self.give_up(job)
            return future.result()
        except BaseException as error:
            future.cancel()  # or asyncio complains about an outcome that nobody asked for, and keeps it to do so
            self.give_up(job)
            self.metrics.failed(kind, error)
            raise

    async def operate(self, what: Callable[..., T], *args: Any) -> T:
        """Carries out what an operator has changed, which may have to wait for the running request.

        One after another on a thread of their own: on those that encode pictures, a few of them would keep everyone
        waiting.
        """
        future = asyncio.get_running_loop().run_in_executor(self.operators, what, *args)
        while not future.done():
            await asyncio.wait({future}, timeout=_LOOK)
            if self.late and not future.done():
                future.cancel()
                raise shutting_down()
        return future.result()

    def give_up(self, job: Job) -> None:
        """Cancels a request whose client is gone; harmless for one that is over."""
        job.cancel("the client went away")
        self.omni.cancel_swept()


async def changes(context: Context, job: Job) -> AsyncIterator[bool]:
    """True at each change of a job and False as a sign of life in between.

    Ends when the job is over, or when the server cannot wait for it any longer.
    """
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()

    def tell(_: Job) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            loop.call_soon_threadsafe(changed.set)

    job.listen(tell)
    yield True
    told = time.monotonic()
    while not (job.future.done() or context.late):
        try:
            await asyncio.wait_for(changed.wait(), _LOOK)
        except asyncio.TimeoutError:
            if time.monotonic() - told < _ALIVE:
                continue
        told, changed_now = time.monotonic(), changed.is_set()
        changed.clear()
        yield changed_now


def event(kind: str, data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n".encode()
