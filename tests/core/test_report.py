"""What a handle shows: figures that add up, a trace, a picture."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import toys

import greenroom


def test_a_report_adds_up(emu: ModuleType) -> None:
    pipe = toys.Pipeline()
    handle = greenroom.offload(pipe, toys.LAYERWISE, device="emu")
    report = handle.report()
    weights = sum(map(toys.nbytes, pipe.components.values()))
    assert sum(c.weights for c in report.components) == weights
    assert weights <= sum(c.resident + c.moved for c in report.components) <= 1.02 * weights
    assert report.strategy == "layerwise"
    assert json.loads(json.dumps(report.to_dict()))["device"] == "emu:0"
    text = str(report)
    assert all(c.name in text for c in report.components)
    assert repr(handle).endswith(str(report))


def test_predicted_and_measured_stand_side_by_side(emu: ModuleType) -> None:
    emu.set_virtual_time(True, flops=1e11, membw=100e9, launch=1e-7, kernel_latency=1e-7)
    emu.set_bandwidth(2e9)
    pipe = toys.Pipeline(blocks=12, single=4)
    total = sum(map(toys.nbytes, pipe.components.values()))
    handle = greenroom.offload(pipe, memory=int(total * 0.5), device="emu")
    for _ in range(2):
        pipe("emu", steps=6)
    handle.record()
    pipe("emu", steps=6)
    report = handle.report()
    assert {s.name for s in report.steps} == {"transformer", "transformer_2"}
    for step in report.steps:
        assert 0 < step.bound <= step.measured * 1.01
        assert step.compute <= step.measured * 1.01
        assert 0 <= step.bus_idle <= 1
    assert "predicted" in str(report)
    assert "budget" in str(report)


def test_a_trace_and_a_picture(emu: ModuleType, tmp_path: Path) -> None:
    emu.set_virtual_time(True)
    emu.set_bandwidth(1e9)
    pipe = toys.Pipeline()
    handle = greenroom.offload(pipe, toys.LAYERWISE, device="emu")
    pipe("emu")
    with pytest.raises(greenroom.OffloadError, match="record"):
        handle.timeline()
    handle.record()
    pipe("emu")
    trace = handle.timeline(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == trace
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    names = {e["name"] for e in spans if e["cat"] == "compute"}
    assert {f"transformer.blocks.{i}" for i in range(4)} <= names
    copies = [e for e in spans if e["cat"] == "copy"]
    assert copies
    assert all(e["dur"] > 0 and e["args"]["bytes"] > 0 for e in copies)
    handle.plot(tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
