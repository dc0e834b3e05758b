"""The benchmarks on a reduced grid. Figures of the virtual clock must pass their gates; real ones are only read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """As `benchmarks/run.py` has it; before the fixtures that run a whole benchmark."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def streamed(emu_module: ModuleType) -> Any:
    import streaming

    return streaming.run(quick=True)


@pytest.fixture(scope="module")
def budgeted(emu_module: ModuleType) -> Any:
    import residency

    return residency.run(quick=True)


@pytest.fixture(scope="module")
def kept(emu_module: ModuleType) -> Any:
    import budget

    return budget.run(quick=True)


def test_a_budget_meets_its_gates(kept: Any) -> None:
    """Peaks within the budget, and steps and peaks as they were predicted after one call."""
    assert failing(kept) == []


def failing(result: Any) -> list[str]:
    return [str(gate) for gate in result.gates if not gate.holds]


def test_streaming_meets_its_gates(streamed: Any) -> None:
    assert failing(streamed) == []


def test_streaming_beats_the_others(streamed: Any) -> None:
    import streaming

    over = dict(streamed.figures["over"])
    ours = over.pop(streaming.GREENROOM)
    assert over
    for name, theirs in over.items():
        assert all(a <= b for a, b in zip(ours, theirs, strict=True)), name


def test_everyone_streams_all_blocks_every_forward(streamed: Any) -> None:
    """What makes the comparison one of like with like."""
    from bench.subjects import wan

    least = sum(wan(16, 128, 4).block_bytes())
    for name, several in streamed.figures["samples"].items():
        if "cpu_offload_with_hook" not in name:
            assert all(s.copied >= least for s in several), name


def test_residency_meets_its_gates(budgeted: Any) -> None:
    assert failing(budgeted) == []


def test_a_budget_holds_on_the_device(budgeted: Any) -> None:
    for points in budgeted.figures.values():
        slots, half = points[2.0, 0.0], points[2.0, 0.5]
        # Beside two slots and nothing else, this much is taken by what is no block.
        outside = slots.ours.peak - slots.budget
        assert half.ours.peak <= half.budget + outside


def test_pages_say_what_kind_of_time_they_show(streamed: Any, budgeted: Any, tmp_path: Path) -> None:
    for result in (streamed, budgeted):
        result.write(tmp_path)
        page = (tmp_path / f"{result.name}.md").read_text()
        assert "**virtual**" in page and "400 GB/s" in page and f"python benchmarks/{result.name}.py" in page
        assert (tmp_path / f"{result.name}.png").stat().st_size > 0


def test_the_virtual_clock_repeats_itself(emu: ModuleType) -> None:
    import residency
    from bench import clock
    from bench.offloaders import greenroom_layerwise
    from bench.subjects import wan

    clock.start()
    subject = wan(4, 64, 4)
    first, second = (clock.measure(subject, greenroom_layerwise(1), residency.COST, [1e9])[0] for _ in range(2))
    assert first.seconds == second.seconds > 0


def test_real_time_computes_the_same_everywhere(emu: ModuleType) -> None:
    import real_time

    result = real_time.run(quick=True)
    latents = list(result.figures["latents"].values())
    assert len(latents) > 3 and all(torch.equal(latent, latents[0]) for latent in latents)
    assert "real" in result.markdown()


def test_host_cost_names_its_parts(emu: ModuleType) -> None:
    import host_cost

    measured = host_cost.run(quick=True).figures
    for figures in measured.values():
        assert set(host_cost.PARTS) | {"total"} == set(figures)
        assert sum(figures[p] for p in host_cost.PARTS) >= 0.99 * figures["total"] > 0


def test_enabling_is_timed_beside_copying_once(emu: ModuleType) -> None:
    import enabling

    result = enabling.run(quick=True)
    assert all(min(several) > 0 for several in result.figures["seconds"].values())
    assert "real" in result.markdown()


@pytest.mark.parametrize("more", [[], ["--plain"]], ids=["diffusers", "torch alone"])
def test_the_gpu_script_runs_on_the_emulator(
    more: list[str], emu: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    import on_gpu

    small = {"blocks": 4, "width": 64, "side": 2, "text": 4, "dtype": "float32", "forwards": 1}
    assert on_gpu.main(["--device", "emu", *(f"--{k}={v}" for k, v in small.items()), *more]) == 0
    assert "Greenroom, 2 of 4 blocks resident" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_the_gpu_script_says_that_there_is_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    import on_gpu

    assert on_gpu.main(["--device", "cuda"]) == 2
    assert "'cuda' is not available here" in capsys.readouterr().out


def test_a_gate_that_fails_says_so() -> None:
    from bench.report import Gate

    assert "FAILS" in str(Gate("time", 1.04, 1.03)) and "holds" in str(Gate("time", 1.03, 1.03))
    assert "FAILS" in str(Gate("gain", 1.7, 1.8, at_least=True)) and "holds" in str(
        Gate("gain", 1.8, 1.8, at_least=True)
    )
