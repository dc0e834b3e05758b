"""What requests may say. Unknown fields are refused by name; numbers have limits before anything is computed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from greenroom.bounds import MAX_PIXELS, MAX_SCALE, MAX_SEED
from greenroom.engine.sampling import OmniDiffusionSamplingParams
from greenroom.serving.errors import ApiError, from_validation

_Pixels = Annotated[int, Field(ge=1, le=MAX_PIXELS)]
_Scale = Annotated[float, Field(ge=0, le=MAX_SCALE, allow_inf_nan=False)]
T = TypeVar("T", bound=BaseModel)
_SIZE = re.compile(r"0*[1-9]\d{0,4}x0*[1-9]\d{0,4}", re.ASCII)


class Generation(BaseModel):
    """Fields that every generation shares: what to draw, and how to sample."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    files: ClassVar[tuple[str, ...]] = ()
    """Names of the fields that hold files."""

    prompt: str = Field(description="What to draw.")
    model: str | None = Field(None, description="The served model's name, or nothing.")
    size: str | None = Field(None, description='"WIDTHxHEIGHT" in pixels, or "auto".')
    height: _Pixels | None = None
    width: _Pixels | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = Field(None, description="Same seed, same bits.")
    negative_prompt: str | None = None
    num_inference_steps: Annotated[int, Field(ge=1)] | None = None
    guidance_scale: _Scale | None = None
    guidance_scale_2: _Scale | None = None
    true_cfg_scale: _Scale | None = None
    # With 0, no step would be left.
    strength: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    max_sequence_length: Annotated[int, Field(ge=1, le=4096)] | None = None
    generator_device: str | None = Field(None, max_length=32)
    user: str | None = Field(None, description="Accepted and not used.")
    safety_identifier: str | None = Field(None, description="Accepted and not used.")

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, words: Any) -> Any:
        """What is null is not said, as clients send fields that their users leave alone."""
        return {k: v for k, v in words.items() if v is not None or k not in cls.model_fields}

    @field_validator("*", mode="before")
    @classmethod
    def _number(cls, value: Any, info: ValidationInfo) -> Any:
        return _no_truth(value, cls.model_fields[str(info.field_name)].annotation)

    @field_validator("size")
    @classmethod
    def _size(cls, value: str | None) -> str | None:
        if value is not None and value != "auto" and _SIZE.fullmatch(value) is None:
            raise ValueError(f'{value[:40]!r} is not a size; accepted: "WIDTHxHEIGHT" such as "1024x1024", or "auto"')
        return value

    def sampling(self, **more: Any) -> OmniDiffusionSamplingParams:
        """The sampling parameters that this request stands for.

        Raises:
            ApiError: size, height and width contradict each other.
        """
        width, height = self.width, self.height
        if self.size not in (None, "auto"):
            assert self.size is not None
            w, h = (int(n) for n in self.size.split("x"))
            if (width not in (None, w)) or (height not in (None, h)):
                raise ApiError(400, f"size = {self.size} contradicts width and height", param="size")
            width, height = w, h
        words: dict[str, Any] = {
            "num_inference_steps": self.num_inference_steps,
            "guidance_scale": self.guidance_scale,
            "guidance_scale_2": self.guidance_scale_2,
            "true_cfg_scale": self.true_cfg_scale,
            "strength": self.strength,
            "negative_prompt": self.negative_prompt,
            "seed": self.seed,
        }
        extra = {"max_sequence_length": self.max_sequence_length} if self.max_sequence_length is not None else {}
        return OmniDiffusionSamplingParams(
            **words,
            **more,
            width=width,
            height=height,
            extra_args=extra,
            generator_device=self.generator_device or "cpu",
        )


class ImageGeneration(Generation):
    """POST /v1/images/generations."""

    n: Annotated[int, Field(ge=1)] = Field(1, description="Pictures to draw.")
    response_format: str | None = Field(None, description='"b64_json": pictures come in the answer itself.')
    output_format: Literal["png", "jpeg", "webp"] = "png"
    output_compression: Annotated[int, Field(ge=0, le=100)] | None = Field(
        None, description="Quality of jpeg and webp."
    )
    stream: bool = Field(False, description="Progress and result as server-sent events.")
    partial_images: Annotated[int, Field(ge=0, le=3)] | None = Field(
        None, description="Accepted; a stream tells progress, and no picture before the finished one."
    )
    quality: Literal["auto", "low", "medium", "high", "xhigh", "max", "standard", "hd"] | None = Field(
        None, description="Accepted and not used."
    )
    style: Literal["vivid", "natural"] | None = Field(None, description="Accepted and not used.")
    background: str | None = Field(None, description='"opaque" or "auto"; nothing is drawn with transparency.')
    moderation: Literal["auto", "low"] | None = Field(None, description="Accepted and not used.")

    @field_validator("response_format")
    @classmethod
    def _in_the_answer(cls, value: str | None) -> str | None:
        if value not in (None, "b64_json"):
            raise ValueError('accepted is "b64_json"; pictures come in the answer itself and are not kept at a URL')
        return value

    @field_validator("background")
    @classmethod
    def _opaque(cls, value: str | None) -> str | None:
        if value not in (None, "opaque", "auto"):
            raise ValueError('accepted are "opaque" and "auto"; nothing is drawn with transparency')
        return value


class ImageEdit(ImageGeneration):
    """POST /v1/images/edits, without its files."""

    files = ("image", "mask")
    input_fidelity: Literal["high", "low"] | None = Field(None, description="Accepted and not used.")


class VideoCreation(Generation):
    """POST /v1/videos, without its file."""

    files = ("input_reference",)
    seconds: Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)] | None = None
    fps: Annotated[int, Field(ge=1, le=120)] = 16
    num_frames: Annotated[int, Field(ge=1)] | None = None


class MemoryChange(BaseModel):
    """POST /v1/offload/memory."""

    model_config = ConfigDict(extra="forbid")

    memory_budget: int | float | str = Field(description='Device memory to use: "12GiB", bytes or "80%".')

    @field_validator("memory_budget", mode="before")
    @classmethod
    def _amount(cls, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError(
                'it is no amount of memory; accepted: "12GiB", a number of bytes, or a share such as "80%"'
            )
        return value


def _no_truth(value: Any, annotation: Any) -> Any:
    """Refuses `true` for a number, which pydantic would take for 1."""
    if isinstance(value, bool) and annotation is not bool:
        raise ValueError("it is a truth value")
    return value


def parse(kind: type[T], words: dict[str, Any], accepted: Sequence[str] | None = None) -> T:
    """An object of a schema.

    Args:
        kind: the schema.
        words: what was sent.
        accepted: fields to tell of where one is not known; None for those of the schema.

    Raises:
        ApiError: 400, naming the field.
    """
    try:
        return kind.model_validate(words)
    except ValidationError as error:
        told = list(kind.model_fields) if accepted is None else accepted
        raise from_validation(list(error.errors()), told) from None
