"""Checkpoint -> pipeline whose weights are still in their files.

Note [Weights are mapped, and copied once]
    The loaders of diffusers and transformers build modules on the meta device and then point their parameters at
    the mapped safetensors file. Nothing is read for that: pages come in when a tensor is used first, and that is when
    the offload copies it into its pinned place. The kernel may drop the pages behind the copy, so no second copy of
    the weights ever takes memory of its own. This holds as long as a tensor is wanted in the dtype that it is stored
    in; one that has to be converted takes anonymous memory until its unit was copied. `LoadReport` says which is
    which.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import importlib
import inspect
import json
import os
import re
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from greenroom.errors import ConfigError
from greenroom.host import module_tensors
from greenroom.loading.errors import CheckpointError
from greenroom.loading.headers import ComponentFiles, component_files, find_tensor, variants_of
from greenroom.loading.locate import INDEX_FILE, locate, read_index, recommended_call
from greenroom.loading.quiet import quiet

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ACCEPTED_DTYPES = '"auto" (as stored), ' + ", ".join(f'"{name}"' for name in DTYPES)
_M_MMAP_THRESHOLD = -3  # malloc.h of glibc; other C libraries have no mallopt, or ignore it
_LIBRARIES = ("diffusers", "transformers")
DtypeWord = str | torch.dtype | None


@dataclass(frozen=True)
class ComponentLoad:
    """How one component was loaded; figures in bytes.

    Attributes:
        name: its name in the pipeline.
        class_name: the class of the module.
        weights: bytes of its parameters and buffers.
        mapped: of these, bytes that still lie in the file.
        converted: of these, bytes that took memory of their own: other dtypes, buffers, other formats.
        stored_dtype: the dtype that most of it is stored in, "" where unknown.
        unexpected: tensors of the files that the module has no place for.
        fallback: why the component was not mapped, or None.
    """

    name: str
    class_name: str
    weights: int
    mapped: int
    converted: int
    stored_dtype: str
    unexpected: tuple[str, ...]
    fallback: str | None


@dataclass(frozen=True)
class LoadReport:
    """How a checkpoint was loaded; seconds of wall time."""

    folder: str
    seconds: float
    components: tuple[ComponentLoad, ...]

    @property
    def mapped(self) -> int:
        return sum(c.mapped for c in self.components)

    @property
    def converted(self) -> int:
        return sum(c.converted for c in self.components)

    @property
    def fallbacks(self) -> dict[str, str]:
        """Component -> why it was loaded the library's own way."""
        return {c.name: c.fallback for c in self.components if c.fallback}

    def to_dict(self) -> dict[str, Any]:
        """The same as plain JSON types."""
        return asdict(self)


@dataclass(frozen=True)
class Loaded:
    """A pipeline on the CPU, and how it got there.

    Attributes:
        pipeline: the diffusers pipeline.
        report: where its weights lie.
        recommended: call arguments that the checkpoint recommends.
    """

    pipeline: Any
    report: LoadReport
    recommended: dict[str, Any]


def load_checkpoint(
    model: str | os.PathLike[str],
    *,
    dtype: DtypeWord | Mapping[str, DtypeWord] = None,
    variant: str | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
    trust_remote_code: bool = False,
) -> Loaded:
    """Loads a diffusers checkpoint without reading its weights.

    Args:
        model: a folder, or a hub id.
        dtype: None or "auto" keeps what is stored, component by component; else a torch dtype or its name, or a
            mapping from component names to these. What a model keeps in float32 stays in float32.
        variant: such as "fp16"; a component without files of that variant is loaded from its plain ones, and a
            variant that no component has is refused.
        revision: branch, tag or commit on the hub.
        local_files_only: download nothing.
        trust_remote_code: run Python code that the checkpoint brings along.

    Raises:
        ConfigError: a word is not accepted.
        CheckpointError: the checkpoint is not whole; names the file and the tensor.
    """
    check_dtype(dtype)
    started = time.monotonic()
    folder = locate(model, revision=revision, local_files_only=local_files_only)
    index = read_index(folder)
    if not trust_remote_code:
        _refuse_remote_code(folder, index)
    # Every header is read before the first module is built.
    entries = _entries(folder / INDEX_FILE, index)
    _check_variant(folder, entries, variant)
    files = {name: found for name in entries if (found := component_files(folder, name, variant)) is not None}
    _check_all_present(folder, entries, files)
    if any((d := _dtype_of(dtype, n, f)) is not None and d != f.stored_dtype for n, f in files.items()):
        _give_freed_memory_back()
    modules: dict[str, nn.Module] = {}
    unexpected: dict[str, tuple[str, ...]] = {}
    with quiet():
        for name, found in files.items():
            cls = _module_class(*entries[name])
            if cls is not None:
                modules[name], unexpected[name] = _load_module(cls, folder, found, _dtype_of(dtype, name, found))
        try:
            pipeline = _assemble(folder, index, modules)
            if pipeline is None:
                modules.clear()
                pipeline = _its_own_way(folder, variant, trust_remote_code, dtype)
        except CheckpointError:
            raise
        except (ValueError, RuntimeError, KeyError, TypeError, AttributeError, OSError) as error:
            raise CheckpointError(folder, None, f"its pipeline could not be put together: {error}") from error
    report = _report(folder, started, pipeline, files, modules, unexpected)
    return Loaded(pipeline, report, recommended_call(folder, type(pipeline)))


