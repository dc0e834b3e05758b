"""Runs one request through a pipeline: arguments in, phases and steps told, pictures out."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from greenroom.accelerator import Accelerator
from greenroom.bounds import REAL, WHOLE
from greenroom.engine.errors import DoesNotFit, RequestRefused
from greenroom.engine.job import Job, OmniMetrics, OmniResult, Request
from greenroom.engine.sampling import call_arguments
from greenroom.engine.variants import Siblings, takes
from greenroom.errors import BudgetExceeded, GreenroomError
from greenroom.handle import Handle
from greenroom.memory import format_bytes

# Whatever the request: memory, what Greenroom itself says, a device that has failed.
_NOT_THE_REQUESTS = (torch.OutOfMemoryError, GreenroomError, getattr(torch, "AcceleratorError", GreenroomError))


class Runner:
    """Runs requests one after another on the thread that calls `run`.

    Args:
        pipeline: a diffusers pipeline, placed or offloaded.
        handle: its offload, or None.
        accelerator: where it computes.
        recommended: call arguments that the checkpoint recommends.
    """

    def __init__(
        self, pipeline: Any, handle: Handle | None, accelerator: Accelerator, recommended: Mapping[str, Any]
    ) -> None:
        self.pipeline = pipeline
        self.handle = handle
        self.accelerator = accelerator
        self.recommended = recommended
        self.siblings = Siblings(pipeline)
        self._largest: tuple[int, str] = (0, "")

    def run(self, job: Job) -> OmniResult:
        """Serves a request.

        Raises:
            RequestRefused: the pipeline does not accept it.
            RequestCancelled: it was given up.
            DoesNotFit: the device has too little memory for it.
        """
        told = ""
        for retries in (0, 1):
            try:
                return self._attempt(job, retries)
            except torch.OutOfMemoryError as error:
                _forget_frames(error)
                told = str(error)
            except BudgetExceeded as error:
                _forget_frames(error)
                raise DoesNotFit(f"{error}; {self._fitted()}") from None
            except BaseException as error:
                _forget_frames(error)
                raise
            # What others left in the allocator's cache, or a moment's shortage, is no reason to fail.
            self.accelerator.empty_cache()
        # A budget's own refusal says what would do; a device's says only that it is full.
        raise DoesNotFit(told if "memory budget" in told else self._what_fits(job))

    def _attempt(self, job: Job, retries: int) -> OmniResult:
        request = job.request
        pipeline = self.siblings.taking([k for k, v in request.inputs.items() if v is not None])
        arguments, seed = call_arguments(
            pipeline, request.params, self.recommended, request.inputs, self.accelerator.device
        )
        pipeline.set_progress_bar_config(disable=not request.progress)
        before = self.handle.report() if self.handle else None
        self.accelerator.synchronize()
        self.accelerator.reset_peak()
        started = time.monotonic()
        watch = _Watch(job, pipeline, arguments)
        try:
            with watch.attached(), torch.no_grad():
                output = pipeline(**watch.arguments)
                if self.handle is not None:
                    self.handle.raise_excess()
        except (ValueError, TypeError, AssertionError, RuntimeError, LookupError, AttributeError) as error:
            # Pipelines check their inputs before they compute.
            refusal = _refusal(error, request, arguments) if watch.denoising_since is None else None
            if refusal is None:
                raise
            raise refusal from error
        finally:
            # Also after a failure: what takes turns on the device leaves it.
            with contextlib.suppress(AttributeError):
                self.pipeline.maybe_free_model_hooks()
        self.accelerator.synchronize()
        if self.handle is not None:
            self.handle.require_gathered()
        done = time.monotonic()
        after = self.handle.report() if self.handle else None
        first = watch.denoising_since or started
        last = watch.last_step_at or first
        metrics = OmniMetrics(
            queue_s=(job.started or started) - job.created,
            encode_s=first - started,
            denoise_s=last - first,
            decode_s=done - last,
            total_s=done - started,
            steps=job.step,
            seed=seed,
            bytes_to_device=after.copied - before.copied if before and after else 0,
            stalls=after.misses - before.misses if before and after else 0,
            # A budget measures single components and starts the device's count anew; it keeps the highest itself.
            peak_bytes=max(self.accelerator.peak(), after.latest_peak if after else 0),
            retries=retries,
        )
        images, videos, audio = _outputs(output)
        self._remember(arguments)
        return OmniResult(request.request_id, str(request.inputs.get("prompt")), images, videos, audio, seed, metrics)

    # ------------------------------------------------------------------ what fits

    def _remember(self, arguments: dict[str, Any]) -> None:
        size, words = _work_of(arguments)
        if size > self._largest[0]:
            self._largest = (size, words)

    def _what_fits(self, job: Job) -> str:
        params = job.request.params
        asked = {**self.recommended, **{k: v for k, v in vars(params).items() if v is not None}}
        free, total = self.accelerator.free_and_total()
        return (
            f"the device has too little memory for {_work_of(asked)[1]} with the weights that stay on it "
            f"({format_bytes(free)} of {format_bytes(total)} free after giving back the rest); {self._fitted()}. "
            "Ask for fewer pixels, frames or outputs, or lower the memory budget so that fewer weights stay"
        )

    def _fitted(self) -> str:
        return f"the largest that did is {self._largest[1]}" if self._largest[0] else "nothing has fitted yet"


class _Watch:
    """Follows one call from inside: its phases and steps, and its cancellation at the next of them."""

    def __init__(self, job: Job, pipeline: Any, arguments: dict[str, Any]) -> None:
        self.job = job
        self.pipeline = pipeline
        self.arguments = dict(arguments)
        self.denoising_since: float | None = None
        self.last_step_at: float | None = None

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        with contextlib.ExitStack() as undo:
            for module in self.pipeline.components.values():
                if isinstance(module, nn.Module):
                    handle = module.register_forward_pre_hook(self._entering, prepend=False)
                    undo.callback(handle.remove)
            if takes(self.pipeline, "callback_on_step_end"):
                self.arguments["callback_on_step_end"] = self._step_end
            else:
                undo.enter_context(self._scheduler_counted())
            yield

    def _entering(self, module: nn.Module, args: Any) -> None:
        self.job.check()
        if self.denoising_since is None and module is self._denoiser(module):
            self.denoising_since = time.monotonic()
            self.job.tell(phase="denoise", steps=self._planned())

    def _denoiser(self, module: nn.Module) -> nn.Module | None:
        names = ("transformer", "transformer_2", "unet", "prior", "dit")
        return next((module for n in names if getattr(self.pipeline, n, None) is module), None)

    def _planned(self) -> int:
        timesteps = getattr(self.pipeline, "num_timesteps", None) or getattr(self.pipeline, "_num_timesteps", None)
        return int(timesteps or self.arguments.get("num_inference_steps") or 0)

    def _step_end(self, pipeline: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        self.last_step_at = time.monotonic()
        steps = self._planned()
        self.job.tell(step=step + 1, steps=steps, phase="decode" if step + 1 >= steps else "denoise")
        self.job.check()
        return values

    @contextlib.contextmanager
    def _scheduler_counted(self) -> Iterator[None]:
        """For pipelines without a step callback: counts the scheduler's steps."""
        scheduler = getattr(self.pipeline, "scheduler", None)
        original = getattr(scheduler, "step", None)
        if scheduler is None or original is None or "step" in vars(scheduler):
            yield
            return
        count = 0

        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            result = original(*args, **kwargs)
            self._step_end(self.pipeline, count, None, {})
            count += 1
            return result

        scheduler.step = step
        try:
            yield
        finally:
            del scheduler.step


