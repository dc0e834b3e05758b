"""The README says of each architecture what the tests found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from test_matrix import CASES, DTYPES

from greenroom import testing

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("support_table")


def test_the_committed_table_is_up_to_date(script: ModuleType) -> None:
    readme = (ROOT / "README.md").read_text()
    assert script.inserted(readme, json.loads(script.KEPT.read_text())) == readme


def test_the_kept_results_cover_the_matrix(script: ModuleType) -> None:
    results = json.loads(script.KEPT.read_text())
    cells = {(name, way, dtype) for name, ways in results.items() for way, of in ways.items() for dtype in of}
    ways = [*CASES, *((name, way) for name in testing.ARCHITECTURES for way in ("budget at half", "two ranks"))]
    assert cells == {(name, way, dtype) for name, way in ways for dtype in DTYPES}


def test_a_cell_that_was_not_exact_says_so(script: ModuleType) -> None:
    results = json.loads(script.KEPT.read_text())
    results["sdxl"]["model-level"]["bf16"] = "failed"
    del results["flux2"]
    lines = script.table(results).splitlines()
    assert any("StableDiffusionXL" in line and "not exact in bf16" in line for line in lines)
    assert any("Flux2" in line and line.count("not exact in fp32, bf16") == 5 for line in lines)
    assert sum(line.count("not yet") for line in lines) == 10
