"""One picture or video from a checkpoint, into a file."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from PIL import Image

from greenroom.bounds import check_numbers
from greenroom.engine import Omni, OmniDiffusionSamplingParams
from greenroom.engine.facts import draws_videos
from greenroom.engine.media import as_picture, find_av, write_video
from greenroom.engine.sampling import check_prompt
from greenroom.errors import ConfigError
from greenroom.loading import locate, pipeline_class, read_index

VIDEO = ".mp4"
_PICTURES = ".png, .jpg, .webp or so"


def generate_file(
    model: str,
    prompt: str,
    params: OmniDiffusionSamplingParams,
    output: Path | None = None,
    *,
    fps: int = 16,
    **words: Any,
) -> tuple[Path, str]:
    """Loads `model`, offloads it as configured and draws one picture, or one video, into a file.

    Args:
        model: a diffusers folder or a hub id.
        prompt: what to draw.
        params: how to sample. A model that makes videos draws a picture where `num_frames` is 1.
        output: the file; its suffix must be one of what the model makes. None for `out.png` or `out.mp4`.
        fps: frames per second of a video.
        **words: as for `Omni`.

    Returns:
        The file, and the offload's report.

    Raises:
        ConfigError: a word, a number or the file is not accepted; of a folder, before anything is loaded.
        ImportError: what writes videos is not installed.
        Exception: as `Omni` and `Omni.generate`.
    """
    check_numbers(vars(params))
    check_prompt(prompt)
    # What the hub has is downloaded when all words were read.
    kind = pipeline_class(read_index(locate(model))) if Path(model).expanduser().is_dir() else None
    if kind is not None:
        output = _checked(output, kind.__name__, draws_videos(kind), params.num_frames)
    with Omni(model, **words) as omni:
        facts = omni.facts
        output = _checked(output, facts.pipeline, facts.makes_videos, params.num_frames)
        (result,) = omni.generate(prompt, params)
        report = omni.report()
    if output.suffix.lower() == VIDEO:
        output.write_bytes(write_video(result.frames, fps))
    else:
        as_picture((result.frames if facts.makes_videos else result.images)[0]).save(output)
    return output, str(report) if report is not None else f"not offloaded, on {omni.device}"


def _checked(output: Path | None, pipeline: str, videos: bool, frames: int | None) -> Path:
    """Where to write what a pipeline makes."""
    if not videos and frames is not None:
        raise ConfigError("num_frames", frames, f"nothing, since {pipeline} draws pictures")
    if output is None:
        output = Path("out" + (VIDEO if videos else ".png"))
    suffix = output.suffix.lower()
    if videos:
        good = suffix == VIDEO or (frames == 1 and _writes_pictures(suffix))
        accepted = f"a name that ends in {VIDEO}, since {pipeline} makes videos; of 1 frame also in {_PICTURES}"
    else:
        good = _writes_pictures(suffix)
        accepted = f"a name that ends in {_PICTURES}, since {pipeline} draws pictures"
    if not good:
        raise ConfigError("output", str(output), accepted)
    there = output if output.exists() else output.parent
    if output.is_dir() or not (output.parent.is_dir() and os.access(there, os.W_OK)):
        raise ConfigError("output", str(output), "a file that can be written, in a folder that exists")
    if suffix == VIDEO:
        find_av()
    return output


def _writes_pictures(suffix: str) -> bool:
    """Asked of the encoder itself: some formats are only read, or hold no colours."""
    try:
        Image.new("RGB", (1, 1)).save(io.BytesIO(), Image.registered_extensions()[suffix])
    except (KeyError, OSError, ValueError):
        return False
    return True
