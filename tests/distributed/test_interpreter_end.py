"""The end of a rank's process, where threads of C++ that want the interpreter's lock would abort it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

import launch


@pytest.mark.parametrize("how", ["disabled", "enabled"])
def test_ends_at_once(emu_module: ModuleType, tmp_path: Path, how: str) -> None:
    compiler = shutil.which("c++")
    assert compiler is not None  # the emulator was built with it
    library = tmp_path / "slow_lock.so"
    source = Path(__file__).with_name("slow_lock.cpp")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    launch.run("ends_at_once.py", 2, how, folder=tmp_path, env={"LD_PRELOAD": str(library)})
