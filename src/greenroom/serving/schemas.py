"""What requests may say. Unknown fields are refused by name; numbers have limits before anything is computed."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from greenroom.bounds import MAX_PIXELS, MAX_SCALE, MAX_SEED
from greenroom.engine.sampling import OmniDiffusionSamplingParams
from greenroom.serving.errors import ApiError, from_validation

_Pixels = Annotated[int, Field(ge=1, le=MAX_PIXELS)]
_Scale = Annotated[float, Field(ge=0, le=MAX_SCALE, allow_inf_nan=False)]
_SIZE = re.compile(r"0*[1-9]\d{0,4}x0*[1-9]\d{0,4}", re.ASCII)


class Generation(BaseModel):
    """Fields that every generation shares: what to draw, and how to sample."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

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
    strength: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    max_sequence_length: Annotated[int, Field(ge=1, le=4096)] | None = None
    generator_device: str | None = Field(None, max_length=32)
    user: str | None = Field(None, description="Accepted and not used.")

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
    response_format: Literal["b64_json"] | None = Field(None, description="Pictures come in the answer itself.")
    output_format: Literal["png", "jpeg", "webp"] = "png"
    output_compression: Annotated[int, Field(ge=0, le=100)] | None = Field(
        None, description="Quality of jpeg and webp."
    )
    stream: bool = Field(False, description="Progress and result as server-sent events.")
    quality: str | None = Field(None, description="Accepted and not used.")
    style: str | None = Field(None, description="Accepted and not used.")
    background: str | None = Field(None, description="Accepted and not used.")
    moderation: str | None = Field(None, description="Accepted and not used.")


class ImageEdit(ImageGeneration):
    """POST /v1/images/edits, without its files."""

    input_fidelity: str | None = Field(None, description="Accepted and not used.")


class VideoCreation(Generation):
    """POST /v1/videos, without its file."""

    seconds: Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)] | None = None
    fps: Annotated[int, Field(ge=1, le=120)] = 16
    num_frames: Annotated[int, Field(ge=1)] | None = None


class MemoryChange(BaseModel):
    """POST /v1/offload/memory."""

    model_config = ConfigDict(extra="forbid")

    memory_budget: int | str = Field(description='Device memory to use: "12GiB", bytes or "80%".')

    @field_validator("memory_budget", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        return _no_truth(value, int)


def _no_truth(value: Any, annotation: Any) -> Any:
    """Refuses `true` for a number, which pydantic would take for 1."""
    if isinstance(value, bool) and annotation is not bool:
        raise ValueError("it is a truth value")
    return value


def parse(kind: type[BaseModel], words: dict[str, Any]) -> Any:
    """An object of a schema.

    Raises:
        ApiError: 400, naming the field.
    """
    try:
        return kind(**words)
    except ValidationError as error:
        raise from_validation(list(error.errors())) from None
    except TypeError as error:  # a field name that is no identifier still has to be a string
        raise ApiError(400, str(error)) from None
