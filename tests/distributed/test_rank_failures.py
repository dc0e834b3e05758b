"""A rank that fails, disagrees or is gone is an error on every rank within a set time; never a hang."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from types import ModuleType

import pytest

import launch

SCRIPT = "ranks.py"
TIMEOUT = 6


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_failing_starts(emu_module: ModuleType, tmp_path: Path, size: int) -> None:
    launch.run(SCRIPT, size, "failing_starts", folder=tmp_path, seconds=200)


def test_a_copy_or_an_allocation_fails(emu_module: ModuleType, tmp_path: Path) -> None:
    """Anywhere in the calls of one rank: the other does not notice."""
    first, last = launch.run(SCRIPT, 2, "injected", "10", folder=tmp_path)
    assert set(first) == {"made"} and len(first) == 20
    assert "failed" in last


def test_a_rank_that_never_comes(emu_module: ModuleType, tmp_path: Path) -> None:
    found = launch.run(SCRIPT, 2, "absent", folder=tmp_path, env={"GREENROOM_RANKS_TIMEOUT": "3"})
    assert "GREENROOM_RANKS_TIMEOUT" in found[0]


def test_a_gather_that_fails_after_the_forwards(emu_module: ModuleType, tmp_path: Path) -> None:
    """The host is past the last forward when it becomes known: the call fails all the same, on that rank alone."""
    made, failed = launch.run(SCRIPT, 2, "fails_late", folder=tmp_path)
    assert made == "made" and "connection closed" in failed


def random_points() -> list[object]:
    dice = random.Random(0)
    points = []
    for i in range(20):
        how = ("kill", "exit", "segv", "stop")[i % 4]
        size = 4 if i % 5 == 4 else 2
        points.append(pytest.param(how, dice.randrange(1, 60), size, marks=pytest.mark.slow if i else ()))
    return points


@pytest.mark.parametrize(("how", "after", "size"), random_points())
def test_a_rank_is_lost(emu_module: ModuleType, tmp_path: Path, how: str, after: int, size: int) -> None:
    """In the middle of a block: the others raise, can disable the offload, and end."""
    env = {"GREENROOM_RANKS_TIMEOUT": str(TIMEOUT)}
    started = launch.Started(SCRIPT, size, "lost", how, str(after), folder=tmp_path, env=env)
    last = size - 1
    try:
        started.wait_for(last, "ending")
        for rank in range(last):
            started.processes[rank].wait(30)  # of being told that the rank is lost, and of ending in order
    finally:
        started.kill(last)
        ended = started.end()
    assert [e.code for e in ended[:last]] == [0] * last, ended[0].text
    assert (
        ended[last].code == {"kill": -signal.SIGKILL, "stop": -signal.SIGKILL, "segv": -signal.SIGSEGV, "exit": 3}[how]
    )
    for survivor in ended[:last]:
        error, broken = survivor.result
        assert "rank" in error or "gather" in error
        assert broken
