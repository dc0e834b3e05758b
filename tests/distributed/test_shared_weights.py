"""Ranks that share weights compute what each of them would alone, from one copy of the weights for the host."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import launch

SCRIPT = "ranks.py"


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_transfer_has_the_same_bits(emu_module: ModuleType, tmp_path: Path, size: int) -> None:
    launch.run(SCRIPT, size, "same_bits", folder=tmp_path)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", ["wan22_t2v", *(pytest.param(n, marks=pytest.mark.slow) for n in ("cosmos3", "flux2", "qwen_image"))]
)
def test_architectures(emu_module: ModuleType, tmp_path: Path, name: str, dtype: str, size: int) -> None:
    launch.run(SCRIPT, size, "architecture", name, dtype, folder=tmp_path, seconds=300)


def padded(found: dict[str, Any], size: int) -> int:
    """Bytes of one rank's shares of the streamed blocks: each block divided, and its last part filled up to 64."""
    return sum(-(-n // (64 * size)) * 64 for n in found["blocks"])


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_gathering_rank_copies_its_share(emu_module: ModuleType, tmp_path: Path, size: int) -> None:
    """Bytes over the bus, on the device and in host memory."""
    ranks = launch.run(SCRIPT, size, "counters", "allgather", "0", folder=tmp_path)
    for found in ranks:
        share = padded(found, size)
        assert found["misses"] == 0
        assert found["passes"] >= 4  # of four forwards; more where the ranks began at different moments
        # Tensors and blocks are aligned to 64 and 512 bytes, four tensors to a block.
        assert share <= found["copied"] / found["passes"] <= share + len(found["blocks"]) * 1024
        assert found["moved"] == found["copied"] / found["passes"] and found["pageable"] == 0
        widest = max(found["blocks"])
        rest = found["weights"] - sum(found["blocks"])
        slots = 2 * widest + 2 * widest / size
        assert slots + rest <= found["device"] <= slots + rest + 16 * 1024
        assert found["pinned"] <= share + rest + len(found["blocks"]) * 1024 + 4096
    one_copy(ranks)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_that_copy_whole_blocks_keep_one_copy(emu_module: ModuleType, tmp_path: Path, size: int) -> None:
    ranks = launch.run(SCRIPT, size, "counters", "rank-local", "0", folder=tmp_path)
    for found in ranks:
        assert sum(found["blocks"]) * 4 <= found["copied"] <= sum(found["blocks"]) * 4.01
    one_copy(ranks)


@pytest.mark.slow
def test_blocks_that_stay_are_not_gathered(emu_module: ModuleType, tmp_path: Path) -> None:
    for found in launch.run(SCRIPT, 2, "counters", "allgather", "6", folder=tmp_path):
        left = padded(found, 2) * 18 / 24
        assert 0.99 * left <= found["copied"] / found["passes"] <= 1.01 * left
        widest = max(found["blocks"])
        expected = 3 * widest + 6 * widest + found["weights"] - sum(found["blocks"])
        assert 0.99 * expected <= found["device"] <= 1.01 * expected


@pytest.mark.slow
def test_without_sharing_each_rank_has_a_copy(emu_module: ModuleType, tmp_path: Path) -> None:
    """What the other tests of host memory would see if nothing were shared."""
    ranks = launch.run(SCRIPT, 2, "counters", "alone", "0", folder=tmp_path)
    assert sum(f["own"] + f["shared"] for f in ranks) > 1.9 * ranks[0]["weights"]


def one_copy(ranks: list[dict[str, Any]]) -> None:
    """Anonymous and shared memory of all ranks, what they share counted once, against the weights."""
    weights = ranks[0]["weights"]
    assert sum(f["shared"] for f in ranks) >= 0.95 * weights
    assert sum(f["own"] + f["shared"] for f in ranks) <= 1.1 * weights, ranks


@pytest.mark.parametrize("fraction", ["0.75", pytest.param("0.9", marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_one_budget_for_all_ranks(emu_module: ModuleType, tmp_path: Path, size: int, fraction: str) -> None:
    ranks = launch.run(SCRIPT, size, "budget", fraction, folder=tmp_path)
    stays = [found["stays"] for found in ranks]
    assert all(s == stays[0] for s in stays)
    first, *_, larger, lowered = stays[0]
    assert first == 0  # until a call was measured
    assert max(stays[0]) > larger >= lowered  # one rank's larger request lets fewer stay, on all of them


def test_without_pinned_memory(emu_module: ModuleType, tmp_path: Path) -> None:
    launch.run(SCRIPT, 2, "unpinned", folder=tmp_path)


def test_edits_concern_one_rank(emu_module: ModuleType, tmp_path: Path) -> None:
    launch.run(SCRIPT, 2, "edits", folder=tmp_path)


@pytest.mark.slow
def test_ranks_of_two_hosts(emu_module: ModuleType, tmp_path: Path) -> None:
    """Each host has the weights once; gathers go over both."""
    assert launch.run(SCRIPT, 4, "hosts", "two", folder=tmp_path) == [[[2, 2], 0]] * 4


def test_ranks_that_cannot_share_memory(emu_module: ModuleType, tmp_path: Path) -> None:
    """Each has a copy of its own and says so; what one edits is not what it contributes."""
    assert launch.run(SCRIPT, 2, "hosts", "none", folder=tmp_path) == [[[1, 1], 2]] * 2


@pytest.mark.slow
def test_weights_that_are_sharded_already(emu_module: ModuleType, tmp_path: Path) -> None:
    launch.run(SCRIPT, 2, "sharded_already", folder=tmp_path)


def checkpoint(folder: Path) -> Path:
    """Two Wan experts of 200 MB each, in bfloat16."""
    import torch
    from diffusers import WanTransformer3DModel

    from greenroom import testing

    with testing.quiet():
        pipe: Any = testing.build_pipeline("wan22_t2v", dtype=torch.bfloat16)
        pipe.save_pretrained(folder)
        for name in ("transformer", "transformer_2"):
            torch.manual_seed(len(name))
            model: Any = WanTransformer3DModel(
                num_attention_heads=8, attention_head_dim=64, num_layers=24, ffn_dim=2048, in_channels=16,
                out_channels=16, text_dim=pipe.text_encoder.config.d_model,
            )  # fmt: skip
            islands = tuple(model._keep_in_fp32_modules or ())
            for key, value in model.named_parameters():  # stored as it is wanted, so that nothing is converted
                if not any(island in key for island in islands):
                    value.data = value.data.to(torch.bfloat16)
            model.save_pretrained(folder / name)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("size", "transfer"), [(2, "allgather"), (4, "rank-local")])
def test_a_checkpoint_is_read_once(emu_module: ModuleType, tmp_path: Path, size: int, transfer: str) -> None:
    """Each rank reads its share of the files; all together take the weights once, while loading too."""
    folder = checkpoint(tmp_path / "model")
    ranks = launch.run(SCRIPT, size, "loading", str(folder), transfer, folder=tmp_path, seconds=200)
    weights = ranks[0]["weights"]
    assert weights > 300e6
    # The peak of each rank's own memory, and what they share, which is there from the beginning.
    shared = sum(found["shared"] for found in ranks)
    assert 0.95 * weights <= shared
    assert sum(found["own"] for found in ranks) + shared <= 1.1 * weights, ranks
    for found in ranks:
        assert found["read"] <= weights / size + 0.15 * weights


@pytest.mark.slow
def test_context_parallel(emu_module: ModuleType, tmp_path: Path) -> None:
    for found in launch.run(SCRIPT, 2, "context_parallel", "wan22_t2v", folder=tmp_path, seconds=200):
        passes, joined, broken = found["allgather"]
        assert passes and not joined and broken is None


@pytest.mark.slow
def test_two_requests_on_two_ranks_each(emu_module: ModuleType, tmp_path: Path) -> None:
    ranks = launch.run(SCRIPT, 4, "pairs_that_compute_together", "wan22_t2v", folder=tmp_path, seconds=200)
    assert all(broken is None for broken, *_ in ranks)
    assert len({passes for _, passes, _ in ranks}) == 1
    joined = [j for *_, j in ranks]
    assert joined[0] == joined[1] > joined[2] == joined[3]


@pytest.mark.slow
def test_the_benchmark(emu_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import distributed

    result = distributed.run(quick=True)
    assert all(gate.holds for gate in result.gates), [str(g) for g in result.gates]
    choices = [c["chosen"] for c in result.figures["ranks"][0]["cases"][2::3]]
    assert choices == ["allgather", "rank-local", "allgather", "rank-local"]