def check_dtype(dtype: object, field: str = "dtype") -> None:
    """Raises ConfigError for a dtype that is not accepted."""
    if isinstance(dtype, Mapping):
        for name, value in dtype.items():
            check_dtype(value, f"{field}.{name}")
        return
    if dtype is None or dtype == "auto" or (isinstance(dtype, str) and dtype in DTYPES):
        return
    if not (isinstance(dtype, torch.dtype) and dtype in DTYPES.values()):
        raise ConfigError(field, dtype, ACCEPTED_DTYPES)


def _dtype_of(dtype: Any, name: str, files: ComponentFiles) -> torch.dtype | None:
    if isinstance(dtype, Mapping):
        dtype = dtype.get(name, dtype.get("default"))
    if isinstance(dtype, str) and dtype != "auto":
        return DTYPES[dtype]
    if isinstance(dtype, torch.dtype):
        return dtype
    stored = files.stored_dtype
    return stored if stored in DTYPES.values() else None


def _give_freed_memory_back() -> None:
    """Keeps tensors of a mebibyte and more out of the C library's heap, which would not shrink when they are freed.

    Converted weights are freed block by block while the offload copies them. glibc moves its threshold up to 32 MiB
    when large allocations are freed, and from then on the holes that they leave would stay with the process.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**20)


def _refuse_remote_code(folder: Path, index: dict[str, Any]) -> None:
    name = index["_class_name"]
    wanted = None
    if isinstance(name, list):
        wanted = f"{INDEX_FILE} asks for the pipeline class {name}"
    for component, value in index.items():
        if isinstance(value, list) and value and isinstance(value[0], str) and (folder / component).is_dir():
            config = folder / component / "config.json"
            if (folder / component / f"{value[0]}.py").is_file():
                wanted = f"{component} brings {value[0]}.py"
            elif config.is_file() and "auto_map" in config.read_text():
                with contextlib.suppress(ValueError):
                    if json.loads(config.read_text()).get("auto_map") and _module_class(*value) is None:
                        wanted = f"{component}/config.json asks for code of its own"
    if wanted:
        raise ConfigError(
            "trust_remote_code", False, f"true for this checkpoint, since {wanted}", "read that code before you run it"
        )


def _entries(file: Path, index: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Component -> (library, class) of those that the checkpoint has."""
    kind = pipeline_class(index)
    required = kind._get_signature_keys(kind)[0] if kind is not None else ()
    entries = {}
    for name, value in index.items():
        if name.startswith("_") or value == [None, None]:
            continue
        if isinstance(value, list) and len(value) == 2 and all(isinstance(word, str) for word in value):
            entries[name] = (value[0], value[1])
        elif name in required:
            raise CheckpointError(file, None, f'{name} = {value!r} is not accepted; accepted: ["library", "Class"]')
    return entries


def _check_variant(folder: Path, names: Iterable[str], variant: str | None) -> None:
    if variant is None:
        return
    known = sorted(variants_of(folder, names))
    if variant not in known:
        plain = "leave it out for the plain weights"
        words = ", ".join(f'"{name}"' for name in known) if known else "none, since this checkpoint has no variants"
        raise ConfigError("variant", variant, words, plain)


def _check_all_present(folder: Path, entries: dict[str, Any], files: dict[str, ComponentFiles]) -> None:
    for name, (library, class_name) in entries.items():
        place = folder / name
        if library in _LIBRARIES and not place.is_dir():
            raise CheckpointError(place, None, f"is missing, and {INDEX_FILE} lists it; download it again")
        if _module_class(library, class_name) is None:
            continue
        if name not in files:
            raise CheckpointError(place, None, f"has no weight files, and {INDEX_FILE} lists it; download it again")
        if not (place / "config.json").is_file():  # transformers would assume a model of its own
            raise CheckpointError(place, None, "has no config.json; download it again")


