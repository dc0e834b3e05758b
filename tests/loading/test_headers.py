"""Checkpoints that are not whole are refused by file and tensor, before a weight is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from greenroom import testing
from greenroom.errors import ConfigError
from greenroom.loading import CheckpointError, component_files, load_checkpoint, read_header

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture
def whole(checkpoints: Any) -> Path:
    return Path(checkpoints["wan22_t2v"])


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def rewritten(file: Path, change: Callable[[dict], None]) -> None:
    """The same file with a changed header."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def by_place(header: dict) -> list[tuple[str, dict]]:
    return sorted(header.items(), key=lambda item: item[1]["data_offsets"])


def last_tensor(file: Path) -> str:
    data = file.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    header.pop("__metadata__", None)
    return by_place(header)[-1][0]


def test_a_header_says_what_the_tensors_are(whole: Path) -> None:
    entries = read_header(whole / WEIGHTS)
    tensors = load_file(whole / WEIGHTS)
    assert {n: (e.dtype, e.shape, e.nbytes) for n, e in entries.items()} == {
        n: (t.dtype, tuple(t.shape), t.nbytes) for n, t in tensors.items()
    }


@pytest.mark.parametrize("part", [0.3, 0.9, 0.999])
def test_a_truncated_file_is_refused_by_file_and_tensor(copy: Path, part: float) -> None:
    file = copy / WEIGHTS
    data = file.read_bytes()
    cut = int(len(data) * part)
    file.write_bytes(data[:cut])
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    first = next(n for n, e in by_place(header) if start + e["data_offsets"][1] > cut)
    with pytest.raises(CheckpointError, match="truncated") as refused:
        load_checkpoint(copy)
    assert refused.value.file == str(file) and refused.value.tensor == first


@pytest.mark.parametrize("length", [0, 5, 8, 40])
def test_a_file_without_a_whole_header_is_refused(copy: Path, length: int) -> None:
    file = copy / WEIGHTS
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(CheckpointError, match="truncated") as refused:
        load_checkpoint(copy)
    assert refused.value.file == str(file)


def test_bytes_too_many_are_refused(copy: Path) -> None:
    with open(copy / WEIGHTS, "ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match="4 bytes more"):
        load_checkpoint(copy)


def test_a_pointer_of_git_lfs_is_named(copy: Path) -> None:
    (copy / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        load_checkpoint(copy)


def _shorter(header: dict, name: str) -> None:
    header[name]["shape"] = [n + 1 for n in header[name]["shape"]]


def _unknown_dtype(header: dict, name: str) -> None:
    header[name]["dtype"] = "F12"


def _other_dtype(header: dict, name: str) -> None:
    header[name]["dtype"] = "F64"


def _moved(header: dict, name: str) -> None:
    begin, end = header[name]["data_offsets"]
    header[name]["data_offsets"] = [begin - 4, end - 4]


def _negative(header: dict, name: str) -> None:
    header[name]["data_offsets"][0] = -1


def _nameless(header: dict, name: str) -> None:
    header[name] = "gone"


@pytest.mark.parametrize("change", [_shorter, _unknown_dtype, _other_dtype, _moved, _negative, _nameless])
def test_an_altered_header_is_refused_by_tensor(copy: Path, change: Callable[[dict, str], None]) -> None:
    file = copy / WEIGHTS
    name = last_tensor(file)
    rewritten(file, lambda header: change(header, name))
    with pytest.raises(CheckpointError) as refused:
        load_checkpoint(copy)
    assert refused.value.file == str(file) and refused.value.tensor == name


def test_a_header_that_is_no_json_is_refused(copy: Path) -> None:
    file = copy / WEIGHTS
    data = bytearray(file.read_bytes())
    data[8] = ord("[")
    file.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match="altered"):
        load_checkpoint(copy)


def test_a_missing_tensor_is_refused_by_name(copy: Path) -> None:
    tensors = load_file(copy / WEIGHTS)
    name = "blocks.2.attn1.to_q.weight"
    del tensors[name]
    save_file(tensors, copy / WEIGHTS)
    with pytest.raises(CheckpointError, match="noise") as refused:
        load_checkpoint(copy)
    assert refused.value.tensor == name and refused.value.file.endswith("diffusion_pytorch_model.safetensors")


@pytest.mark.parametrize("component", ["transformer", "text_encoder"])
def test_a_tensor_of_another_shape_is_refused_by_name(copy: Path, component: str) -> None:
    file = next((copy / component).glob("*.safetensors"))
    tensors = load_file(file)
    name = max(tensors, key=lambda n: tensors[n].dim() == 2 and "block" in n)
    tensors[name] = torch.zeros(3, 5)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError) as refused:
        load_checkpoint(copy)
    assert refused.value.file == str(file) and refused.value.tensor == name


def test_missing_folders_and_files_are_named(copy: Path) -> None:
    (copy / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=r"transformer.*no weight files"):
        load_checkpoint(copy)
    shutil.rmtree(copy / "transformer")
    with pytest.raises(CheckpointError, match=r"transformer.*missing"):
        load_checkpoint(copy)
    (copy / "model_index.json").write_text("{")
    with pytest.raises(CheckpointError, match="model_index"):
        load_checkpoint(copy)
    (copy / "model_index.json").unlink()
    with pytest.raises(ConfigError, match="model_index"):
        load_checkpoint(copy)


# ---------------------------------------------------------------------- shards


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    with testing.quiet():
        testing.build_pipeline("wan22_t2v").save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    return tmp_path / "sharded"


def test_shards_are_read_through_their_index(sharded: Path, whole: Path) -> None:
    found = component_files(sharded, "transformer")
    assert found is not None and len(found.files) > 3
    assert set(found.tensors) == set(read_header(whole / WEIGHTS))
    assert load_checkpoint(sharded).report.mapped == load_checkpoint(whole).report.mapped


def test_a_missing_shard_is_named_with_a_tensor(sharded: Path) -> None:
    shard = sorted((sharded / "transformer").glob("*-of-*.safetensors"))[1]
    held = set(read_header(shard))
    shard.unlink()
    with pytest.raises(CheckpointError, match="missing") as refused:
        load_checkpoint(sharded)
    assert refused.value.file == str(shard) and refused.value.tensor in held


def test_an_index_that_promises_too_much_is_refused(sharded: Path) -> None:
    index = next((sharded / "transformer").glob("*.index.json"))
    words = json.loads(index.read_text())
    shard = next(iter(words["weight_map"].values()))
    words["weight_map"]["blocks.99.weight"] = shard
    index.write_text(json.dumps(words))
    with pytest.raises(CheckpointError, match="not in the file") as refused:
        load_checkpoint(sharded)
    assert refused.value.tensor == "blocks.99.weight"
    words["weight_map"]["blocks.99.weight"] = "../../secret.safetensors"
    index.write_text(json.dumps(words))
    with pytest.raises(CheckpointError, match="beside the index"):
        load_checkpoint(sharded)
    index.write_text("[]")
    with pytest.raises(CheckpointError, match="index of shards"):
        load_checkpoint(sharded)
    index.unlink()
    with pytest.raises(CheckpointError, match=r"no .*index"):
        load_checkpoint(sharded)
