"""One request on its way through the engine."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from greenroom.engine.errors import RequestCancelled
from greenroom.engine.sampling import OmniDiffusionSamplingParams

log = logging.getLogger("greenroom.engine")

QUEUED, RUNNING, DONE, FAILED, CANCELLED = "queued", "running", "completed", "failed", "cancelled"


@dataclass(frozen=True)
class OmniMetrics:
    """What one generation took; times in seconds, sizes in bytes.

    Attributes:
        queue_s: waiting for the worker.
        encode_s: from the start to the denoiser's first forward: text and image encoders.
        denoise_s: from there to the end of the last step.
        decode_s: from there to the finished output: VAE and postprocessing.
        total_s: encode, denoise and decode.
        steps: denoising steps that were run.
        seed: the seed that was used.
        bytes_to_device: weights copied to the device for this request.
        stalls: blocks that were needed before they had been fetched.
        peak_bytes: the most device memory in use during the request; 0 on the CPU.
        retries: 1 where a device out of memory was overcome by trying again.
    """

    queue_s: float
    encode_s: float
    denoise_s: float
    decode_s: float
    total_s: float
    steps: int
    seed: int
    bytes_to_device: int
    stalls: int
    peak_bytes: int
    retries: int


@dataclass(frozen=True)
class OmniResult:
    """What one prompt gave.

    Attributes:
        request_id: as in logs, metrics and events.
        prompt: the prompt.
        images: PIL images (or what `output_type` asked for), one for each output; empty for a video.
        videos: a list of frames (PIL) for each output; empty for images.
        audio: sound that came with the video, or None.
        seed: the seed of the first output; output i has seed + i.
        metrics: what it took.
    """

    request_id: str
    prompt: str
    images: Any
    videos: Any
    audio: Any
    seed: int
    metrics: OmniMetrics

    @property
    def frames(self) -> Any:
        """The frames of the first video; empty for images."""
        return self.videos[0] if len(self.videos) else []


@dataclass
class Request:
    """What is asked for. `inputs` are the prompt and what else is generated from, by the pipeline's names."""

    inputs: dict[str, Any]
    params: OmniDiffusionSamplingParams
    progress: bool = False
    timeout_s: float | None = None
    request_id: str = field(default_factory=lambda: f"gen-{uuid.uuid4().hex}")


class Job:
    """A request, its place in the queue, its progress and, at the end, its result. Safe from any thread."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.future: Future[OmniResult] = Future()
        # Marked as running at once: only the worker ends it, and nobody can cancel it under the worker's hands.
        self.future.set_running_or_notify_cancel()
        self.state = QUEUED
        self.phase = QUEUED
        self.step = 0
        self.steps = 0
        self.created = time.monotonic()
        self.started: float | None = None
        self.finished: float | None = None
        self._why: str | None = None
        self.agree: Callable[[bool], bool] | None = None
        """Asks others who compute the same request whether one of them has given it up. For the engine."""
        self._lock = threading.Lock()
        self._listeners: list[Callable[[Job], None]] = []

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def progress(self) -> float:
        """Share of the denoising steps that are done, 0 to 1; 1 only when the result is there."""
        if self.state == DONE:
            return 1.0
        return min(0.99, self.step / self.steps) if self.steps else 0.0

    def cancel(self, reason: str = "by its caller") -> None:
        """Gives the request up: at once while it waits, at the next denoising step while it runs."""
        with self._lock:
            if self._why is None and not self.future.done():
                self._why = reason

    def check(self) -> None:
        """Raises RequestCancelled where the request was given up or has run out of time."""
        limit = self.request.timeout_s
        if limit is not None and time.monotonic() - self.created > limit:
            self.cancel(f"it took longer than {limit:g} s")
        given_up = self._why is not None
        if self.agree is not None:
            # What all have agreed upon counts, and not what has come in since.
            given_up = self.agree(given_up)
            if given_up:
                self.cancel("by another rank")
        if given_up:
            raise RequestCancelled(self._why or "by its caller")

    def given_up(self) -> RequestCancelled | None:
        """What `check` raises, or None."""
        try:
            self.check()
        except RequestCancelled as error:
            return error
        return None

    def listen(self, listener: Callable[[Job], None]) -> None:
        """Calls `listener` on each change, on the worker's thread; it must return quickly.

        What it raises is logged, and it is not called again: who watches a request must not be able to end it.
        """
        self._listeners.append(listener)

    def tell(self, **changes: Any) -> None:
        """Sets attributes and tells the listeners. For the engine."""
        for name, value in changes.items():
            setattr(self, name, value)
        for listener in list(self._listeners):
            try:
                listener(self)
            except Exception:
                log.exception("a listener of request %s failed", self.id)
                self._listeners.remove(listener)

    def finish(self, result: OmniResult | None, error: BaseException | None) -> None:
        """Sets the outcome. For the engine."""
        self.finished = time.monotonic()
        if error is None:
            assert result is not None
            self.state = self.phase = DONE
            self.future.set_result(result)
        else:
            self.state = self.phase = CANCELLED if isinstance(error, RequestCancelled) else FAILED
            self.future.set_exception(error)
        self.tell()
