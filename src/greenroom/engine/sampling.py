"""How to sample: one object for every pipeline, checked against what the pipeline at hand really takes."""

from __future__ import annotations

import difflib
import inspect
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from greenroom.bounds import check_numbers
from greenroom.engine.errors import RequestRefused
from greenroom.errors import ConfigError
from greenroom.grain import frame_grain_of, grain_of

# What the engine fills in itself; not for callers.
_OURS = frozenset(
    {
        "self", "prompt", "generator", "return_dict", "callback", "callback_steps",
        "callback_on_step_end", "callback_on_step_end_tensor_inputs", "image", "mask_image", "video",
        "num_images_per_prompt", "num_videos_per_prompt", "kwargs", "args",
    }
)  # fmt: skip
_OUTPUT_TYPES = ("pil", "np", "pt", "latent")
_OUTPUT_COUNTS = ("num_images_per_prompt", "num_videos_per_prompt")


class OmniDiffusionSamplingParams:
    """Parameters of one generation. None leaves the choice to the checkpoint, then to the pipeline.

    Args:
        height, width: pixels; for most pipelines multiples of what the model's latents and patches stand for.
        num_frames: frames of a video.
        num_inference_steps: denoising steps.
        guidance_scale, guidance_scale_2, true_cfg_scale, strength: as the pipeline understands them.
        negative_prompt: what to keep out.
        num_outputs_per_prompt: pictures or videos; output i is drawn with seed + i.
        seed: 0 to 2**63 - 1; the same seed gives the same bits, whatever the offloading. None draws one.
        generator_device: where noise is drawn: "cpu", or the compute device. Noise differs between the two.
        output_type: "pil" (default), "np", "pt" or "latent".
        extra_args: further parameters of the pipeline's call.
        **more: the same, by name.
    """

    FIELDS = (
        "height", "width", "num_frames", "num_inference_steps", "guidance_scale", "guidance_scale_2",
        "true_cfg_scale", "strength", "negative_prompt", "output_type",
    )  # fmt: skip

    def __init__(
        self,
        *,
        height: int | None = None,
        width: int | None = None,
        num_frames: int | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        guidance_scale_2: float | None = None,
        true_cfg_scale: float | None = None,
        strength: float | None = None,
        negative_prompt: str | None = None,
        num_outputs_per_prompt: int = 1,
        seed: int | None = None,
        generator_device: str = "cpu",
        output_type: str | None = None,
        extra_args: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        self.height = height
        self.width = width
        self.num_frames = num_frames
        self.num_inference_steps = num_inference_steps
        self.guidance_scale = guidance_scale
        self.guidance_scale_2 = guidance_scale_2
        self.true_cfg_scale = true_cfg_scale
        self.strength = strength
        self.negative_prompt = negative_prompt
        self.num_outputs_per_prompt = num_outputs_per_prompt
        self.seed = seed
        self.generator_device = generator_device
        self.output_type = output_type
        self.extra_args = {**(extra_args or {}), **more}

    @classmethod
    def of(cls, value: Any) -> OmniDiffusionSamplingParams:
        """None, a mapping or an object of this class, as an object of this class."""
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            return cls(**value)
        raise ConfigError("sampling_params", value, "an OmniDiffusionSamplingParams, a mapping, or nothing")

    def copy(self, **changes: Any) -> OmniDiffusionSamplingParams:
        """The same with other values for some fields."""
        words = {**vars(self), **changes}
        return type(self)(**words)

    def __repr__(self) -> str:
        said = {k: v for k, v in vars(self).items() if v not in (None, {}) and not k.startswith("_")}
        return f"OmniDiffusionSamplingParams({', '.join(f'{k}={v!r}' for k, v in said.items())})"


def pipeline_parameters(pipeline: Any) -> tuple[str, ...]:
    """Names of the parameters of a pipeline's call that a caller may set."""
    names = inspect.signature(type(pipeline).__call__).parameters
    return tuple(n for n in names if n not in _OURS)


def call_arguments(
    pipeline: Any,
    params: OmniDiffusionSamplingParams,
    recommended: Mapping[str, Any],
    inputs: Mapping[str, Any],
    device: torch.device,
) -> tuple[dict[str, Any], int]:
    """Keyword arguments for a pipeline's call, and the seed that they stand for.

    Args:
        pipeline: decides what is accepted.
        params: the caller's wishes.
        recommended: what the checkpoint recommends; what the pipeline has no parameter for is left out.
        inputs: "prompt" and whatever else is generated from: "image", "negative_prompt", ...
        device: the compute device.

    Raises:
        RequestRefused: naming the field and listing the pipeline's own parameters.
    """
    accepted = set(inspect.signature(type(pipeline).__call__).parameters) - {"self"}
    wishes = {name: value for name in params.FIELDS if (value := getattr(params, name)) is not None}
    for name, value in params.extra_args.items():
        if name in _OURS or name not in accepted:
            raise _unknown(pipeline, name, value)
        wishes[name] = value
    for name, value in inputs.items():
        if value is not None:
            wishes[name] = value
    _check_numbers(wishes, grain_of(pipeline, {**recommended, **wishes}), frame_grain_of(pipeline))
    arguments = {k: v for k, v in recommended.items() if k in accepted and k not in _OURS}
    for name, value in wishes.items():
        if name == "output_type" and name not in accepted:
            continue
        if name not in accepted:
            raise _unknown(pipeline, name, value)
        arguments[name] = value
    check_prompt(arguments.get("prompt"))
    _check_output_type(arguments.setdefault("output_type", "pil"))
    if "output_type" not in accepted:
        del arguments["output_type"]
    _check_numbers({"seed": params.seed, "num_outputs_per_prompt": params.num_outputs_per_prompt})
    seed = secrets.randbelow(2**32) if params.seed is None else int(params.seed)
    count = 1 if params.num_outputs_per_prompt is None else int(params.num_outputs_per_prompt)
    if count > 1:
        parameter = next((n for n in _OUTPUT_COUNTS if n in accepted), None)
        if parameter is None:
            raise RequestRefused(
                "num_outputs_per_prompt", f"num_outputs_per_prompt = {count}; accepted: 1 by this pipeline"
            )
        arguments[parameter] = count
    place = _generator_device(params.generator_device, device)
    generators = [torch.Generator(place).manual_seed((seed + i) % 2**63) for i in range(count)]
    arguments["generator"] = generators if count > 1 else generators[0]
    return arguments, seed


def check_prompt(prompt: object) -> None:
    """Raises RequestRefused for what is not a text that says something."""
    if not isinstance(prompt, str):
        raise RequestRefused("prompt", f"prompt = {prompt!r} is not accepted; accepted: text")
    if not prompt.strip():
        raise RequestRefused("prompt", "prompt is empty; accepted: text that says what to draw")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise RequestRefused("prompt", "prompt holds half a character (a lone surrogate); accepted: text") from None


def _check_output_type(value: object) -> None:
    # Of any other word diffusers makes arrays, when everything has been computed.
    if not isinstance(value, str) or value not in _OUTPUT_TYPES:
        accepted = ", ".join(f'"{word}"' for word in _OUTPUT_TYPES)
        raise RequestRefused("output_type", f"output_type = {value!r} is not accepted; accepted: {accepted}")


def _check_numbers(words: Mapping[str, Any], grain: int | None = None, frame_grain: int = 1) -> None:
    try:
        check_numbers(words, grain, frame_grain)
    except ConfigError as error:
        raise RequestRefused(error.field, str(error)) from None


def _generator_device(word: object, device: torch.device) -> torch.device:
    if word == "cpu":
        return torch.device("cpu")
    if isinstance(word, str) and word.split(":")[0] == device.type:
        return device
    accepted = '"cpu"' if device.type == "cpu" else f'"cpu" or "{device.type}"'
    raise RequestRefused("generator_device", f"generator_device = {word!r} is not accepted; accepted: {accepted}")


def _unknown(pipeline: Any, name: str, value: object) -> RequestRefused:
    own: Iterable[str] = pipeline_parameters(pipeline)
    near = difflib.get_close_matches(name, list(own), n=1)
    hint = f' (did you mean "{near[0]}"?)' if near else ""
    return RequestRefused(
        name,
        f"{name} = {repr(value)[:100]} is not a parameter of {type(pipeline).__name__}{hint}; its parameters are: "
        + ", ".join(own),
    )
