"""Keeps what became of each pipeline class, for docs/pipelines.md."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

import cells

FOUND: dict[str, dict[str, str]] = {}
"""pipeline class -> way -> "exact", "failed" or why it was refused."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if cells.counts(item, report, "sweep_cell"):
        params = item.callspec.params
        refused = dict(item.user_properties).get("refused")
        FOUND.setdefault(params["name"], {})[params["way"]] = (
            "failed" if report.failed else f"refused: {refused}" if refused else "exact"
        )
    return report


@pytest.fixture
def sweep_cell() -> None:
    """Marks a test whose outcome is a cell of the table."""


def pytest_sessionfinish(session: pytest.Session) -> None:
    cells.keep("pipelines", FOUND)
