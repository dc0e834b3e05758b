"""One picture from a checkpoint on disk: load, offload, call, give back."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from greenroom.accelerator import Accelerator, find_device
from greenroom.api import offload
from greenroom.bounds import check_numbers
from greenroom.config import parse_config
from greenroom.errors import ConfigError, GreenroomError, NotSupportedError
from greenroom.grain import grain_of
from greenroom.handle import Report
from greenroom.loading import check_dtype, load_checkpoint


@dataclass(frozen=True)
class Request:
    """What to draw. None leaves the choice to the checkpoint, then to the pipeline.

    Attributes:
        prompt: what to draw.
        negative_prompt: what to keep out.
        seed: of a CPU generator, so that the same seed gives the same latents on every device.
        steps: denoising steps.
        height, width: pixels.
        guidance_scale: as the pipeline understands it.
    """

    prompt: str
    negative_prompt: str | None = None
    seed: int = 0
    steps: int | None = None
    height: int | None = None
    width: int | None = None
    guidance_scale: float | None = None

    def words(self) -> dict[str, Any]:
        """What was asked for, by the names of a pipeline's call."""
        return {
            "prompt": self.prompt,
            "negative_prompt": self.negative_prompt,
            "num_inference_steps": self.steps,
            "height": self.height,
            "width": self.width,
            "guidance_scale": self.guidance_scale,
        }

    def call_arguments(self, accepted: set[str], defaults: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments for a pipeline's call.

        Raises:
            ConfigError: something was asked for that this pipeline has no argument for.
        """
        arguments = {k: v for k, v in defaults.items() if k in accepted}
        for name, value in self.words().items():
            if value is None:
                continue
            if name not in accepted:
                raise ConfigError(name, value, "what this pipeline's call takes: " + ", ".join(sorted(accepted)))
            arguments[name] = value
        arguments["generator"] = torch.Generator("cpu").manual_seed(self.seed)
        return arguments


def generate_image(
    model: Path,
    request: Request,
    *,
    config: str | None = None,
    memory: str | None = None,
    enable_cpu_offload: bool = False,
    enable_layerwise_offload: bool = False,
    device: str | None = None,
    dtype: str = "auto",
) -> tuple[Any, Report | None]:
    """Loads `model`, offloads it as configured and draws one picture.

    Without any offload word the pipeline runs as it is, wholly on the device.

    Returns:
        The picture (PIL) and the offload's report, None where nothing was offloaded.

    Raises:
        ConfigError: a word, an argument or the dtype is not accepted.
        OffloadError: the device is not there.
        CheckpointError: the folder is not a diffusers checkpoint, or not a whole one.
        NotSupportedError: it makes videos.
        GreenroomError: the pipeline does not accept the request.
    """
    wanted = config is not None or memory is not None or enable_cpu_offload or enable_layerwise_offload
    # Every word is read, and the device found, before gigabytes are.
    parsed = parse_config(
        config,
        memory=memory,
        enable_cpu_offload=enable_cpu_offload,
        enable_layerwise_offload=enable_layerwise_offload,
    )
    check_numbers({**request.words(), "seed": request.seed})
    place = find_device(device)
    if device is not None:
        place = Accelerator.of(place).device
    check_dtype(dtype)
    loaded = load_checkpoint(str(model), dtype=dtype)
    pipe = loaded.pipeline
    accepted = set(inspect.signature(type(pipe).__call__).parameters) - {"self"}
    if "num_frames" in accepted:
        raise NotSupportedError(f"{type(pipe).__name__} makes videos, which `Omni` and `greenroom serve` return")
    call = request.call_arguments(accepted, loaded.recommended)
    check_numbers(request.words(), grain_of(pipe, call))
    if not wanted:
        return _draw(pipe.to(place), call), None
    handle = offload(pipe, parsed, device=place)
    picture = _draw(pipe, call)
    return picture, handle.report()


def _draw(pipe: Any, call: dict[str, Any]) -> Any:
    try:
        return pipe(**call).images[0]
    except GreenroomError:
        raise
    except ValueError as error:  # what diffusers' pipelines check their inputs with
        raise GreenroomError(f"the pipeline refused the request: {error}") from error
