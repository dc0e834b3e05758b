"""`greenroom generate`: what cannot be drawn is said in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
from typer.testing import CliRunner

from greenroom import testing
from greenroom.cli import app
from greenroom.demo import checkpoint_path


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


def test_a_model_that_makes_videos(tmp_path: Path) -> None:
    with testing.quiet():
        testing.build_pipeline("wan22_t2v").save_pretrained(tmp_path / "wan")
    told = told_by(tmp_path / "wan", "--prompt", "a red cube", "--device", "cpu", "-o", tmp_path / "out.png")
    assert "WanPipeline makes videos" in told
