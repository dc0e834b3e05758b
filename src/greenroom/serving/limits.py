"""Whether a request is within the server's limits and the pipeline's grain, before it waits for the worker."""

from __future__ import annotations

from collections.abc import Container

from greenroom.bounds import check_numbers
from greenroom.engine import Engine
from greenroom.engine.sampling import OmniDiffusionSamplingParams
from greenroom.errors import ConfigError
from greenroom.serving.errors import ApiError, shown
from greenroom.serving.schemas import Generation
from greenroom.serving.settings import ServerSettings

# Fields that go to the pipeline, by the name of its parameter.
_PASSED = {
    "size": "height", "height": "height", "width": "width", "num_frames": "num_frames", "seconds": "num_frames",
    "num_inference_steps": "num_inference_steps", "guidance_scale": "guidance_scale", "strength": "strength",
    "guidance_scale_2": "guidance_scale_2", "true_cfg_scale": "true_cfg_scale", "negative_prompt": "negative_prompt",
    "max_sequence_length": "max_sequence_length",
}  # fmt: skip


def accepted_fields(omni: Engine, kind: type[Generation], using: str | None = None) -> list[str]:
    """Fields that a request may have with the model that is served.

    Args:
        omni: the engine.
        kind: of request.
        using: "image" or "mask_image", where the request holds one.
    """
    own = omni.parameters(using) or omni.parameters() or ()
    return [*kind.files, *(f for f in kind.model_fields if f not in _PASSED or _PASSED[f] in own)]


def input_of(inputs: Container[str]) -> str | None:
    """What decides which pipeline serves a request that holds these inputs."""
    return next((name for name in ("mask_image", "image") if name in inputs), None)


def check_known(omni: Engine, words: Generation, using: str | None) -> None:
    """Refuses fields that the model has no use for; see `accepted_fields`.

    Raises:
        ApiError: naming the field, the value and the fields that are accepted.
    """
    accepted = accepted_fields(omni, type(words), using)
    for field in words.model_fields_set.difference(accepted):
        value = getattr(words, field)
        if field == "size" and value == "auto":
            continue
        message = f"{field} = {shown(value)} is not accepted, as this model takes none; accepted: {', '.join(accepted)}"
        raise ApiError(400, message, param=field, code="invalid_value")


def check(omni: Engine, settings: ServerSettings, words: Generation, params: OmniDiffusionSamplingParams) -> None:
    """Refuses what is beyond the limits.

    Args:
        omni: the engine.
        settings: the limits.
        words: the request.
        params: what is made of it.

    Raises:
        ApiError, ConfigError: naming the field, the value and what is accepted.
    """
    prompt = words.prompt
    if not prompt.strip():
        raise _refused("prompt", "an empty text", "text that says what to draw")
    for field, text in (("prompt", prompt), ("negative_prompt", params.negative_prompt or "")):
        if len(text) > settings.max_prompt:
            raise _refused(field, f"{len(text)} characters", f"at most {settings.max_prompt}")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise _refused(field, "half a character (a lone surrogate)", "text") from None
    try:
        check_numbers({"height": params.height, "width": params.width}, omni.facts.grain)
        check_numbers({"num_frames": params.num_frames}, frame_grain=omni.facts.frame_grain)
    except ConfigError as error:
        if error.field == "num_frames" or "size" not in words.model_fields_set:
            raise
        raise _refused("size", str(words.size), f"for the {error.field}, {error.accepted}") from None
    device = str(omni.device).partition(":")[0]
    if words.generator_device is not None and words.generator_device.partition(":")[0] not in ("cpu", device):
        told = f'"cpu" or "{device}"' if device != "cpu" else '"cpu"'
        raise _refused("generator_device", shown(words.generator_device), told)
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
