"""Keeps the outcome of each cell of the matrix, for the support table of the README."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

import cells

CELLS: dict[str, dict[str, dict[str, str]]] = {}
"""architecture -> way of offloading -> dtype -> "exact" or "failed"."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if cells.counts(item, report, "matrix_cell"):
        params = item.callspec.params
        row = CELLS.setdefault(params["name"], {}).setdefault(params["way"], {})
        row[params["dtype"]] = "exact" if report.passed else "failed"
    return report


@pytest.fixture
def matrix_cell() -> None:
    """Marks a test whose outcome is a cell of the support table."""


def pytest_sessionfinish(session: pytest.Session) -> None:
    cells.keep("support", CELLS)
