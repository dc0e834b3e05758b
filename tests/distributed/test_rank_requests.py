"""Ranks run what they like: the gathers stay in step."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

import launch

SCRIPT = "ranks.py"


@pytest.mark.parametrize(
    ("size", "first", "count"),
    [(2, 0, 20), *(pytest.param(n, f, 30, marks=pytest.mark.slow) for n in (2, 4) for f in (100, 200))],
)
def test_random_mixes(emu_module: ModuleType, tmp_path: Path, size: int, first: int, count: int) -> None:
    """Steps, guidance, shapes, skipped and shuffled blocks, cancelled and failing requests, ranks without any."""
    done = launch.run(SCRIPT, size, "mixes", str(first), str(count), folder=tmp_path, seconds=280)
    assert sum(done) > count / 2


def test_one_rank_alone(emu_module: ModuleType, tmp_path: Path) -> None:
    """A rank without a request takes part in the passes, and reaches the end of its program first."""
    busy, idle = launch.run(SCRIPT, 2, "one_alone", folder=tmp_path)
    assert busy["passes"] == idle["passes"] > 0
    assert busy["joined"] == 0 and idle["joined"] == idle["passes"]


def test_an_offload_that_outlives_its_process_group(emu_module: ModuleType, tmp_path: Path) -> None:
    launch.run(SCRIPT, 2, "forgets_to_disable", folder=tmp_path)


def test_groups_end_with_their_offload(emu_module: ModuleType, tmp_path: Path) -> None:
    for seen in launch.run(SCRIPT, 2, "come_and_go", folder=tmp_path):
        threads, files = zip(*seen, strict=True)
        assert set(threads) == {threads[0]}
        assert max(files) <= files[0] + 2  # six pairs of groups would be dozens


def test_an_order_that_differs_from_the_declared_one(emu_module: ModuleType, tmp_path: Path) -> None:
    first, second = launch.run(SCRIPT, 2, "another_order", folder=tmp_path)
    assert first[0] > 0 and len(set(first)) == 1
    assert set(second) == {0}


@pytest.mark.slow
def test_ranks_in_two_groups(emu_module: ModuleType, tmp_path: Path) -> None:
    assert launch.run(SCRIPT, 4, "groups_of_two", folder=tmp_path) == [[0, 2], [1, 2], [0, 2], [1, 2]]