def _module_class(library: str, name: str) -> type[nn.Module] | None:
    """The class of a component that is a module of diffusers or transformers; None for what is left to diffusers."""
    if library not in _LIBRARIES:
        return None
    cls = getattr(importlib.import_module(library), name, None)
    return cls if inspect.isclass(cls) and issubclass(cls, nn.Module) else None


def _load_module(
    cls: Any, folder: Path, files: ComponentFiles, dtype: torch.dtype | None
) -> tuple[nn.Module, tuple[str, ...]]:
    arguments: dict[str, Any] = {"output_loading_info": True, "local_files_only": True, "variant": files.variant}
    if dtype is not None:
        arguments["dtype"] = dtype
    if files.safetensors:
        arguments["use_safetensors"] = True
    if cls.__module__.startswith("transformers."):
        # It tells which tensors do not fit only when it is asked to go on; the answer is taken below.
        arguments["ignore_mismatched_sizes"] = True
    shown = files.files[0] if len(files.files) == 1 else folder / files.name
    try:
        module, info = cls.from_pretrained(str(folder / files.name), **arguments)
    except (ValueError, RuntimeError, OSError, KeyError, TypeError, AttributeError) as error:
        tensor = find_tensor(str(error), files.tensors)
        file = files.tensors[tensor].file if tensor else shown
        raise CheckpointError(file, tensor, f"could not be loaded as {cls.__name__}: {error}") from error
    missing = sorted(_names(info.get("missing_keys", ())))
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise CheckpointError(
            shown, missing[0], f"{cls.__name__} needs it and no file holds it{more}; it would be filled with noise"
        )
    for name, found, wanted in _mismatched(info.get("mismatched_keys", ())):
        file = files.tensors[name].file if name in files.tensors else shown
        raise CheckpointError(file, name, f"has shape {list(found)}, and {cls.__name__} wants {list(wanted)}")
    unexpected = tuple(sorted(_names(info.get("unexpected_keys", ()))))
    if unexpected:
        _tell_unexpected(module, unexpected, shown, folder / files.name / "config.json")
    module.eval()
    return module, unexpected


def _tell_unexpected(module: nn.Module, unexpected: tuple[str, ...], file: Path, config: Path) -> None:
    """Warns of tensors that a module has no place for; refuses a module without a single one of its blocks."""
    kind = type(module).__name__
    for name, child in module.named_modules():
        if isinstance(child, nn.ModuleList) and not len(child):
            lost = [key for key in unexpected if f".{name}." in f".{key}"]
            if lost:
                raise CheckpointError(
                    config,
                    None,
                    f"{_without_blocks(config)} gives {kind} no {name} at all, and {file.name} holds {len(lost)} "
                    f"tensors of them, such as {lost[0]!r}",
                )
    few = ", ".join(map(repr, unexpected[:3])) + (", ..." if len(unexpected) > 3 else "")
    warnings.warn(
        f"{file}: {kind}, as {config.name} describes it, has no place for {len(unexpected)} of the tensors that are "
        f"stored there ({few}); they are left out",
        stacklevel=2,
    )


def _without_blocks(config: Path) -> str:
    """The fields of a config that ask for less than one block, in words."""
    words = json.loads(config.read_text())
    fields = [f"{k} = {v}" for k, v in words.items() if type(v) is int and v < 1 and re.search("layer|block|depth", k)]
    return " and ".join(fields) or "it"


def _names(keys: Any) -> set[str]:
    return {k if isinstance(k, str) else str(k[0]) for k in keys}


def _mismatched(keys: Any) -> Iterator[tuple[str, Any, Any]]:
    for key in keys:
        if not isinstance(key, str) and len(key) >= 3:
            yield str(key[0]), key[1], key[2]


def pipeline_class(index: Mapping[str, Any]) -> Any | None:
    """The pipeline's class that an index (see `read_index`) names; None where it is not one of diffusers."""
    import diffusers

    name = index["_class_name"]
    cls = getattr(diffusers, name, None) if isinstance(name, str) else None
    return cls if inspect.isclass(cls) and issubclass(cls, diffusers.DiffusionPipeline) else None


