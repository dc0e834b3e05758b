"""Loading: as from_pretrained would, without a second copy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file

import greenroom
from greenroom import testing
from greenroom.errors import ConfigError
from greenroom.loading import CheckpointError, load_checkpoint


def tensors(pipe: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, module in pipe.components.items():
        if isinstance(module, torch.nn.Module):
            for kind in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
                found.update({f"{name}.{n}": t for n, t in kind})
    return found


def ties(pipe: Any) -> set[frozenset[str]]:
    by_object: dict[int, set[str]] = {}
    for name, tensor in tensors(pipe).items():
        by_object.setdefault(id(tensor), set()).add(name)
    return {frozenset(names) for names in by_object.values() if len(names) > 1}


@pytest.mark.parametrize("dtype", [None, "bfloat16", torch.float16])
@pytest.mark.parametrize("name", testing.ARCHITECTURES)
def test_every_tensor_is_as_from_pretrained_makes_it(checkpoints: Any, name: str, dtype: Any) -> None:
    loaded = load_checkpoint(checkpoints[name], dtype=dtype)
    wanted = {"bfloat16": torch.bfloat16, None: torch.float32}.get(dtype, dtype)
    with testing.quiet():
        reference = DiffusionPipeline.from_pretrained(checkpoints[name], dtype=wanted)
    ours, theirs = tensors(loaded.pipeline), tensors(reference)
    assert type(loaded.pipeline) is type(reference) and ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        other = theirs[key]
        assert tensor.dtype == other.dtype and tensor.device == other.device, key
        assert torch.equal(tensor, other), key
    assert ties(loaded.pipeline) == ties(reference)
    assert not any(module.training for module in loaded.pipeline.components.values() if hasattr(module, "training"))
    assert not any(line.unexpected or line.fallback for line in loaded.report.components)


@pytest.mark.parametrize("name", testing.ARCHITECTURES)
def test_in_the_stored_dtype_weights_stay_in_their_files(checkpoints: Any, name: str) -> None:
    report = load_checkpoint(checkpoints[name]).report
    assert report.converted < 0.01 * report.mapped
    for line in report.components:
        assert line.weights == line.mapped + line.converted and line.stored_dtype == "float32"


@pytest.mark.parametrize("name", testing.ARCHITECTURES)
def test_what_is_stored_in_half_precision_stays_so_and_is_loaded_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with testing.quiet():
        testing.build_pipeline(name, dtype=torch.bfloat16).save_pretrained(tmp_path)
        reference = DiffusionPipeline.from_pretrained(tmp_path, dtype=torch.bfloat16)
    opened: list[str] = []
    original = safetensors.torch.load_file
    monkeypatch.setattr(safetensors.torch, "load_file", lambda f, **k: opened.append(str(f)) or original(f, **k))
    loaded = load_checkpoint(tmp_path)
    assert opened and len(opened) == len(set(opened))
    for key, tensor in tensors(loaded.pipeline).items():
        other = tensors(reference)[key]
        assert tensor.dtype == other.dtype and torch.equal(tensor, other), key
    assert loaded.report.mapped > 0.9 * sum(line.weights for line in loaded.report.components)


def test_an_offload_takes_mapped_weights_as_they_are(checkpoints: Any, emu: Any) -> None:
    pipe = load_checkpoint(checkpoints["wan22_t2v"]).pipeline
    pipe.set_progress_bar_config(disable=True)
    with testing.quiet():
        plain: Any = DiffusionPipeline.from_pretrained(checkpoints["wan22_t2v"], dtype=torch.float32)
    plain.set_progress_bar_config(disable=True)
    plain.to("emu")
    expected = testing.run(plain, "wan22_t2v")
    emu.reset_counters()
    handle = greenroom.offload(pipe, {"mode": "layer", "components": ["dit", "text_encoder"]}, device="emu")
    assert torch.equal(testing.run(pipe, "wan22_t2v"), expected)
    assert emu.counters()["d2h_bytes"] < 1_000_000
    handle.disable()
    assert torch.equal(testing.run(pipe.to("cpu"), "wan22_t2v"), testing.run(plain.to("cpu"), "wan22_t2v"))


def test_dtypes_may_differ_between_components(checkpoints: Any) -> None:
    pipe = load_checkpoint(
        checkpoints["qwen_image"], dtype={"transformer": "bfloat16", "default": torch.float16}
    ).pipeline
    assert pipe.transformer.dtype == torch.bfloat16 and pipe.vae.dtype == torch.float16
    for wrong in ("float8", torch.int8, 3, {"vae": "half"}):
        with pytest.raises(ConfigError, match="dtype"):
            load_checkpoint(checkpoints["qwen_image"], dtype=wrong)


def test_variants(tmp_path: Path) -> None:
    pipe = testing.build_pipeline("sd3", dtype=torch.float16)
    with testing.quiet():
        pipe.save_pretrained(tmp_path, variant="fp16")
    report = load_checkpoint(tmp_path, variant="fp16").report
    assert {line.stored_dtype for line in report.components} == {"float16"}
    with pytest.raises(CheckpointError):
        load_checkpoint(tmp_path)


def test_a_component_without_the_variant_is_taken_plain(tmp_path: Path) -> None:
    with testing.quiet():
        testing.build_pipeline("qwen_image").save_pretrained(tmp_path)
        testing.build_pipeline("qwen_image", dtype=torch.float16).vae.save_pretrained(tmp_path / "vae", variant="fp16")
    pipe = load_checkpoint(tmp_path, variant="fp16").pipeline
    assert pipe.vae.dtype == torch.float16 and pipe.transformer.dtype == torch.float32


def test_a_variant_that_no_component_has_is_refused_with_those_that_exist(tmp_path: Path) -> None:
    with testing.quiet():
        pipe: Any = testing.build_pipeline("qwen_image")
        pipe.save_pretrained(tmp_path)
        with pytest.raises(ConfigError, match="variant = 'fp16' is not accepted; accepted: none"):
            load_checkpoint(tmp_path, variant="fp16")
        pipe.vae.save_pretrained(tmp_path / "vae", variant="ema")
        pipe.transformer.save_pretrained(tmp_path / "transformer", variant="bf16", max_shard_size="20kB")
    assert list((tmp_path / "transformer").glob("*-of-*.safetensors")), "not in shards"
    with pytest.raises(ConfigError, match='variant = \'fp16\' is not accepted; accepted: "bf16", "ema" '):
        load_checkpoint(tmp_path, variant="fp16")
    load_checkpoint(tmp_path, variant="bf16")


def test_unexpected_tensors_are_reported(checkpoints: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoints["wan22_t2v"], tmp_path / "more")
    file = folder / "transformer/diffusion_pytorch_model.safetensors"
    held = load_file(file)
    held["blocks.99.extra"] = torch.ones(2)
    save_file(held, file)
    with pytest.warns(UserWarning, match=r"blocks\.99\.extra"):
        lines = {line.name: line for line in load_checkpoint(folder).report.components}
    assert lines["transformer"].unexpected == ("blocks.99.extra",) and lines["vae"].unexpected == ()


def test_other_formats_fall_back_and_say_so(checkpoints: Any, tmp_path: Path) -> None:
    with testing.quiet():
        testing.build_pipeline("wan22_t2v").save_pretrained(tmp_path, safe_serialization=False)
    loaded = load_checkpoint(tmp_path)
    binary = {n for n in ("transformer", "text_encoder", "vae") if list((tmp_path / n).glob("*.bin"))}
    assert binary and set(loaded.report.fallbacks) >= binary
    assert all("not safetensors" in loaded.report.fallbacks[n] for n in binary)
    for key, tensor in tensors(load_checkpoint(checkpoints["wan22_t2v"]).pipeline).items():
        assert torch.equal(tensor, tensors(loaded.pipeline)[key])


def test_code_of_a_checkpoint_is_not_run_unasked(checkpoints: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoints["wan22_t2v"], tmp_path / "remote")
    trap = tmp_path / "ran"
    (folder / "pipeline.py").write_text(f"open({str(trap)!r}, 'w').write('ran')\n")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "_class_name": ["pipeline", "MyPipeline"]}))
    with pytest.raises(ConfigError, match="trust_remote_code"):
        load_checkpoint(folder)
    (folder / "model_index.json").write_text(json.dumps({**index, "transformer": ["mine", "MyModel"]}))
    (folder / "transformer/mine.py").write_text(f"open({str(trap)!r}, 'w').write('ran')\n")
    with pytest.raises(ConfigError, match=r"mine\.py"):
        load_checkpoint(folder)
    assert not trap.exists()


def test_code_of_a_checkpoint_runs_where_it_is_trusted(checkpoints: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoints["wan22_t2v"], tmp_path / "remote")
    (folder / "pipeline.py").write_text(
        "from diffusers import WanPipeline\n\n\nclass MyPipeline(WanPipeline):\n    pass\n"
    )
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "_class_name": ["pipeline", "MyPipeline"]}))
    loaded = load_checkpoint(folder, trust_remote_code=True)
    assert type(loaded.pipeline).__name__ == "MyPipeline"
    assert set(loaded.report.fallbacks) == {"transformer", "transformer_2", "text_encoder", "vae"}
    for key, tensor in tensors(load_checkpoint(checkpoints["wan22_t2v"]).pipeline).items():
        assert torch.equal(tensor, tensors(loaded.pipeline)[key])


def test_quantised_weights_fall_back_and_say_so(tmp_path: Path, emu: Any) -> None:
    quantisation = pytest.importorskip("torchao.quantization")
    from diffusers import TorchAoConfig, WanTransformer3DModel

    with testing.quiet():
        testing.build_pipeline("wan22_t2v").save_pretrained(tmp_path)
        config = TorchAoConfig(quantisation.Int8WeightOnlyConfig())
        place = tmp_path / "transformer"
        model: Any = WanTransformer3DModel.from_pretrained(place, quantization_config=config, dtype=torch.float32)
        for file in place.glob("*.safetensors"):
            file.unlink()
        model.save_pretrained(place)
    loaded = load_checkpoint(tmp_path)
    assert list(loaded.report.fallbacks) == ["transformer"] and "quantised" in loaded.report.fallbacks["transformer"]
    pipe = loaded.pipeline
    pipe.set_progress_bar_config(disable=True)
    kept = pipe.transformer.blocks[0].attn1.to_q.weight
    assert type(kept) is type(model.blocks[0].attn1.to_q.weight)
    expected = testing.run(load_checkpoint(tmp_path).pipeline.to("emu"), "wan22_t2v")
    greenroom.offload(pipe, {"mode": "layer", "components": ["dit", "text_encoder"]}, device="emu")
    assert torch.equal(testing.run(pipe, "wan22_t2v"), expected)


def test_a_hub_id_is_found_in_the_cache(checkpoints: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants as hub

    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--somebody--wan"
    shutil.copytree(checkpoints["wan22_t2v"], repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    import huggingface_hub

    import greenroom.loading.locate as locate_module

    original = huggingface_hub.snapshot_download
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *a, **k: original(*a, cache_dir=str(tmp_path), **k)
    )
    assert locate_module is not None
    loaded = load_checkpoint("somebody/wan", local_files_only=True)
    assert type(loaded.pipeline).__name__ == "WanPipeline"
    with pytest.raises(CheckpointError, match="somebody/else"):
        load_checkpoint("somebody/else", local_files_only=True)


@pytest.mark.parametrize("name", ["nothing", "a/b/c", "../x", "a/", "/nowhere/at/all", "", "a b/c"])
def test_what_is_neither_a_folder_nor_a_hub_id_is_refused(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="model"):
        load_checkpoint(name)
