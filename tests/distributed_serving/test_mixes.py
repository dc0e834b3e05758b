"""Ranks under torchrun, each with requests of its own: all right, and never a hang, on one machine and on two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from served import shared_memory, torchrun

from greenroom.demo import checkpoint_path

SCRIPT = Path(__file__).with_name("mix_rank.py")
ALLGATHER = {"mode": "layer", "components": ["dit"], "layer_options": {"dit": {"weight_transfer": "allgather"}}}
BOTH = {
    "mode": "layer",
    "components": ["dit", "text_encoder"],
    "layer_options": {
        "dit": {"weight_transfer": "allgather", "resident_layers": 2},
        "text_encoder": {"weight_transfer": "rank-local"},
    },
}


def run(tmp_path: Path, model: Path, mixes: int, config: dict[str, Any], **where: Any) -> list[dict[str, int]]:
    before = shared_memory()
    torchrun(model, mixes, tmp_path / "report", "--config", json.dumps(config), script=SCRIPT, **where)
    assert shared_memory() <= before
    world = where.get("per_machine", 2) * where.get("machines", 1)
    return [json.loads((tmp_path / f"report.{rank}").read_text()) for rank in range(world)]


def test_a_few_mixes_over_two_ranks(tmp_path: Path) -> None:
    reports = run(tmp_path, checkpoint_path(), 6, ALLGATHER)
    assert sum(r["right"] for r in reports) > 4 and [r["rank"] for r in reports] == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_hundred_mixes(tmp_path: Path, ranks: int) -> None:
    reports = run(tmp_path, checkpoint_path(), 100, ALLGATHER, per_machine=ranks, seconds=600)
    for outcome, least in (("right", 60 * ranks), ("cancelled", 10 * ranks), ("refused", ranks)):
        assert sum(r[outcome] for r in reports) >= least


@pytest.mark.slow
def test_mixes_of_a_model_with_two_experts(tmp_path: Path, checkpoints: Any) -> None:
    reports = run(tmp_path, checkpoints["wan22_t2v"], 12, BOTH, seconds=600)
    assert all(r["right"] > 3 for r in reports)


@pytest.mark.slow
@pytest.mark.parametrize("config", [ALLGATHER, BOTH], ids=["allgather", "both"])
def test_two_machines(tmp_path: Path, config: dict[str, Any]) -> None:
    reports = run(tmp_path, checkpoint_path(), 8, config, per_machine=1, machines=2)
    assert [r["world"] for r in reports] == [2, 2] and all(r["right"] for r in reports)


@pytest.mark.slow
def test_a_rank_that_cannot_load_is_an_error_on_all_at_once() -> None:
    printed = torchrun(script=SCRIPT.with_name("failing_rank.py"), seconds=55)  # less than the ranks' own patience
    assert "rank 0 ended with ConfigError: model = '/nowhere'" in printed
    assert "rank 1 ended with RanksError: rank 0 failed: ConfigError: model = '/nowhere'" in printed
