"""What the documentation shows runs, and what it links to is there."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_guide_to_adding_a_model(emu: ModuleType) -> None:
    torch.manual_seed(0)
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "adding-a-model.md").read_text(), re.DOTALL)
    names = {"DEVICE": "emu", "__name__": "guide"}
    exec(compile(code, "docs/adding-a-model.md", "exec"), names)
    assert names["handle"].enabled  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing
