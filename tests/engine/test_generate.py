"""`greenroom generate`: a picture or a video in a file; what cannot be drawn is said in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from greenroom import Omni
from greenroom.cli import app
from greenroom.demo import checkpoint_path
from greenroom.engine.media import write_video


def told_by(*words: Any) -> str:
    run = CliRunner().invoke(app, ["generate", *map(str, words)])
    assert run.exit_code == 2 and isinstance(run.exception, SystemExit), run.exception
    (line,) = [text for text in run.output.splitlines() if text.startswith("error:")]
    return line


@pytest.mark.parametrize("offloaded", [(), ("--enable-layerwise-offload",)])
def test_what_the_pipeline_does_not_accept(
    emu: Any, offloaded: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **words: Any) -> None:
        raise ValueError("`prompt` is odd")

    monkeypatch.setattr(diffusers.FluxPipeline, "check_inputs", refuse)
    out = tmp_path / "out.png"
    told = told_by(checkpoint_path(), "--prompt", "a seven", "--device", "emu", "-o", out, *offloaded)
    assert told == "error: the pipeline refused the request: `prompt` is odd"
    assert not out.exists()


@pytest.mark.parametrize(
    ("model", "name", "words", "told"),
    [
        ("wan22_t2v", "x.png", (), "accepted: a name that ends in .mp4, since WanPipeline makes videos; of 1 frame"),
        ("wan22_t2v", "x.png", ("--frames", 2), "accepted: a name that ends in .mp4"),
        ("wan22_t2v", "x.avi", ("--frames", 1), "accepted: a name that ends in .mp4"),
        ("demo", "x.mp4", (), "accepted: a name that ends in .png, .jpg, .webp or so, since FluxPipeline draws"),
        ("demo", "x.mpg", (), "accepted: a name that ends in .png"),
        ("demo", "x", (), "accepted: a name that ends in .png"),
        ("demo", "no/x.png", (), "accepted: a file that can be written, in a folder that exists"),
        ("demo", "x.png", ("--frames", 2), "--frames = 2 is not accepted; accepted: nothing, since FluxPipeline draws"),
        ("demo", "x.png", ("--prompt", " "), "prompt is empty"),
        ("demo", "x.png", ("--device", "emu1"), "device: 'emu1' is not a device"),
        ("demo", "x.png", ("--steps", 10**12), "--steps = 1000000000000 is not accepted; accepted: a whole number"),
    ],
)
def test_what_is_refused_before_anything_is_loaded(
    model: str, name: str, words: Any, told: str, checkpoints: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*args: Any, **words: Any) -> None:
        raise AssertionError("it was loaded")

    monkeypatch.setattr("greenroom.engine.omni.load_checkpoint", loaded)
    out = tmp_path / name
    assert told in told_by(checkpoints[model], "--prompt", "a seven", "--device", "cpu", "-o", out, *words)
    assert not list(tmp_path.iterdir())


def test_a_folder_is_no_file(checkpoints: Any, tmp_path: Path) -> None:
    (tmp_path / "x.png").mkdir()
    told = told_by(checkpoints["demo"], "--prompt", "a seven", "-o", tmp_path / "x.png")
    assert "accepted: a file that can be written" in told


@pytest.mark.parametrize("offloaded", [(), ("--enable-layerwise-offload",), ("--memory-budget", "64MiB")])
def test_a_video(emu: Any, offloaded: tuple[str, ...], checkpoints: Any, tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    out = tmp_path / "x.mp4"
    words = ["--steps", 1, "--height", 32, "--width", 48, "--frames", 5, "--fps", 8, "--seed", 3, "--device", "emu"]
    line = ["generate", checkpoints["wan22_t2v"], "--prompt", "a red cube", "-o", out, *words, *offloaded]
    run = CliRunner().invoke(app, [*map(str, line)])
    assert run.exit_code == 0 and str(out) in run.output, run.output
    with av.open(str(out)) as video:
        (stream,) = video.streams.video
        assert stream.average_rate == 8 and [(f.width, f.height) for f in video.decode(stream)] == [(48, 32)] * 5
    params = {"num_inference_steps": 1, "height": 32, "width": 48, "num_frames": 5, "seed": 3}
    with Omni(checkpoints["wan22_t2v"], device="emu") as omni:
        (result,) = omni.generate("a red cube", params, progress=False)
    assert out.read_bytes() == write_video(result.frames, 8)


def test_one_frame_of_a_video_is_a_picture(checkpoints: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--steps", "1", "--height", "32", "--width", "48", "--frames", "1", "--device", "cpu"]
    for out in (["-o", "x.png"], []):
        line = ["generate", str(checkpoints["wan22_t2v"]), "--prompt", "a red cube", *words, *out]
        assert CliRunner().invoke(app, line).exit_code == 0
    assert Image.open("x.png").size == (48, 32) and Path("out.mp4").stat().st_size


def test_a_picture(checkpoints: Any, tmp_path: Path) -> None:
    out = tmp_path / "x.png"
    line = ["generate", checkpoints["demo"], "--prompt", "a handwritten seven", "--device", "cpu", "-o", out]
    run = CliRunner().invoke(app, [*map(str, line)])
    assert run.exit_code == 0 and "not offloaded, on cpu" in run.output, run.output
    with Omni(checkpoints["demo"], device="cpu") as omni:
        (result,) = omni.generate("a handwritten seven", {"seed": 0}, progress=False)
    assert np.array_equal(np.asarray(Image.open(out)), np.asarray(result.images[0]))
