"""Shared fixtures. Any test may ask for ``emu``; nothing is built for tests that do not touch the emulator."""

from __future__ import annotations

import functools
import gc
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="session")
def emu_module() -> ModuleType:
    """``torch.emu``, registered once for the whole session."""
    import greenroom.emulator  # noqa: F401

    return torch.emu


@pytest.fixture(scope="session")
def load_script() -> Callable[[str], ModuleType]:
    """Loads a file of scripts/ by its name, as a module."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "scripts" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def _forget_models() -> None:
    """Models may be held, with tables on the device, by caches on their classes and by cycles."""
    for found in gc.get_objects():
        if type(found) is functools._lru_cache_wrapper and str(found.__module__).startswith("diffusers."):
            found.cache_clear()
    gc.collect()


@pytest.fixture
def forgotten_models() -> None:
    _forget_models()


_files: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def _device_is_empty_at_first(request: pytest.FixtureRequest) -> None:
    """No test file leaves anything on the device, so that no figure depends on the files that ran before; one that
    does is named in a warning.

    Looked at when the next file begins, because pytest keeps the fixtures of a test until the one after it.
    """
    before = _files[-1] if _files else "what came before the first test file"
    _files.append(str(request.path))
    if "greenroom.emulator" not in sys.modules:
        return
    _forget_models()
    left = [torch.emu.memory_allocated(index) for index in range(torch.emu.device_count())]
    if any(left):
        warnings.warn(f"{before} left bytes on the devices: {left}", stacklevel=1)


@pytest.fixture(autouse=True)
def _emulator_guard() -> Iterator[None]:
    """Each test starts from the same emulator with its bug finders on, and must leave no race behind.

    A test that plants a race takes its reports with ``race_reports()`` before it ends.
    """
    if "greenroom.emulator" not in sys.modules:
        yield
        return
    emu = torch.emu
    emu.reset()
    emu.set_poison(True)
    emu.set_race_check("raise")
    yield
    for index in range(emu.device_count()):
        emu.synchronize(index)
    assert emu.race_reports() == []


@pytest.fixture
def emu(emu_module: ModuleType, _emulator_guard: None) -> ModuleType:
    return emu_module
