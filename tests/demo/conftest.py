"""The demo's checkpoint, loaded once, and fifty requests made of its wordings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from greenroom.demo import CALL_KWARGS, PROMPTS, load_pipeline, spell

Draw = Callable[[Any], list[np.ndarray]]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The models are so small that a second thread costs more than it brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def pipe() -> Any:
    return load_pipeline()


@pytest.fixture(scope="session")
def requests() -> list[tuple[str, int]]:
    """Fifty prompts and their digits: each of ten wordings with five digits, as numerals, words and capitals."""
    asked = []
    for row, wording in enumerate(PROMPTS):
        for column in range(5):
            digit = (row + 2 * column) % 10
            name = (spell(digit), str(digit), spell(digit).upper())[(row + column) % 3]
            asked.append((wording.format(digit=name), digit))
    return asked


@pytest.fixture(scope="session")
def draw(requests: list[tuple[str, int]]) -> Draw:
    """Draws every request with a pipeline, ten prompts a call; float pixels (32, 32, 3) in 0..1."""

    @torch.no_grad()
    def draw(pipe: Any) -> list[np.ndarray]:
        pixels: list[np.ndarray] = []
        prompts = [prompt for prompt, _ in requests]
        for start in range(0, len(prompts), 10):
            generator = torch.Generator().manual_seed(start)
            drawn = pipe(prompts[start : start + 10], generator=generator, output_type="np", **CALL_KWARGS)
            pixels.extend(drawn.images)
        return pixels

    return draw


@pytest.fixture(scope="session")
def never_offloaded(draw: Draw) -> list[np.ndarray]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    pixels = draw(load_pipeline())
    torch.set_num_threads(before)
    return pixels
