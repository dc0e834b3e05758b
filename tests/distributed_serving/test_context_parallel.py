"""One call over all ranks, by diffusers' own context parallelism, with blocks streamed: the same bits as without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from served import torchrun

LAYER: dict[str, Any] = {"mode": "layer", "components": ["dit", "text_encoder"]}
CONFIGS: dict[str, dict[str, Any]] = {
    "layer": LAYER,
    "allgather": {**LAYER, "layer_options": {"dit": {"weight_transfer": "allgather"}}},
    "rank-local": {**LAYER, "layer_options": {"dit": {"weight_transfer": "rank-local", "resident_layers": 1}}},
}


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", ["wan22_t2v", "qwen_image"])
def test_a_spread_call_gives_the_same_bits_offloaded(tmp_path: Path, name: str, config: str) -> None:
    script = Path(__file__).with_name("context_rank.py")
    # Ranks that gather have to know from the start that they compute together.
    orders = ["before"] if config == "allgather" else ["before", "after"]
    torchrun(name, json.dumps(CONFIGS[config]), tmp_path / "report", " ".join(orders), script=script)
    for rank in (0, 1):
        found = json.loads((tmp_path / f"report.{rank}").read_text())
        assert found == {**{order: [True, True] for order in orders}, "close": True, "races": []}