def _refusal(error: Exception, request: Request, arguments: Mapping[str, Any]) -> RequestRefused | None:
    """What a pipeline's error before its first denoising step says of the request; None where that is not at fault."""
    if isinstance(error, LookupError | AttributeError):
        # No check of the pipeline's, but a stumble over what nobody has checked, where there is such a thing.
        own = [name for name in request.params.extra_args if name not in (*WHOLE, *REAL)]
        told = f"the pipeline cannot take {' or '.join(own)} as given: {error!r}"
        return RequestRefused(own[0] if len(own) == 1 else None, told) if own else None
    if not isinstance(error, RuntimeError):
        return RequestRefused(_named_field(str(error), arguments), f"the pipeline refused the request: {error}")
    # Shapes that do not fit together, where a pipeline takes several pictures for several requests.
    several = next((k for k, v in request.inputs.items() if isinstance(v, list)), None)
    if several is None or isinstance(error, _NOT_THE_REQUESTS):
        return None
    return RequestRefused(
        several, f"{several}: this pipeline refused {len(request.inputs[several])} pictures ({error})"
    )


def _outputs(output: Any) -> tuple[Any, Any, Any]:
    images = getattr(output, "images", None)
    if images is not None:
        return images, [], None
    audio = getattr(output, "sound", None)
    if audio is None:
        audio = getattr(output, "audio", None)
    frames = getattr(output, "frames", None)
    if frames is not None:
        return [], frames, audio
    video = getattr(output, "video", None)
    if video is not None:
        return [], [video], audio
    raise RequestRefused(None, f"{type(output).__name__} holds neither images nor frames")


def _work_of(arguments: Mapping[str, Any]) -> tuple[int, str]:
    """How much a request asks for, to be compared with others, and in words."""
    height, width = int(arguments.get("height") or 0), int(arguments.get("width") or 0)
    frames = int(arguments.get("num_frames") or 1)
    names = ("num_images_per_prompt", "num_videos_per_prompt", "num_outputs_per_prompt")
    count = next((int(arguments[n]) for n in names if arguments.get(n)), 1)
    size = f"{width}x{height}" if height and width else "the default size"
    words = size + (f" x {frames} frames" if frames > 1 else "") + (f" x {count} outputs" if count > 1 else "")
    return height * width * frames * count, words


def _named_field(message: str, arguments: Mapping[str, Any]) -> str | None:
    return next((name for name in arguments if name in message), None)


class PipelineTraceback(Exception):
    """Where in the pipeline an error happened, as text: the cause of the error that is raised."""


def _forget_frames(error: BaseException) -> None:
    """Turns an error's traceback into text, so that whoever keeps the error keeps nothing on the device.

    To clear the frames is not enough: the functions that they ran go on holding what they close over, and torch's
    module call closes over its inputs.
    """
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    ahead: list[BaseException | None] = [error]
    seen: set[int] = set()
    while ahead:
        found = ahead.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            traceback.clear_frames(found.__traceback__)
            found.__traceback__ = None
            ahead += (found.__context__, found.__cause__)
    if not isinstance(error, GreenroomError):
        error.__cause__ = PipelineTraceback(text)
