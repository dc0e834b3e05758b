"""Outcomes of tests that are the cells of a table; written to out/, for the scripts that make the tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

OUT = Path(__file__).parents[1] / "out"


def counts(item: pytest.Item, report: pytest.TestReport, marker: str) -> bool:
    """Whether this is the outcome of a test that asks for the fixture `marker`.

    A setup or a teardown that fails is one as well: a test without a call is no success.
    """
    if marker not in getattr(item, "fixturenames", ()):
        return False
    return report.failed or (report.when == "call" and not report.skipped)


def keep(name: str, cells: dict[str, Any]) -> None:
    """Writes out/`name`.json; nothing where no such test ran."""
    if cells:
        OUT.mkdir(exist_ok=True)
        (OUT / f"{name}.json").write_text(json.dumps(cells, indent=1, sort_keys=True) + "\n")


def forget(name: str) -> None:
    """So that a run that breaks off leaves nothing that an earlier one found."""
    (OUT / f"{name}.json").unlink(missing_ok=True)
