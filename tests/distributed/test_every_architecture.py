"""Every supported architecture on two ranks that gather its blocks; a column of the support table in the README."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

import cells
import launch


@pytest.mark.slow
def test_same_bits_on_two_ranks(emu_module: ModuleType, tmp_path: Path) -> None:
    cells.forget("support_distributed")
    found: dict[str, dict[str, str]] = {}
    for dtype in ("fp32", "bf16"):
        ranks = launch.run("ranks.py", 2, "every_architecture", dtype, folder=tmp_path, seconds=500)
        for name in ranks[0]:
            found.setdefault(name, {})[dtype] = "exact" if all(r[name] == "exact" for r in ranks) else "failed"
    cells.keep("support_distributed", found)
    assert {cell for row in found.values() for cell in row.values()} == {"exact"}
