from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

for folder in (Path(__file__).parents[1] / "core", Path(__file__).parent):
    sys.path.insert(0, str(folder))


@pytest.fixture(scope="module", autouse=True)
def _collect_only_what_is_new() -> Iterator[None]:
    """Lets the garbage collector, which these tests call often, pass over the libraries that are loaded already."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
