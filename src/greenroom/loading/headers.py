"""Checkpoint files without their weights: names, dtypes, shapes and places from safetensors headers.

Format of a header: https://huggingface.co/docs/safetensors#format - eight bytes of length (little-endian), then JSON
of that length, then the tensors' bytes without gaps.

Note [Headers are believed only as far as the file goes]
    Everything that a header promises is held against the size of the file before a weight is read, so that a
    half-downloaded or altered file is refused by name here and not met as noise, or as a crash, in the first picture.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from greenroom.loading.errors import CheckpointError

# The format's own limit, which keeps a damaged length from allocating gigabytes.
_LONGEST_HEADER = 100_000_000
_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
# model.fp16.safetensors; shards are model.fp16-00001-of-00002.safetensors or model-00001-of-00002.fp16.safetensors.
_VARIANT = re.compile(r"[^.]+\.(?P<variant>[^.]+?)(-\d+-of-\d+)?\.(safetensors|bin)")
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class TensorEntry:
    """One tensor as its file's header describes it; nbytes in bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    file: Path


@dataclass(frozen=True)
class ComponentFiles:
    """The weights of one component.

    Attributes:
        name: the component's folder in the checkpoint.
        files: its weight files.
        tensors: name -> entry; empty where the files are not safetensors.
        variant: the variant that was found, or None for the plain files.
        safetensors: whether the files can be mapped.
        quantised: whether the component's config asks for a quantiser.
    """

    name: str
    files: tuple[Path, ...]
    tensors: dict[str, TensorEntry]
    variant: str | None
    safetensors: bool
    quantised: bool

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def stored_dtype(self) -> torch.dtype | None:
        """The floating-point dtype that most of the bytes are stored in."""
        sizes: Counter[torch.dtype] = Counter()
        for tensor in self.tensors.values():
            if tensor.dtype.is_floating_point:
                sizes[tensor.dtype] += tensor.nbytes
        return sizes.most_common(1)[0][0] if sizes else None


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file; no weight is read.

    Raises:
        CheckpointError: the file cannot be read, is shorter or longer than its header says, or the header makes no
            sense.
    """
    if not file.is_file():
        raise CheckpointError(file, None, _no_file(file))
    try:
        stream = open(file, "rb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise CheckpointError(file, None, f"cannot be read: {error.strerror}") from None
    with stream:
        size = os.path.getsize(file)
        start = stream.read(8)
        if (start + stream.read(len(_LFS_POINTER) - 8)).startswith(_LFS_POINTER):
            raise CheckpointError(file, None, "is a pointer of git-lfs and not the file itself; run `git lfs pull`")
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 2 <= length <= min(_LONGEST_HEADER, size - 8):
            raise CheckpointError(
                file, None, f"has {size} bytes, too few for its header; it is truncated or not a safetensors file"
            )
        stream.seek(8)
        text = stream.read(length)
    try:
        raw = json.loads(text)
        if not isinstance(raw, dict):
            raise ValueError("not a mapping")
    except ValueError as error:
        raise CheckpointError(file, None, f"its header is not readable ({error}); the file was altered") from None
    raw.pop("__metadata__", None)
    placed = sorted((_entry(file, name, value) for name, value in raw.items()), key=lambda p: p[1:])
    available, end = size - 8 - length, 0
    for entry, begin, stop in placed:
        if begin != end:
            what = "overlaps the tensor before it" if begin < end else f"leaves {begin - end} bytes unused before it"
            raise CheckpointError(file, entry.name, f"{what}; the header was altered")
        if stop > available:
            raise CheckpointError(
                file,
                entry.name,
                f"ends at byte {8 + length + stop} and the file at byte {size}; the file is truncated, as after an "
                "unfinished download",
            )
        end = stop
    if end != available:
        raise CheckpointError(file, None, f"holds {available - end} bytes more than its tensors; the file was altered")
    return {entry.name: entry for entry, _, _ in placed}


def _no_file(file: Path) -> str:
    if file.is_symlink() and not file.exists():
        return f"is a link to {os.readlink(file)}, which is not there; download it again"
    return "is not a file"


def _entry(file: Path, name: str, value: Any) -> tuple[TensorEntry, int, int]:
    try:
        dtype, shape, (begin, stop) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        whole = all(type(n) is int and n >= 0 for n in (*shape, begin, stop))
    except (TypeError, KeyError, ValueError):
        whole = False
    if not whole:
        raise CheckpointError(file, name, "is described without a dtype, a shape or a place; the header was altered")
    if dtype not in _DTYPES:
        raise CheckpointError(file, name, f"has dtype {dtype!r}; accepted: {', '.join(_DTYPES)}")
    nbytes = math.prod(shape) * _DTYPES[dtype].itemsize
    if stop - begin != nbytes:
        raise CheckpointError(
            file, name, f"takes {stop - begin} bytes where {dtype} of shape {list(shape)} takes {nbytes}"
        )
    return TensorEntry(name, _DTYPES[dtype], shape, nbytes, file), begin, stop


def component_files(folder: Path, name: str, variant: str | None = None) -> ComponentFiles | None:
    """The weight files of the component in `folder / name`, validated; None for a component without weights.

    Raises:
        CheckpointError: a file is missing, truncated or altered.
    """
    place = folder / name
    if not place.is_dir():
        return None
    quantised = _is_quantised(place / "config.json")
    for wanted in dict.fromkeys((variant, None)):
        found = _safetensors_of(place, wanted)
        if found is not None:
            files, tensors = found
            return ComponentFiles(name, files, tensors, wanted, True, quantised)
    others = sorted((*place.glob("*.bin"), *place.glob("*.pt"), *place.glob("*.ckpt"), *place.glob("*.gguf")))
    return ComponentFiles(name, tuple(others), {}, None, False, quantised) if others else None


def variants_of(folder: Path, names: Iterable[str]) -> set[str]:
    """Variants that at least one of the components has weights of, told by the names of its files."""
    found = (_VARIANT.fullmatch(file.name) for name in names for file in (folder / name).glob("*.*.*"))
    return {match["variant"] for match in found if match is not None}


def _is_quantised(config: Path) -> bool:
    try:
        return "quantization_config" in json.loads(config.read_text())
    except (OSError, ValueError):
        return False


def _safetensors_of(place: Path, variant: str | None) -> tuple[tuple[Path, ...], dict[str, TensorEntry]] | None:
    suffix = f".{variant}" if variant else ""
    index = next(iter(sorted(place.glob(f"*.safetensors.index{suffix}.json"))), None)
    if index is not None:
        return _sharded(index)
    plain = [p for p in sorted(place.glob(f"*{suffix}.safetensors")) if variant or p.name.count(".") == 1]
    shard = next((m for p in plain if (m := re.search(r"-(\d+)-of-(\d+)\.safetensors$", p.name))), None)
    if shard is not None:
        raise CheckpointError(place, None, f"holds shards ({plain[0].name}) and no *.safetensors.index{suffix}.json")
    preferred = [p for p in plain if p.name.startswith(("diffusion_pytorch_model", "model"))] or plain
    return ((preferred[0],), read_header(preferred[0])) if preferred else None


def _sharded(index: Path) -> tuple[tuple[Path, ...], dict[str, TensorEntry]]:
    try:
        where: dict[str, str] = json.loads(index.read_text())["weight_map"]
        names = list(dict.fromkeys(where.values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(index, None, f"is not an index of shards ({error!r})") from None
    tensors: dict[str, TensorEntry] = {}
    files = []
    for name in names:
        # A name with a path in it could reach any file of this machine.
        if Path(name).name != name:
            raise CheckpointError(index, None, f"names the shard {name!r}; accepted: a file beside the index")
        file = index.parent / name
        first = next(t for t, n in where.items() if n == name)
        if not file.is_file():
            raise CheckpointError(file, first, "is listed in the index and its file is missing; download it again")
        held = read_header(file)
        for tensor, shard in where.items():
            if shard == name and tensor not in held:
                raise CheckpointError(file, tensor, f"is listed in {index.name} and not in the file")
        tensors.update({t: e for t, e in held.items() if where.get(t, name) == name})
        files.append(file)
    return tuple(files), tensors


def find_tensor(text: str, tensors: Iterable[str]) -> str | None:
    """The longest of the tensors' names that `text` mentions."""
    return max((t for t in tensors if re.search(rf"(?<![\w.]){re.escape(t)}(?![\w.])", text)), key=len, default=None)
