"""Fifty digits under each strategy: read back as asked, and equal to the never-offloaded ones bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

import greenroom
from greenroom.demo import DigitReader

CONFIGS = {
    "layerwise": {"mode": "layer", "components": ["dit", "text_encoder"]},
    "model-level": {"mode": "module", "components": ["dit", "text_encoder"]},
}


@pytest.mark.parametrize("strategy", CONFIGS)
def test_fifty_digits(
    strategy: str,
    emu: ModuleType,
    pipe: Any,
    draw: Callable[[Any], list[np.ndarray]],
    requests: list[tuple[str, int]],
    never_offloaded: list[np.ndarray],
) -> None:
    emu.set_poison(True)
    emu.set_race_check("raise")
    handle = greenroom.offload(pipe, CONFIGS[strategy], device="emu")
    pixels = draw(pipe)
    handle.disable()
    different = [
        prompt
        for (prompt, _), ours, theirs in zip(requests, pixels, never_offloaded, strict=True)
        if not np.array_equal(ours, theirs)
    ]
    assert different == []
    images = [Image.fromarray((drawn * 255).round().astype(np.uint8)) for drawn in pixels]
    assert DigitReader().score(images, [digit for _, digit in requests]) >= 0.95
