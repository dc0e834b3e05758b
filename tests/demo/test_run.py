"""`greenroom demo`: what a person sees, what lies in the folder afterwards, and what it says where it cannot run."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from greenroom.cli import app
from greenroom.demo import DigitReader
from greenroom.demo.run import run


def shown(prompt: str, out: Path, device: str | None = None) -> tuple[int, str]:
    screen = io.StringIO()
    code = run(prompt, out, Console(file=screen, width=120), device)
    return code, screen.getvalue()


def test_shows_what_does_not_fit_fitting(emu: ModuleType, tmp_path: Path) -> None:
    capacity = emu.mem_get_info(0)[1]
    code, text = shown("a handwritten seven", tmp_path / "out")
    assert code == 0
    assert "OutOfMemoryError" in text
    assert "virtual time" in text
    rows = {name: line for line in text.splitlines() for name in ("model-level", "layerwise") if f"│ {name}" in line}
    peaks = {name: float(re.findall(r"([\d.]+) MB", line)[0]) for name, line in rows.items()}
    room = re.search(r"device has ([\d.]+) MB", " ".join(text.split()))
    need = re.search(r"with its work ([\d.]+) MB", " ".join(text.split()))
    assert room is not None and need is not None
    assert peaks["layerwise"] < peaks["model-level"] < float(room[1]) < float(need[1])
    assert all("yes" in line for line in rows.values())
    # The device is given back as it was found.
    assert emu.mem_get_info(0)[1] == capacity
    assert emu.memory_allocated(0) == 0


def test_leaves_pictures_for_people_and_a_plot(emu: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    code, text = shown("the digit 7, handwritten", out)
    assert code == 0
    small = [Image.open(out / f"{name}-32x32.png") for name in ("model-level", "layerwise")]
    large = [Image.open(out / f"{name}.png") for name in ("model-level", "layerwise")]
    assert np.array_equal(np.asarray(small[0]), np.asarray(small[1]))
    assert DigitReader().read([*small, *large]) == [7, 7, 7, 7]
    assert min(large[0].size) >= 256
    assert np.asarray(Image.open(out / "memory.png").convert("L")).std() > 10
    for path in out.glob("*.png"):
        if not path.stem.endswith("32x32"):
            assert str(path) in text


def test_an_empty_prompt_is_refused(tmp_path: Path) -> None:
    code, text = shown("  ", tmp_path / "out")
    assert code == 2
    assert "prompt is empty" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("device", ["cpu", "nowhere:0"])
def test_a_device_that_is_not_there_is_refused(device: str, tmp_path: Path) -> None:
    code, text = shown("seven", tmp_path / "out", device)
    assert code == 2
    assert f"device = '{device}' is not accepted; accepted: 'emu'" in text


def test_without_a_compiler_it_says_so_kindly(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from rich.console import Console; from greenroom.demo.run import run; "
        "sys.exit(run('seven', Path(sys.argv[1]), Console(width=120), 'emu'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "CXX": "no-such-compiler"},
    )
    assert done.returncode == 2, done.stderr
    assert "no-such-compiler" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_the_help_offers_no_device_that_is_refused(tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["demo", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert told.exit_code == 0
    line = next(line for line in told.output.splitlines() if "--device" in line)
    offered = set(re.findall(r"\b(cpu|cuda|xpu|npu|emu)\b", line.lower()))
    assert "emu" in offered and "cpu" not in offered
    run = CliRunner().invoke(app, ["demo", "seven", "--device", "cpu", "--out", str(tmp_path / "out")])
    assert run.exit_code == 2 and "device = 'cpu' is not accepted" in run.output
