"""Which sizes and numbers of frames a diffusers pipeline draws as they are asked for."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

# What pipelines call the side of a latent in pixels.
_SCALES = (
    "vae_scale_factor_spatial",
    "vae_spatial_compression_ratio",
    "vae_spatial_scale_factor",
    "vae_scale_factor",
    "movq_scale_factor",
)
# Latents to a grain, by class name without "Pipeline", where it is not what attributes say; 0: the scale once more.
_EXCEPTIONS: Mapping[str, int] = {
    "BriaFibo": 1,
    "DreamLite": 1,
    "DreamLiteMobile": 1,
    "QwenImage21": 2,
    "KandinskyV22": 0,
    "KandinskyV22Combined": 0,
    "KandinskyV22Controlnet": 0,
    "KandinskyV22Inpaint": 0,
}
# What pipelines call the frames that a latent stands for; the first frame has one of its own.
_FRAMES = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio", "vae_temporal_scale_factor")
# Class names begin so where frames come out by another rule: latents in pairs, segments, sections.
_OTHER_FRAMES = ("CogVideoX", "ConsisID", "Allegro", "Helios", "HunyuanVideoFramepack", "WanAnimate")


def grain_of(pipeline: Any, arguments: Mapping[str, Any] | None = None) -> int:
    """Pixels that height and width must be multiples of, or the pipeline refuses them or draws another size.

    The side of a latent times the latents of a patch. Pipelines that make patches themselves, whose model then has
    patches of one latent, say so by the factor of their image processor. 1 where nothing is known or needed: what is
    between two sizes is then left to the pipeline.

    Args:
        pipeline: only attributes are read.
        arguments: what its call is given; some pipelines draw the nearest size of a list and cut the picture to the
            size that was asked for, whatever that is, unless `use_resolution_binning` is False.
    """
    if _cuts_to_size(pipeline) and (arguments or {}).get("use_resolution_binning") is not False:
        return 1
    scale = _number(pipeline, *_SCALES) or 1
    latents = _EXCEPTIONS.get(type(pipeline).__name__.removesuffix("Pipeline"))
    if latents is not None:
        return scale * (latents or scale)
    model = getattr(pipeline, "transformer", None) or getattr(pipeline, "transformer_2", None)
    config = getattr(model, "config", None)
    patch = _number(config, "patch_size") or (2 if getattr(config, "downsample", False) else 1)
    processors = (getattr(pipeline, name, None) for name in ("image_processor", "video_processor"))
    factors = (_number(getattr(processor, "config", None), "vae_scale_factor") or 1 for processor in processors)
    return math.lcm(scale * patch, *factors)


def frame_grain_of(pipeline: Any) -> int:
    """Numbers of frames must be one more than a multiple of this, or the pipeline makes another number.

    1 where any number is made, or where nothing is known.

    Args:
        pipeline: only attributes are read.
    """
    if type(pipeline).__name__.startswith(_OTHER_FRAMES):
        return 1
    return _number(pipeline, *_FRAMES) or 1


def _number(owner: Any, *names: str) -> int | None:
    """The first whole number above 0 of these attributes; of (frames, height, width), the last."""
    for name in names:
        value = getattr(owner, name, None)
        side = value[-1] if isinstance(value, list | tuple) and value else value
        if isinstance(side, int) and side > 0:
            return side
    return None


def _cuts_to_size(pipeline: Any) -> bool:
    if "use_resolution_binning" not in inspect.signature(type(pipeline).__call__).parameters:
        return False
    processor = getattr(pipeline, "image_processor", None) or getattr(pipeline, "video_processor", None)
    return hasattr(processor, "resize_and_crop_tensor")
