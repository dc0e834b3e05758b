"""Pictures and videos in and out."""

from __future__ import annotations

import base64
import ctypes
import io
import random
import sys
import threading
import warnings
import zipfile
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from greenroom.engine import RequestRefused
from greenroom.engine.media import MediaLimits, as_pixels, read_image, write_frames, write_image, write_video


def picture(width: int = 12, height: int = 8, seed: int = 0) -> Image.Image:
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8))


def test_png_and_frames_keep_every_bit() -> None:
    original = picture()
    assert np.array_equal(as_pixels(read_image(write_image(original))), as_pixels(original))
    frames = [picture(seed=i) for i in range(3)]
    archive = zipfile.ZipFile(io.BytesIO(write_frames(frames)))
    for name, frame in zip(archive.namelist(), frames, strict=True):
        assert np.array_equal(as_pixels(Image.open(archive.open(name))), as_pixels(frame))


def test_base64_and_data_urls_are_read() -> None:
    data = write_image(picture())
    text = base64.b64encode(data).decode()
    for given in (data, text, f"data:image/png;base64,{text}", picture()):
        assert np.array_equal(as_pixels(read_image(given)), as_pixels(picture()))


def test_pixels_are_a_picture() -> None:
    pixels = as_pixels(picture())
    planes = torch.from_numpy(pixels.transpose(2, 0, 1).copy())
    for given in (pixels, pixels[None], pixels / 255, (pixels / 255).astype(np.float32), planes, planes[None]):
        assert np.array_equal(as_pixels(read_image(given)), pixels)
    assert np.array_equal(as_pixels(read_image(planes / 255)), pixels)
    white = torch.ones(3, 8, 12, dtype=torch.bfloat16, requires_grad=True)
    assert np.array_equal(as_pixels(read_image(white)), np.full((8, 12, 3), 255))


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (5, "mask = 5 is not accepted"),
        (object, "is not accepted"),
        (np.zeros((8, 12), np.uint8), r"mask is an array of shape \(8, 12\)"),
        (np.zeros((8, 12, 4), np.uint8), r"shape \(8, 12, 4\)"),
        (np.zeros((2, 8, 12, 3), np.uint8), r"shape \(2, 8, 12, 3\)"),
        (np.zeros((0, 12, 3), np.uint8), r"shape \(0, 12, 3\)"),
        (torch.zeros(8, 12, 3, dtype=torch.uint8), r"mask is a tensor of shape \(8, 12, 3\)"),
        (torch.zeros(3, 8, 12, dtype=torch.int64), "mask is a tensor of int64"),
        (np.full((8, 12, 3), 200.0), "mask holds values outside 0 to 1"),
        (np.full((8, 12, 3), np.nan), "mask holds values outside 0 to 1"),
        (np.full((8, 12, 3), "x"), "mask is an array of <U1"),
        (np.zeros((5000, 5000, 3), np.uint8), "mask has 5000x5000 pixels; accepted: at most"),
    ],
)
def test_what_are_no_pixels_is_refused_by_name(data: Any, told: str) -> None:
    with pytest.raises(RequestRefused, match=told) as refused:
        read_image(data, field="mask")
    assert refused.value.field == "mask" and "accepted: a" in str(refused.value)


@pytest.mark.parametrize("text", ["http://127.0.0.1/x.png", "https://example.com/x.png", "file:///etc/passwd"])
def test_urls_are_not_fetched(text: str) -> None:
    with pytest.raises(RequestRefused, match="not fetched"):
        read_image(text)


def test_what_is_too_large_is_refused_before_it_is_decoded() -> None:
    huge = io.BytesIO()
    Image.new("1", (12000, 12000)).save(huge, "PNG")  # 144 million pixels in a few kilobytes
    assert len(huge.getvalue()) < 200_000
    with pytest.raises(RequestRefused, match="12000x12000"):
        read_image(huge.getvalue())
    with pytest.raises(RequestRefused, match="bytes"):
        read_image(write_image(picture()), MediaLimits(max_bytes=20))


@pytest.mark.parametrize("data", [b"", b"not a picture", b"\x89PNG\r\n\x1a\n" + b"\0" * 40, "%%%", "data:,"])
def test_what_is_no_picture_is_refused_by_field(data: bytes | str) -> None:
    with pytest.raises(RequestRefused, match="mask") as refused:
        read_image(data, field="mask")
    assert refused.value.field == "mask"


def test_a_truncated_picture_is_refused() -> None:
    data = write_image(picture(200, 200))
    with pytest.raises(RequestRefused):
        read_image(data[: len(data) // 2])


@pytest.mark.parametrize("size", [(32, 16), (13, 7)])
def test_a_video_has_its_frames_and_is_repeatable(size: tuple[int, int]) -> None:
    av = pytest.importorskip("av")
    frames = [picture(*size, seed=i) for i in range(5)]
    data = write_video(frames, fps=8)
    assert data == write_video([as_pixels(f) for f in frames], fps=8)
    with av.open(io.BytesIO(data)) as container:
        read = [f.to_ndarray(format="rgb24") for f in container.decode(video=0)]
        assert container.streams.video[0].average_rate == 8
    assert len(read) == 5 and read[0].shape == (size[1], size[0], 3)


@pytest.mark.skipif(sys.platform != "linux", reason="fills the memory of glibc")
def test_a_video_does_not_depend_on_what_lay_in_memory() -> None:
    pytest.importorskip("av")
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    frames = [picture(32, 32, seed=i) for i in range(5)]
    seen = set()
    for i in range(40):
        rng = random.Random(i)
        places = []
        for _ in range(600):
            size = int(2 ** rng.uniform(6, 17))
            places.append(libc.malloc(size))
            ctypes.memset(places[-1], rng.choice((0, 1, 63, 127, 128, 255)), size)
        rng.shuffle(places)
        for place in places:
            libc.free(place)
        seen.add(write_video(frames))
    assert len(seen) == 1


def test_colours_survive_a_video() -> None:
    av = pytest.importorskip("av")
    for colour in ((255, 255, 255), (0, 0, 0), (200, 30, 60), (10, 180, 90), (20, 40, 220)):
        data = write_video([Image.new("RGB", (64, 64), colour)] * 3)
        with av.open(io.BytesIO(data)) as container:
            frame = next(container.decode(video=0)).to_ndarray(format="rgb24")
        assert np.abs(frame.astype(int) - np.array(colour)).max() <= 6, colour


def test_floats_become_bytes() -> None:
    assert as_pixels(np.array([[[0.0, 0.5, 2.0]]])).tolist() == [[[0, 128, 255]]]


def test_pictures_that_are_read_at_the_same_time_leave_the_filters_of_warnings_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data, opened = write_image(picture()), Image.open
    inside, leave = (threading.Event(), threading.Event()), (threading.Event(), threading.Event())
    turns = iter((0, 1))

    def slow(*args: Any, **words: Any) -> Any:
        turn = next(turns)
        inside[turn].set()
        assert leave[turn].wait(10)
        return opened(*args, **words)

    monkeypatch.setattr(Image, "open", slow)
    before = list(warnings.filters)
    readers = [threading.Thread(target=read_image, args=(data,)) for _ in range(2)]
    for reader, there in zip(readers, inside, strict=True):
        reader.start()
        assert there.wait(10)
    for reader, go in zip(readers, leave, strict=True):
        go.set()
        reader.join(10)
    assert list(warnings.filters) == before
