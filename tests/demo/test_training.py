"""The training script runs from nothing to a checkpoint that reloads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from diffusers import DiffusionPipeline, FluxPipeline

from greenroom.demo import CALL_KWARGS

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train_demo.py"


def train(out: Path) -> FluxPipeline:
    command = [sys.executable, str(SCRIPT), "--out", str(out), "--threads", "1", "--evaluate", "0"]
    steps = ["--steps", "2", "--vae-steps", "2", "--reading-steps", "2", "--distil-steps", "2"]
    done = subprocess.run(
        [*command, *steps], capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    return DiffusionPipeline.from_pretrained(out)


def test_two_steps_twice_give_the_same_working_pipeline(tmp_path: Path) -> None:
    first, second = train(tmp_path / "first"), train(tmp_path / "second")
    for name in ("transformer", "text_encoder", "text_encoder_2", "vae"):
        ours, theirs = getattr(first, name).state_dict(), getattr(second, name).state_dict()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours), name
    first.set_progress_bar_config(disable=True)
    with torch.no_grad():
        image = first("a seven", **CALL_KWARGS).images[0]
    assert image.size == (CALL_KWARGS["width"], CALL_KWARGS["height"])
