"""Loading a checkpoint of more than 2 GB takes its weights once."""

from __future__ import annotations

from pathlib import Path

import measure
import pytest


@pytest.mark.slow
def test_a_large_checkpoint_takes_its_weights_once(
    emu: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = measure.measure(tmp_path / "large")
    with capsys.disabled():
        print("\n" + measure.table(results))
    peaks = {r["way"]: r["peak"] / r["weights"] for r in results}
    assert results[0]["weights"] > 2e9
    assert peaks["greenroom"] <= 1.05
    # Converted weights lie in memory of their own until their block was copied.
    assert peaks["greenroom, converted"] <= 1.10
