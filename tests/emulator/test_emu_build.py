"""Building on first use: what is missing is said clearly, and several processes may build at once."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

IMPORT = "import greenroom.emulator, torch; print(torch.ones(2, device='emu').sum().item())"


def run(code: str, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=500)


def last_line(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode != 0
    return result.stderr.strip().splitlines()[-1]


def test_no_compiler(tmp_path):
    message = last_line(run(IMPORT, tmp_path, CXX="/nowhere/c++"))
    assert "EmulatorUnavailableError" in message and "'/nowhere/c++'" in message and "C++20" in message


def test_no_ninja(tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    compiler = shutil.which("c++")
    assert compiler is not None
    (tools / "c++").symlink_to(compiler)
    # The ninja beside python is found without being on PATH, so python must seem to be elsewhere.
    code = "import sys; sys.executable = '/nowhere/python'; " + IMPORT
    message = last_line(run(code, tmp_path, PATH=str(tools)))
    assert "EmulatorUnavailableError" in message and "ninja" in message and "greenroom[emulator]" in message


def test_unsupported_torch(tmp_path):
    code = "import torch; torch.__version__ = '2.5.1+cpu'; import greenroom.emulator"
    message = last_line(run(code, tmp_path))
    assert "EmulatorUnavailableError" in message and "2.5.1+cpu" in message and "2.13.*" in message


def test_a_failed_build_says_why_and_leaves_nothing(tmp_path):
    failing = tmp_path / "c++"
    failing.write_text(
        '#!/bin/sh\ncase "$*" in *--version*) echo "g++ 13.2.0"; exit 0 ;; esac\necho "planted error" >&2; exit 1\n'
    )
    failing.chmod(0o755)
    result = run(IMPORT, tmp_path, CXX=str(failing))
    assert result.returncode != 0 and "EmulatorUnavailableError" in result.stderr and "planted error" in result.stderr
    assert not list(tmp_path.rglob("*.so")) and not list(tmp_path.rglob("build-*"))


def test_the_rest_of_greenroom_needs_no_emulator(tmp_path):
    result = run("import greenroom, sys; print('greenroom.emulator' in sys.modules)", tmp_path, CXX="/nowhere/c++")
    assert result.stdout.strip() == "False"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_two_processes_build_at_once(tmp_path):
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    both = [
        subprocess.Popen([sys.executable, "-c", IMPORT], env=env, stdout=pipe, stderr=pipe, text=True) for _ in range(2)
    ]
    outputs = [p.communicate(timeout=900) for p in both]
    assert [out.strip() for out, _ in outputs] == ["2.0", "2.0"]
    assert sum("compiling" in err for _, err in outputs) == 1
    assert len(list(tmp_path.rglob("*.so"))) == 1
