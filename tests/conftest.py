"""Shared fixtures. Any test may ask for ``emu``; nothing is built for tests that do not touch the emulator."""

from __future__ import annotations

import functools
import gc
import importlib.util
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

# Folders with modules that tests of other folders import as well.
for _folder in ("core", "usage", "pipelines", "serving"):
    sys.path.append(str(Path(__file__).with_name(_folder)))


@pytest.fixture(scope="session")
def emu_module() -> ModuleType:
    """``torch.emu``, registered once for the whole session."""
    import greenroom.emulator  # noqa: F401

    return torch.emu


@pytest.fixture
def without_garbage_collection() -> Iterator[None]:
    """What goes inside the test goes because nobody refers to it any more."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


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


class _Checkpoints(dict[str, Path]):
    """Folders by the name of a tiny pipeline (fp32), each saved when it is first asked for; "demo" is the demo's."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    def __missing__(self, name: str) -> Path:
        from greenroom import demo, testing

        self[name] = demo.checkpoint_path() if name == "demo" else self._root / name
        if name != "demo":
            with testing.quiet():
                testing.build_pipeline(name).save_pretrained(self[name])
        return self[name]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Checkpoints that tests read and never write; see `_Checkpoints`."""
    return _Checkpoints(tmp_path_factory.mktemp("checkpoints"))


def _forget_models() -> None:
    """Models may be held, with tables on the device, by caches on their classes and by cycles."""
    for found in gc.get_objects():
        if type(found) is functools._lru_cache_wrapper and str(found.__module__).startswith("diffusers."):
            found.cache_clear()
    gc.collect()


@pytest.fixture
def forgotten_models() -> None:
    _forget_models()


def _on_devices() -> list[int]:
    """Bytes on each emulated device."""
    if "greenroom.emulator" not in sys.modules:
        return []
    return [torch.emu.memory_allocated(index) for index in range(torch.emu.device_count())]


_at_first: list[tuple[bool, int]] = []
"""Of the file whose tests run: whether it found the devices empty, and how many tests had failed before it."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
    """No test file leaves anything on a device, so that no figure depends on the files that ran before.

    Looked at when all of a file's last test is gone: pytest keeps the values of its fixtures until its teardown is
    over. That test then fails in the name of its file; the next file cannot, whatever it finds. Nobody is blamed for
    what may be another's, nor for what the traceback of a failed test holds.
    """
    if not _at_first:
        _at_first.append((not any(_on_devices()), item.session.testsfailed))
    result = yield
    if nextitem is not None and nextitem.path == item.path:
        return result
    found_empty, failed_before = _at_first.pop()
    _forget_models()
    if not found_empty or item.session.testsfailed != failed_before:
        return result
    limit = time.monotonic() + 5
    while any(left := _on_devices()) and time.monotonic() < limit:
        time.sleep(0.1)  # a thread may take a moment to let go
        gc.collect()
    if any(left):
        told = f"{item.path.name} leaves bytes on the devices: {left}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", told, "teardown")
        item.ihook.pytest_runtest_logreport(report=report)
    return result


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
