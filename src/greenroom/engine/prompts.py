"""From what callers ask for in Python to requests, and back to results."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from greenroom.engine.errors import RequestRefused
from greenroom.engine.job import Job, OmniResult, Request
from greenroom.engine.media import read_image
from greenroom.engine.sampling import OmniDiffusionSamplingParams

Prompt: TypeAlias = str | Mapping[str, Any]
SamplingWords: TypeAlias = OmniDiffusionSamplingParams | Mapping[str, Any] | None

_INPUTS = ("prompt", "negative_prompt", "image", "mask_image", "last_image", "video")
_PICTURES = ("image", "mask_image", "last_image")


class _Taking(Protocol):
    def submit(self, request: Request) -> Job: ...


def generate_each(
    engine: _Taking, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingWords, *, progress: bool
) -> list[OmniResult]:
    """`generate` of any engine that takes requests; see `Omni.generate`."""
    params = OmniDiffusionSamplingParams.of(sampling_params)
    several = isinstance(prompts, Iterable) and not isinstance(prompts, str | bytes | Mapping)
    items: list[Any] = list(prompts) if several else [prompts]
    requests = [Request(prompt_inputs(item), params, progress=progress) for item in items]
    jobs: list[Job] = []
    try:
        for request in requests:
            jobs.append(engine.submit(request))
        return list(map(_result, jobs))
    except BaseException:
        while jobs:  # none is left to this frame, which the error keeps, and which would keep the error
            jobs.pop().cancel("another prompt of the same call failed")
        raise


def _result(job: Job) -> OmniResult:
    try:
        return job.future.result()
    finally:
        del job  # as above


def prompt_inputs(prompt: Prompt) -> dict[str, Any]:
    """What a prompt stands for, by the names of a pipeline's call; images are read.

    Raises:
        RequestRefused: not a prompt, an unknown key, or an image that cannot be read.
    """
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if not isinstance(prompt, Mapping):
        raise RequestRefused(
            "prompt", f"prompt = {prompt!r} is not accepted; accepted: text, or a mapping with 'prompt'"
        )
    for key in prompt:
        if key not in _INPUTS:
            raise RequestRefused(str(key), f"{key} is not part of a prompt; accepted: {', '.join(_INPUTS)}")
    inputs = {k: v for k, v in prompt.items() if v is not None}
    return {k: _pictures(v, k) if k in _PICTURES else v for k, v in inputs.items()}


def _pictures(value: Any, field: str) -> Any:
    """One picture, or a list of several."""
    if not isinstance(value, list | tuple):
        return _read(value, field)
    if not value:
        raise RequestRefused(field, f"{field} = {value!r} is not accepted; accepted: a picture, or a list of some")
    pictures = [_read(each, field) for each in value]
    return pictures if len(pictures) > 1 else pictures[0]


def _read(value: Any, field: str) -> Any:
    if isinstance(value, os.PathLike) or (isinstance(value, str) and len(value) < 4096 and os.path.isfile(value)):
        try:
            with open(value, "rb") as file:
                value = file.read()
        except OSError as error:
            raise RequestRefused(field, f"{field} cannot be read: {error}") from None
    return read_image(value, field=field)
