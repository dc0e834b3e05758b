"""`python -m greenroom` is the command line."""

from __future__ import annotations

import subprocess
import sys


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "greenroom", "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "python -m greenroom" in done.stdout
    assert all(command in done.stdout for command in ("demo", "generate", "plan", "serve"))