def _assemble(folder: Path, index: dict[str, Any], modules: dict[str, nn.Module]) -> Any | None:
    """The pipeline around the modules, or None where only its own from_pretrained knows how to build it.

    Not by from_pretrained, which loads a module that is optional in a pipeline's signature a second time although it
    is given, and then in another dtype.
    """
    cls = pipeline_class(index)
    if cls is None:
        return None
    required, optional = cls._get_signature_keys(cls)
    arguments: dict[str, Any] = {}
    for name, value in index.items():
        if name in modules:
            arguments[name] = modules[name]
        elif name.startswith("_") or name not in {*required, *optional}:
            continue
        elif not (isinstance(value, list) and len(value) == 2 and all(v is None or isinstance(v, str) for v in value)):
            arguments[name] = value  # a setting of the pipeline
        elif value[0] is None:
            arguments[name] = None
        else:
            library, class_name = value
            kind: Any = getattr(importlib.import_module(library), class_name, None) if library in _LIBRARIES else None
            if not hasattr(kind, "from_pretrained") or (inspect.isclass(kind) and issubclass(kind, nn.Module)):
                return None
            _check_vocabulary(folder / name, kind)
            try:
                arguments[name] = kind.from_pretrained(str(folder / name), local_files_only=True)
            except Exception as error:  # whatever a tokenizer's own code meets
                raise CheckpointError(folder / name, None, f"could not be loaded as {class_name}: {error}") from error
    if set(required) - set(arguments):
        return None
    pipeline: Any = cls(**arguments)
    pipeline.register_to_config(_name_or_path=str(folder))
    return pipeline


def _check_vocabulary(place: Path, kind: Any) -> None:
    """Refuses a tokenizer without its words: transformers makes one that knows none."""
    files = getattr(kind, "vocab_files_names", None)
    wanted = sorted({*files.values(), "tokenizer.json"}) if files else []
    if wanted and not any((place / name).is_file() for name in wanted) and not any(place.glob("*.model")):
        raise CheckpointError(
            place, None, f"holds no vocabulary of a {kind.__name__} ({', '.join(wanted)}); download it again"
        )


def _its_own_way(folder: Path, variant: str | None, trust_remote_code: bool, dtype: Any) -> Any:
    from diffusers import DiffusionPipeline

    arguments: dict[str, Any] = {"trust_remote_code": True} if trust_remote_code else {}
    words = dtype if isinstance(dtype, Mapping) else {"default": dtype}
    chosen = {n: DTYPES[w] if isinstance(w, str) else w for n, w in words.items() if w not in (None, "auto")}
    if chosen:
        arguments["dtype"] = {"default": torch.float32, **chosen} if len(chosen) > 1 else next(iter(chosen.values()))
    return DiffusionPipeline.from_pretrained(folder, variant=variant, local_files_only=True, **arguments)


# ---------------------------------------------------------------------- the report


def _report(
    folder: Path,
    started: float,
    pipeline: Any,
    files: dict[str, ComponentFiles],
    modules: dict[str, nn.Module],
    unexpected: dict[str, tuple[str, ...]],
) -> LoadReport:
    mapped_at = _MappedFiles()
    lines = []
    for name, module in pipeline.components.items():
        if not isinstance(module, nn.Module):
            continue
        found = files.get(name)
        tensors = list(module_tensors(module))
        weights = sum(t.nbytes for t in tensors)
        mapped = sum(t.nbytes for t in tensors if t.device.type == "cpu" and mapped_at.holds(t.data_ptr()))
        stored = found.stored_dtype if found else None
        lines.append(
            ComponentLoad(
                name=name,
                class_name=type(module).__name__,
                weights=weights,
                mapped=mapped,
                converted=weights - mapped,
                stored_dtype=str(stored).removeprefix("torch.") if stored else "",
                unexpected=unexpected.get(name, ()),
                fallback=_fallback(found, name in modules),
            )
        )
    return LoadReport(str(folder), time.monotonic() - started, tuple(lines))


def _fallback(files: ComponentFiles | None, ours: bool) -> str | None:
    if files is None or not ours:
        return "loaded by the pipeline's own from_pretrained: it has a class that is not of diffusers or transformers"
    if files.quantised:
        return "loaded by from_pretrained: quantised weights are made by the quantiser"
    if not files.safetensors:
        return f"loaded by from_pretrained: {files.files[0].name} is not safetensors and is read, not mapped"
    return None


class _MappedFiles:
    """Address ranges of this process that are mapped from weight files (Linux; elsewhere none are known)."""

    def __init__(self) -> None:
        ranges = []
        with contextlib.suppress(OSError), open("/proc/self/maps") as lines:
            for line in lines:
                parts = line.split(maxsplit=5)
                if len(parts) == 6 and parts[5].startswith("/") and int(parts[4]) != 0:
                    begin, end = (int(x, 16) for x in parts[0].split("-"))
                    ranges.append((begin, end))
        self._ranges = sorted(ranges)
        self._begins = [begin for begin, _ in self._ranges]

    def holds(self, address: int) -> bool:
        i = bisect.bisect_right(self._begins, address) - 1
        return i >= 0 and address < self._ranges[i][1]
