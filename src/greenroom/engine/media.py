"""Pictures and videos in and out: read within limits, written without loss or as MP4.

Note [A picture is a program for its decoder]
    Sizes are read from the header and held against the limits before pixels are decoded; formats are a short list;
    nothing is fetched from a network unless the operator allowed it.
"""

from __future__ import annotations

import base64
import binascii
import io
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from greenroom.engine.errors import RequestRefused

_KINDS = (
    "a PIL image, a path, the bytes of a file, base64 text, an array (height, width, 3) or a tensor (3, height, width) "
    "of uint8 or of floats from 0 to 1"
)
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
OUTPUT_FORMATS = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}


# x264's macroblock tree reads memory that it has not written where frames are small, and chooses by it.
_X264 = {"crf": "16", "threads": "1", "x264-params": "mbtree=0"}


@dataclass(frozen=True)
class MediaLimits:
    """The largest input that is read: bytes of a file, pixels of a picture."""

    max_bytes: int = 32 * 2**20
    max_pixels: int = 4096 * 4096


Picture: TypeAlias = bytes | str | Image.Image | np.ndarray | torch.Tensor


def read_image(data: Picture, limits: MediaLimits | None = None, field: str = "image") -> Image.Image:
    """A picture as RGB, turned upright.

    Args:
        data: a picture, the bytes of a file, or its base64 text or data URL; or its pixels, as an array of shape
            (height, width, 3) or a tensor of shape (3, height, width), alone or as a batch of one: uint8, or floats
            from 0 to 1, which are rounded to 8 bits.
        limits: sizes that are refused beyond.
        field: the name to give in the error.

    Raises:
        RequestRefused: not a picture, or too large.
    """
    limits = limits or MediaLimits()
    if isinstance(data, Image.Image):
        return data.convert("RGB")
    if isinstance(data, np.ndarray | torch.Tensor):
        return _from_pixels(data, limits, field)
    if isinstance(data, str):
        data = _decode_text(data, field)
    if not isinstance(data, bytes | bytearray | memoryview):
        raise RequestRefused(field, f"{field} = {data!r:.100} is not accepted; accepted: {_KINDS}")
    if len(data) > limits.max_bytes:
        raise RequestRefused(field, f"{field} has {len(data)} bytes; accepted: at most {limits.max_bytes}")
    try:
        picture = Image.open(io.BytesIO(data), formats=IMAGE_FORMATS)
        if picture.width * picture.height > limits.max_pixels:
            size = f"{picture.width}x{picture.height} pixels"
            raise RequestRefused(field, f"{field} has {size}; accepted: at most {limits.max_pixels} pixels")
        picture.load()
        upright = ImageOps.exif_transpose(picture)
        return (upright or picture).convert("RGB")
    except RequestRefused:
        raise
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        accepted = ", ".join(IMAGE_FORMATS)
        # Where it knows no format, Pillow tells of the object that it read from, and no more.
        why = "" if isinstance(error, UnidentifiedImageError) else f" ({error})"
        raise RequestRefused(field, f"{field} is not a picture that can be read{why}; accepted: {accepted}") from None


def _from_pixels(pixels: np.ndarray | torch.Tensor, limits: MediaLimits, field: str) -> Image.Image:
    kind = "a tensor" if isinstance(pixels, torch.Tensor) else "an array"
    shape, dtype = tuple(pixels.shape), str(pixels.dtype).removeprefix("torch.")
    one = pixels[0] if len(shape) == 4 and shape[0] == 1 else pixels
    if isinstance(one, torch.Tensor):
        values = one.detach().cpu()
        # NumPy has no bfloat16.
        array = (values.float() if values.is_floating_point() else values).numpy()
        array = array.transpose(1, 2, 0) if array.ndim == 3 else array
    else:
        array = one
    if array.ndim != 3 or array.shape[2] != 3 or not array.size:
        raise RequestRefused(field, f"{field} is {kind} of shape {shape}; accepted: {_KINDS}")
    height, width = array.shape[:2]
    if width * height > limits.max_pixels:
        raise RequestRefused(
            field, f"{field} has {width}x{height} pixels; accepted: at most {limits.max_pixels} pixels"
        )
    if array.dtype != np.uint8 and not np.issubdtype(array.dtype, np.floating):
        raise RequestRefused(field, f"{field} is {kind} of {dtype}; accepted: {_KINDS}")
    if array.dtype != np.uint8 and not (array.min() >= 0 and array.max() <= 1):  # no comparison with NaN holds
        raise RequestRefused(field, f"{field} holds values outside 0 to 1; accepted: {_KINDS}")
    return as_picture(array)


def _decode_text(text: str, field: str) -> bytes:
    if text.startswith(("http://", "https://", "ftp://", "file:")):
        raise RequestRefused(field, f"{field} is a URL, and URLs are not fetched; send the file, or base64 text")
    if text.startswith("data:"):
        _, _, text = text.partition(",")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise RequestRefused(
            field, f"{field} is not base64 text; accepted: a file, base64 text or a data URL"
        ) from None


def write_image(picture: Image.Image, format: str = "png", quality: int = 95) -> bytes:
    """A picture as a file; "png" keeps every bit.

    Raises:
        RequestRefused: the format is not one of `OUTPUT_FORMATS`.
    """
    if format not in OUTPUT_FORMATS:
        raise RequestRefused("output_format", f"output_format = {format!r}; accepted: {', '.join(OUTPUT_FORMATS)}")
    out = io.BytesIO()
    arguments = {} if format == "png" else {"quality": quality}
    picture.save(out, format=format.upper(), **arguments)
    return out.getvalue()


def find_av() -> Any:
    """The module of PyAV.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import av
    except ImportError as error:
        raise ImportError("writing videos needs PyAV: pip install 'greenroom[serve]'") from error
    return av


def write_video(frames: Sequence[Any], fps: int = 16) -> bytes:
    """Frames as an H.264 MP4 (yuv420p, or yuv444p for odd sizes); the same frames give the same bytes.

    Args:
        frames: PIL images or (height, width, 3) arrays, uint8 or floats from 0 to 1.
        fps: frames per second.

    Raises:
        ImportError: PyAV is not installed.
    """
    av = find_av()
    arrays = [as_pixels(f) for f in frames]
    height, width = arrays[0].shape[:2]
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=Fraction(fps), options=_X264)
        stream.width, stream.height = width, height
        stream.pix_fmt = "yuv420p" if width % 2 == 0 and height % 2 == 0 else "yuv444p"
        for i, array in enumerate(arrays):
            frame = av.VideoFrame.from_ndarray(array, format="rgb24").reformat(format=stream.pix_fmt)
            # Without times of its own the encoder's rate control reads what happens to lie there.
            frame.pts, frame.time_base = i, 1 / Fraction(fps)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return out.getvalue()


def write_frames(frames: Sequence[Any]) -> bytes:
    """Frames as a zip of PNG files, without loss."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for i, frame in enumerate(frames):
            archive.writestr(zipfile.ZipInfo(f"{i:05}.png"), write_image(as_picture(frame)))
    return out.getvalue()


def as_pixels(frame: Any) -> np.ndarray:
    """A frame as (height, width, 3) uint8."""
    array = np.asarray(frame.convert("RGB") if isinstance(frame, Image.Image) else frame)
    if array.dtype != np.uint8:
        array = (np.clip(array, 0, 1) * 255).round().astype(np.uint8)
    return np.ascontiguousarray(array)


def as_picture(frame: Any) -> Image.Image:
    return frame if isinstance(frame, Image.Image) else Image.fromarray(as_pixels(frame))
