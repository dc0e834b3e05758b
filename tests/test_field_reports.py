"""docs/field-reports.md names tests that exist, and leaves no row without one or a reason."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "field-reports.md").read_text()
ROWS = re.findall(r"^\| ([A-Z]\d+) \| (.+?) \| (.+?) \|$", PAGE, re.MULTILINE)
NODES = sorted(set(re.findall(r"`(tests/[^`]+::[^`]+)`", PAGE)))
# What Greenroom does not have, so that there is nothing to test: a disk tier, a server of several checkpoints.
WITHOUT = {"O8", "Q5"}


@functools.cache
def named_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


@pytest.mark.parametrize("node", NODES)
def test_a_named_test_exists(node: str) -> None:
    path, _, name = node.partition("::")
    assert (ROOT / path).is_file()
    assert name in named_in(path)
    assert name.rpartition("::")[2].startswith("test_")


def test_every_row_has_a_test_or_a_reason() -> None:
    assert len(ROWS) == len({number for number, _, _ in ROWS}) == 110
    without = {number: answer for number, _, answer in ROWS if "`tests/" not in answer}
    assert set(without) == WITHOUT
    assert all(re.match(r"\*\*.+\.\*\* ", answer) for answer in without.values())
