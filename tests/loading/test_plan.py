"""The plan of a checkpoint, from headers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from accelerate import init_empty_weights
from diffusers import WanTransformer3DModel
from typer.testing import CliRunner

import greenroom
from greenroom import testing
from greenroom.cli import app
from greenroom.demo import checkpoint_path
from greenroom.errors import ConfigError
from greenroom.loading import load_checkpoint
from greenroom.loading.plan import describe, plan_pipeline


def hollow(model: torch.nn.Module, folder: Path, shards: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Shards with the headers of `model` and no weights: holes of their size. Returns the bytes of all tensors."""
    tensors = list(model.state_dict().items())
    where = {}
    total = 0
    for i in range(shards):
        header, offset = {}, 0
        name = f"diffusion_pytorch_model-{i + 1:05}-of-{shards:05}.safetensors"
        for key, tensor in tensors[i::shards]:
            size = tensor.numel() * dtype.itemsize
            header[key] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [offset, offset + size]}
            where[key] = name
            offset += size
        text = json.dumps(header).encode()
        with open(folder / name, "wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + offset)
        total += offset
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}))
    return total


@pytest.fixture(scope="module")
def giant(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A Wan checkpoint with a DiT of the real 14B size, and its bytes."""
    folder = tmp_path_factory.mktemp("giant")
    with testing.quiet():
        pipe: Any = testing.build_pipeline("wan22_t2v", dtype=torch.bfloat16)
        pipe.save_pretrained(folder)
        with init_empty_weights():
            model: Any = WanTransformer3DModel(
                num_attention_heads=40, attention_head_dim=128, num_layers=40, ffn_dim=13824,
                in_channels=16, out_channels=16, text_dim=4096,
            )  # fmt: skip
    (folder / "transformer/diffusion_pytorch_model.safetensors").unlink()
    size = hollow(model, folder / "transformer", 6)
    model.save_config(folder / "transformer")
    return folder, size


def test_a_giant_is_planned_without_reading_it(giant: tuple[Path, int]) -> None:
    folder, size = giant
    assert size > 25e9
    process = psutil.Process()
    before = process.memory_info().rss
    planned = plan_pipeline(load_checkpoint(folder).pipeline, 12 * 2**30)
    assert process.memory_info().rss - before < 1.5e9
    dit = next(c for c in planned.components if c.name == "transformer")
    # Islands that the model keeps in float32 make it a little larger than its file.
    assert size <= dit.weights < 1.02 * size and dit.blocks == 40 and dit.dtype == "bfloat16"
    rows = {s.name: s for s in planned.strategies}
    assert rows["resident"].device > size and rows["resident"].per_step == 0
    assert rows["layerwise, DiT"].device < 0.08 * size and rows["layerwise, DiT"].per_step > 0.95 * size
    assert planned.smallest < rows["layerwise, both"].device
    assert planned.chosen is not None and planned.chosen_device is not None
    assert planned.smallest <= planned.chosen_device <= 12 * 2**30
    assert "14B" not in describe(planned) and "transformer" in describe(planned)


@pytest.mark.parametrize("name", ["wan22_t2v", "qwen_image", "sd3", "flux2"])
def test_the_plan_says_what_the_offload_does(name: str, emu: Any) -> None:
    pipe: Any = testing.build_pipeline(name)
    rows = {s.name: s for s in plan_pipeline(pipe).strategies}
    for row, config in (
        ("model-level", {"mode": "module"}),
        ("layerwise, DiT", {"mode": "layer", "components": ["dit"]}),
        ("layerwise, both", {"mode": "layer", "components": ["dit", "text_encoder"]}),
    ):
        handle = greenroom.offload(pipe, config, device="emu")
        report = handle.report()
        moved = [c.moved for c in report.components if c.role == "dit"]
        assert rows[row].device == pytest.approx(report.device_weights, rel=0.02)
        assert rows[row].per_step == pytest.approx(max(moved) if config["mode"] == "layer" else 0, rel=0.01)
        handle.disable()


def test_the_smallest_budget_is_the_smallest(emu: Any) -> None:
    pipe: Any = testing.build_pipeline("qwen_image")
    smallest = plan_pipeline(pipe).smallest
    assert plan_pipeline(pipe, smallest).chosen_device <= smallest
    with pytest.raises(ConfigError, match=str(smallest)):
        plan_pipeline(pipe, smallest - 1)
    assert plan_pipeline(pipe, 10**9).chosen_device == pytest.approx(plan_pipeline(pipe).strategies[0].device, rel=0.01)


def test_the_command(tmp_path: Path, emu: Any) -> None:
    run = CliRunner().invoke(app, ["plan", str(checkpoint_path()), "--memory-budget", "3MiB"])
    assert run.exit_code == 0, run.output
    for word in ("FluxTransformer2DModel", "layerwise, both", "smallest budget", "auto would take"):
        assert word in run.output
    run = CliRunner().invoke(
        app, ["plan", str(checkpoint_path()), "--memory-budget", "50%", "--device", "emu", "--json"]
    )
    assert json.loads(run.stdout)["budget"] == torch.emu.mem_get_info()[1] // 2
    run = CliRunner().invoke(app, ["plan", str(checkpoint_path()), "--json"])
    assert json.loads(run.stdout)["smallest"] > 0
    for words, told in (
        ([str(tmp_path)], "model_index.json"),
        ([str(checkpoint_path()), "--memory-budget", "1kB"], "at least"),
        ([str(checkpoint_path()), "--memory-budget", "some"], "--memory-budget = 'some'"),
        ([str(checkpoint_path()), "--memory-budget", "80%", "--device", "cpu"], "--device"),
        ([str(checkpoint_path()), "--variant", "fp16"], "--variant = 'fp16' is not accepted; accepted: none"),
        ([str(checkpoint_path()), "--memory-budget", "80%", "--device", "cuda"], "'cuda' is not available"),
    ):
        run = CliRunner().invoke(app, ["plan", *words])
        assert run.exit_code == 2 and told in run.output
