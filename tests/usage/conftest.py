from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _collect_only_what_is_new() -> Iterator[None]:
    """Lets the garbage collector, which these tests call often, pass over the libraries that are loaded already."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
