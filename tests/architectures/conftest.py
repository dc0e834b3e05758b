"""Keeps the outcome of each cell of the matrix, for the support table of the README."""

from __future__ import annotations

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
    # A setup or a teardown that fails is a result as well: a test without a call is no success.
    counts = report.failed or (report.when == "call" and not report.skipped)
    if "matrix_cell" in item.fixturenames and counts:
        params = item.callspec.params
        row = CELLS.setdefault(params["name"], {}).setdefault(params["way"], {})
        row[params["dtype"]] = "exact" if report.passed else "failed"
    return report


@pytest.fixture
def matrix_cell() -> None:
    """Marks a test whose outcome is a cell of the support table."""


def pytest_sessionfinish(session: pytest.Session) -> None:
    if CELLS:
        OUT.parent.mkdir(exist_ok=True)
        OUT.write_text(json.dumps(CELLS, indent=1, sort_keys=True) + "\n")
