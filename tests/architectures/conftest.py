"""Keeps the outcome of each cell of the matrix, for the support table of the README."""

from __future__ import annotations

import functools
import gc
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

OUT = Path(__file__).parents[2] / "out" / "support.json"
CELLS: dict[str, dict[str, dict[str, str]]] = {}
"""architecture -> way of offloading -> dtype -> "exact" or "failed"."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if "matrix_cell" in item.fixturenames and report.when == "call" and not report.skipped:
        params = item.callspec.params
        row = CELLS.setdefault(params["name"], {}).setdefault(params["way"], {})
        row[params["dtype"]] = "exact" if report.passed else "failed"
    return report


@pytest.fixture
def forgotten_models() -> None:
    """Some models are kept alive, with tables on the device, by caches on their classes."""
    for found in gc.get_objects():
        if isinstance(found, functools._lru_cache_wrapper) and str(found.__module__).startswith("diffusers."):
            found.cache_clear()
    gc.collect()


@pytest.fixture
def matrix_cell() -> None:
    """Marks a test whose outcome is a cell of the support table."""


def pytest_sessionfinish(session: pytest.Session) -> None:
    if CELLS:
        OUT.parent.mkdir(exist_ok=True)
        OUT.write_text(json.dumps(CELLS, indent=1, sort_keys=True) + "\n")
