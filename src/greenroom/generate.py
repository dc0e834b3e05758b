"""One picture from a checkpoint on disk: load, offload, call, give back."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from greenroom.api import offload
from greenroom.config import parse_config
from greenroom.errors import ConfigError
from greenroom.handle import Report

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Recommended call arguments that a checkpoint may bring along, beside model_index.json.
DEFAULTS_FILE = "greenroom.json"


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

    def call_arguments(self, accepted: set[str], defaults: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments for a pipeline's call.

        Raises:
            ConfigError: something was asked for that this pipeline has no argument for.
        """
        asked = {
            "prompt": self.prompt,
            "negative_prompt": self.negative_prompt,
            "num_inference_steps": self.steps,
            "height": self.height,
            "width": self.width,
            "guidance_scale": self.guidance_scale,
        }
        arguments = {k: v for k, v in defaults.items() if k in accepted}
        for name, value in asked.items():
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
        OSError: the folder is not a diffusers checkpoint.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ConfigError("dtype", dtype, "auto, " + ", ".join(DTYPES))
    if not (model / "model_index.json").is_file():
        raise ConfigError("model", str(model), "a folder with a diffusers model_index.json")
    wanted = config is not None or memory is not None or enable_cpu_offload or enable_layerwise_offload
    if wanted:  # every word is read before gigabytes are
        parsed = parse_config(
            config,
            memory=memory,
            enable_cpu_offload=enable_cpu_offload,
            enable_layerwise_offload=enable_layerwise_offload,
        )
    place = _device(device)
    from diffusers import DiffusionPipeline

    pipe: Any = DiffusionPipeline.from_pretrained(model, torch_dtype=DTYPES.get(dtype, "auto"))
    accepted = set(inspect.signature(type(pipe).__call__).parameters) - {"self"}
    call = request.call_arguments(accepted, _recommended(model))
    report = None
    if wanted:
        handle = offload(pipe, parsed, device=place)
        picture = pipe(**call).images[0]
        report = handle.report()
    else:
        picture = pipe.to(place)(**call).images[0]
    return picture, report


def _device(device: str | None) -> str:
    if device is None:
        present = torch.accelerator.current_accelerator(check_available=True)
        return "cpu" if present is None else present.type
    if device.split(":")[0] == "emu":
        import greenroom.emulator  # noqa: F401 - registers the device
    return device


def _recommended(model: Path) -> dict[str, Any]:
    file = model / DEFAULTS_FILE
    return dict(json.loads(file.read_text()).get("call", {})) if file.is_file() else {}
