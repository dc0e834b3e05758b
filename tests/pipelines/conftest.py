"""Keeps what became of each pipeline class, for docs/pipelines.md."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

for folder in (Path(__file__).parents[1] / "usage", Path(__file__).parent):
    sys.path.insert(0, str(folder))

OUT = Path(__file__).parents[2] / "out" / "pipelines.json"
FOUND: dict[str, dict[str, str]] = {}
"""pipeline class -> way -> "exact", "failed" or why it was refused."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    # A setup or a teardown that fails is a result as well: a test without a call is no success.
    counts = report.failed or (report.when == "call" and not report.skipped)
    if "sweep_cell" in item.fixturenames and counts:
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
    if FOUND:
        OUT.parent.mkdir(exist_ok=True)
        OUT.write_text(json.dumps(FOUND, indent=1, sort_keys=True) + "\n")
