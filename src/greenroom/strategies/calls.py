"""Where a call of a diffusers pipeline begins and ends, and which pipelines share an offload."""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Iterable, Iterator
from types import FrameType, MethodType
from typing import Any, Protocol

import torch
from torch import nn

from greenroom.discovery import uncompiled
from greenroom.errors import OffloadError


class EndsCalls(Protocol):
    """What is told of the end of a call."""

    def end_call(self) -> None: ...


class CallEnd:
    """Stands in for `maybe_free_model_hooks`, which diffusers pipelines call last."""

    greenroom = True

    def __init__(self, pipeline: Any, runtime: EndsCalls) -> None:
        self._pipeline = weakref.ref(pipeline)
        self._original = type(pipeline).maybe_free_model_hooks
        self._runtime = runtime
        functools.update_wrapper(self, self._original)

    def __call__(self) -> Any:
        pipeline = self._pipeline()
        result = self._original(pipeline) if pipeline is not None else None
        self._runtime.end_call()
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return MethodType(self._original, memo[id(self._pipeline())])

    def __reduce__(self) -> Any:
        raise OffloadError("a pipeline cannot be pickled while it is offloaded; call handle.disable() first")


def watch(pipeline: Any, runtime: EndsCalls) -> None:
    """Learns where a call of the pipeline ends: there it gives its components back."""
    if not hasattr(pipeline, "__dict__"):
        return
    pipeline.__dict__["_greenroom"] = weakref.ref(runtime)
    if hasattr(type(pipeline), "maybe_free_model_hooks"):
        pipeline.__dict__["maybe_free_model_hooks"] = CallEnd(pipeline, runtime)


def unwatch(pipeline: Any) -> None:
    if isinstance(getattr(pipeline, "__dict__", {}).get("maybe_free_model_hooks"), CallEnd):
        del pipeline.__dict__["maybe_free_model_hooks"]


def modules_of(pipeline: Any) -> Iterator[tuple[str, nn.Module]]:
    """The components of a diffusers pipeline that are modules."""
    components = getattr(pipeline, "components", None)
    if isinstance(components, dict):
        for name, component in components.items():
            if isinstance(component, nn.Module):
                yield name, uncompiled(component)


def asking_pipeline(frame: FrameType | None) -> Any:
    """The pipeline that asks a component for its device, if `frame` is where diffusers does so; else None."""
    if frame is None or frame.f_code.co_name != "_execution_device":
        return None
    return frame.f_locals.get("self")


def running(pipelines: Iterable[Any]) -> Any:
    """One of `pipelines` whose call has begun and not returned, on any thread: it is asked from a step callback, or
    while another thread draws. None if there is none."""
    codes = {}
    for pipeline in pipelines:
        if callable(pipeline):
            codes[id(pipeline)] = (pipeline, getattr(inspect.unwrap(type(pipeline).__call__), "__code__", None))
    frame: FrameType | None
    for frame in sys._current_frames().values():
        while frame is not None:
            for pipeline, code in codes.values():
                if frame.f_code is code and frame.f_locals.get(code.co_varnames[0]) is pipeline:
                    frame = None  # one of the frames is this one, which would hold itself and the pipelines
                    return pipeline
            frame = frame.f_back
    return None


def refuse_strangers(pipeline: Any, known: set[int], device: torch.device) -> None:
    """Refuses a call that would meet a component which came to the pipeline after the offload.

    Raises:
        OffloadError: naming the component.
    """
    for name, module in modules_of(pipeline):
        if id(module) in known:
            continue
        found = next((t.device for t in (*module.parameters(), *module.buffers())), device)
        if found != device:
            raise OffloadError(
                f"{name} ({type(module).__name__}) is on {found} and not part of the offload to {device}: it came to "
                f"the pipeline later; call greenroom.offload with this {type(pipeline).__name__} again"
            )
