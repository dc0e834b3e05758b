"""Every supported architecture on two ranks that gather its blocks; a column of the support table in the README."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import launch
import pytest

OUT = Path(__file__).parents[2] / "out" / "support_distributed.json"


@pytest.mark.slow
def test_same_bits_on_two_ranks(emu_module: ModuleType, tmp_path: Path) -> None:
    OUT.unlink(missing_ok=True)  # a run that breaks off leaves nothing that an earlier one found
    cells: dict[str, dict[str, str]] = {}
    for dtype in ("fp32", "bf16"):
        ranks = launch.run("ranks.py", 2, "every_architecture", dtype, folder=tmp_path, seconds=500)
        for name in ranks[0]:
            cells.setdefault(name, {})[dtype] = "exact" if all(r[name] == "exact" for r in ranks) else "failed"
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(cells, indent=1, sort_keys=True) + "\n")
    assert {cell for row in cells.values() for cell in row.values()} == {"exact"}
