"""What the routes share: the engine, the limits, and how one waits for a request without keeping anyone waiting."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request as HttpRequest

from greenroom.engine import Engine, Job, OmniResult, Request
from greenroom.engine.media import MediaLimits
from greenroom.serving import limits
from greenroom.serving.errors import ApiError
from greenroom.serving.metrics import Metrics
from greenroom.serving.schemas import Generation
from greenroom.serving.settings import ServerSettings

T = TypeVar("T")
# Seconds between two looks whether the client is still there, and between two signs of life on a stream.
_LOOK = 0.1
_ALIVE = 10.0


@dataclass
class Context:
    """One server."""

    omni: Engine
    settings: ServerSettings
    metrics: Metrics
    operators: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "greenroom-operator"))

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
            if words.model is not None and words.model not in (self.model_name, self.omni.model):
                raise ApiError(
                    404, f"model {words.model[:200]!r} is not served here; {self.model_name!r} is",
                    param="model", code="model_not_found",
                )  # fmt: skip
            params = words.sampling(**more)
            limits.check(self.omni, self.settings, words.prompt, params)
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
                if not future.done() and await http.is_disconnected():
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
        return await asyncio.get_running_loop().run_in_executor(self.operators, what, *args)

    def give_up(self, job: Job) -> None:
        """Cancels a request whose client is gone; harmless for one that is over."""
        job.cancel("the client went away")
        self.omni.cancel_swept()


async def changes(job: Job) -> AsyncIterator[bool]:
    """True at each change of a job and False as a sign of life in between; ends when the job is over."""
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()

    def tell(_: Job) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            loop.call_soon_threadsafe(changed.set)

    job.listen(tell)
    yield True
    while not job.future.done():
        try:
            await asyncio.wait_for(changed.wait(), _ALIVE)
        except asyncio.TimeoutError:
            yield False
            continue
        changed.clear()
        yield True


def event(kind: str, data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n".encode()
