"""Whether a request is within the server's limits and the pipeline's grain, before it waits for the worker."""

from __future__ import annotations

from greenroom.bounds import check_numbers
from greenroom.engine import Engine
from greenroom.engine.sampling import OmniDiffusionSamplingParams
from greenroom.serving.errors import ApiError
from greenroom.serving.settings import ServerSettings


def check(omni: Engine, settings: ServerSettings, prompt: str, params: OmniDiffusionSamplingParams) -> None:
    """Refuses what is beyond the limits.

    Raises:
        ApiError, ConfigError: naming the field, the value and what is accepted.
    """
    if not prompt.strip():
        raise _refused("prompt", "an empty text", "text that says what to draw")
    for field, text in (("prompt", prompt), ("negative_prompt", params.negative_prompt or "")):
        if len(text) > settings.max_prompt:
            raise _refused(field, f"{len(text)} characters", f"at most {settings.max_prompt}")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise _refused(field, "half a character (a lone surrogate)", "text") from None
    check_numbers({"height": params.height, "width": params.width}, omni.facts.grain)
    height, width = _default(omni, params, "height"), _default(omni, params, "width")
    if height and width and height * width > settings.max_pixels:
        given = f"{width}x{height}, which are {width * height} pixels,"
        raise _refused("size", given, f"at most {settings.max_pixels} pixels, the server's --max-pixels")
    frames = _default(omni, params, "num_frames")
    if frames and frames > settings.max_frames:
        raise _refused("num_frames", str(frames), f"at most {settings.max_frames}, the server's --max-frames")
    steps = _default(omni, params, "num_inference_steps")
    if steps and steps > settings.max_steps:
        raise _refused("num_inference_steps", str(steps), f"at most {settings.max_steps}, the server's --max-steps")
    if params.num_outputs_per_prompt > settings.max_outputs:
        raise _refused("n", str(params.num_outputs_per_prompt), f"at most {settings.max_outputs}")


def _default(omni: Engine, params: OmniDiffusionSamplingParams, name: str) -> int | None:
    value: int | None = getattr(params, name)
    return omni.facts.default(name) if value is None else value


def _refused(field: str, given: str, accepted: str) -> ApiError:
    return ApiError(400, f"{field} = {given} is not accepted; accepted: {accepted}", param=field, code="invalid_value")
