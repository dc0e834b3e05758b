"""Compiles the emulator's C++ on first use and loads it.

The result lives in a per-user cache, in a folder named by everything it depends on (sources, torch, python,
compiler flags), so a changed source or another torch can never load a stale library, and two checkouts with
equal sources share one.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shlex
import shutil
import sys
import sysconfig
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

MODULE_NAME = "greenroom_emulator"
SUPPORTED_TORCH = ("2.13",)
"""The emulator leans on torch's internal C++ interfaces, which move between minor versions: each is named here
only once the tests have passed on it."""

_CSRC = Path(__file__).with_name("csrc")
_CFLAGS = ["-O2", "-g0", "-std=c++20", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO", "-Wno-deprecated"]


class EmulatorUnavailableError(ImportError):
    """The emulated accelerator cannot be built here; the message says what is missing."""


def cache_folder() -> Path:
    """The folder of this build: ``$XDG_CACHE_HOME/greenroom/emulator/<hash>`` (default ``~/.cache``)."""
    digest = hashlib.sha256()
    for path in sorted(_CSRC.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for fact in (torch.__version__, sys.version, sysconfig.get_platform(), *_CFLAGS):
        digest.update(fact.encode() + b"\0")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "greenroom" / "emulator" / digest.hexdigest()[:16]


def check_prerequisites() -> None:
    """Raises :class:`EmulatorUnavailableError` naming the first thing that is missing to build or load."""
    version = torch.__version__.split("+")[0]
    if version.rpartition(".")[0] not in SUPPORTED_TORCH:
        raise EmulatorUnavailableError(
            f"greenroom.emulator: torch {torch.__version__} is not supported; supported: "
            + ", ".join(f"{v}.*" for v in SUPPORTED_TORCH)
        )
    if not sys.platform.startswith("linux"):
        raise EmulatorUnavailableError(f"greenroom.emulator: needs Linux, this is {sys.platform}")


def _check_build_tools() -> None:
    compiler = shlex.split(os.environ.get("CXX", "c++"))[0]
    if shutil.which(compiler) is None:
        raise EmulatorUnavailableError(
            f"greenroom.emulator: no C++ compiler ({compiler!r} is not on PATH); install g++ or clang with "
            "C++20, or name one in the environment variable CXX"
        )
    if shutil.which("ninja") is None:
        raise EmulatorUnavailableError(
            "greenroom.emulator: ninja is not on PATH; install it with `pip install 'greenroom[emulator]'`"
        )


def _compile(folder: Path, library: Path) -> ModuleType:
    # The ninja wheel puts its program beside python, which is not on PATH when the venv is not activated.
    scripts = str(Path(sys.executable).parent)
    if scripts not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.environ.get("PATH", "") + os.pathsep + scripts
    _check_build_tools()
    from torch.utils import cpp_extension

    for leftover in folder.glob("build-*"):  # of a process that was killed: nobody else builds, we hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    os.environ.setdefault("MAX_JOBS", "2")  # each unit of torch's headers takes about 2 GiB to compile
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as scratch:
        print("greenroom.emulator: compiling (about a minute, once)", file=sys.stderr, flush=True)
        try:
            module = cpp_extension.load(
                MODULE_NAME,
                [str(path) for path in sorted(_CSRC.glob("*.cpp"))],
                extra_cflags=_CFLAGS,
                build_directory=scratch,
                verbose=bool(os.environ.get("GREENROOM_EMULATOR_VERBOSE")),
            )
        except (RuntimeError, OSError, ImportError) as error:
            raise EmulatorUnavailableError(f"greenroom.emulator: the build failed:\n{error}") from error
        # Renaming within one file system is atomic: another process sees the whole library or none.
        os.replace(Path(scratch) / library.name, library)
    return module


@cache
def load_extension() -> ModuleType:
    """Builds the library if this user's cache lacks it, and returns the extension module.

    Raises :class:`EmulatorUnavailableError` when it cannot be built. Processes that build at the same time wait
    for the first one on a lock that the kernel drops if its holder dies.
    """
    check_prerequisites()
    folder = cache_folder()
    library = folder / f"{MODULE_NAME}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                return _compile(folder, library)
    spec = importlib.util.spec_from_file_location(MODULE_NAME, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
