"""Live servers for the tests of this folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs greenroom[serve]")
pytest.importorskip("openai", reason="needs the openai client")

from live_server import STRATEGIES, Live, serving

from greenroom import Omni


@pytest.fixture(scope="module")
def start(emu_module: Any, checkpoints: Any) -> Iterator[Callable[..., Live]]:
    """Starts a server for a checkpoint and a strategy; the same one again for the rest of the module."""
    running: dict[Any, Live] = {}
    with contextlib.ExitStack() as stack:

        def begin(model: str = "demo", strategy: str = "layer") -> Live:
            key = (model, strategy)
            if key not in running:
                omni = Omni(checkpoints[model], device="emu", max_queue=16, **STRATEGIES[strategy])
                running[key] = stack.enter_context(serving(omni))
            return running[key]

        yield begin


@pytest.fixture
def live(start: Callable[..., Live]) -> Live:
    """The demo, layerwise."""
    return start()
