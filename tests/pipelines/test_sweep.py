"""Pipelines that nothing is declared for: the same bits, or a refusal that names the component and the reason.

The catalog is emptied for these tests, so that everything has to be discovered.
"""

from __future__ import annotations

import functools
import gc
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ways import draw
from zoo import ZOO, make

import greenroom
from greenroom import catalog

pytestmark = pytest.mark.filterwarnings("ignore")
KEPT = Path(__file__).parents[2] / "docs" / "pipelines.json"
WAYS = ("layerwise", "budget at half")
# These stand for the rest where time is short: one of each kind of model.
ALWAYS = ("StableDiffusionPipeline", "PixArtSigmaPipeline", "FluxControlNetPipeline", "HunyuanVideoPipeline")
CASES = [
    pytest.param(name, way, marks=() if name in ALWAYS else pytest.mark.slow, id=f"{name}-{way}")
    for name in ZOO
    for way in WAYS
]


@dataclass(frozen=True)
class Plain:
    """The never-offloaded pipeline: what it draws, and bytes on the device for weights and beside them."""

    drawn: torch.Tensor
    weights: int
    beside: int


@functools.cache
def plain(name: str) -> Plain:
    pipe = make(name)
    gc.collect()
    before = torch.emu.memory_allocated()
    for component in pipe.components.values():
        if isinstance(component, torch.nn.Module):
            component.to("emu")
    weights = torch.emu.memory_allocated() - before
    torch.emu.reset_peak_memory_stats()
    drawn = draw(pipe, **call(name))
    return Plain(drawn, weights, torch.emu.max_memory_allocated() - before - weights)


def call(name: str) -> dict[str, Any]:
    torch.manual_seed(7)  # some sample from the VAE without the call's generator
    return ZOO[name][1]


@pytest.fixture
def _nothing_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "CATALOG", {})


@pytest.mark.usefixtures("_nothing_declared")
@pytest.mark.parametrize(("name", "way"), CASES)
def test_same_bits_or_refused_by_name(
    emu: ModuleType, sweep_cell: None, name: str, way: str, record_property: Any
) -> None:
    expected = plain(name)
    pipe = make(name)
    gc.collect()
    before = emu.memory_allocated()
    words: dict[str, Any] = {"config": {"mode": "layer"}}
    if way == "budget at half":
        words = {"memory": before + expected.weights // 2 + expected.beside}
    try:
        handle = greenroom.offload(pipe, **words, device="emu")
    except greenroom.GreenroomError as refusal:
        assert any(component in str(refusal) for component in pipe.components)
        record_property("refused", str(refusal))
        known = json.loads(KEPT.read_text()).get(name, {}).get(way, "not run")
        assert known.startswith("refused"), f"refused now, {known!r} in {KEPT.name}: {refusal}"
        return
    for _ in range(2):
        assert torch.equal(draw(pipe, **call(name)), expected.drawn)
    assert handle.report().copied > 0
    if way == "layerwise":
        assert any(c.streamed_blocks for c in handle.report().components)
    handle.disable()
    gc.collect()
    assert all(
        t.device.type == "cpu"
        for c in pipe.components.values()
        if isinstance(c, torch.nn.Module)
        for t in (*c.parameters(), *c.buffers())
    )


@pytest.fixture(scope="module")
def script(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("pipelines_table")


def test_the_committed_table_is_up_to_date(script: ModuleType) -> None:
    results = json.loads(script.KEPT.read_text())
    assert script.page(results) == script.PAGE.read_text()
    assert set(results) == set(ZOO)
    assert all(set(ways) == set(WAYS) for ways in results.values())
    assert len(results) >= 40


def test_a_partial_run_leaves_the_other_cells_alone(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = json.loads(script.KEPT.read_text())
    for name in ("KEPT", "PAGE", "MEASURED"):
        monkeypatch.setattr(script, name, tmp_path / name)
    script.KEPT.write_text(json.dumps(results))
    script.MEASURED.write_text(json.dumps({"FluxPipeline": {"layerwise": "failed"}}))
    script.main()
    results["FluxPipeline"]["layerwise"] = "failed"
    assert json.loads(script.KEPT.read_text()) == results
    assert script.PAGE.read_text() == script.page(results)


def test_a_class_that_failed_says_so(script: ModuleType) -> None:
    results = json.loads(script.KEPT.read_text())
    results["FluxPipeline"] = {"layerwise": "failed", "budget at half": "refused: vae is odd"}
    line = next(line for line in script.page(results).splitlines() if "`FluxPipeline`" in line)
    assert "**failed**" in line and "refused: vae is odd" in line
