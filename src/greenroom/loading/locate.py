"""From what a user types to a folder: a local checkpoint, or one from the hub's cache."""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from typing import Any

from greenroom.bounds import check_numbers
from greenroom.errors import ConfigError
from greenroom.loading.errors import CheckpointError

INDEX_FILE = "model_index.json"
# Recommended call arguments that a checkpoint may bring along.
DEFAULTS_FILE = "greenroom.json"
_ACCEPTED = f'a folder with a diffusers {INDEX_FILE}, or a hub id such as "Qwen/Qwen-Image"'
# What a pipeline needs: not the single-file copies that many repositories hold beside the folders.
_WANTED = ("*.json", "*/*.json", "*/*.txt", "*/*.model", "*/*.jinja", "*/*.safetensors", "*/*.bin", "*.py", "*/*.py")


def locate(model: str | os.PathLike[str], *, revision: str | None = None, local_files_only: bool = False) -> Path:
    """The folder of a checkpoint.

    Args:
        model: a folder, or a hub id, which is looked up in the cache of huggingface_hub and downloaded where that
            is allowed (`HF_HUB_OFFLINE=1` and `local_files_only` forbid it).
        revision: branch, tag or commit on the hub.

    Raises:
        ConfigError: it is neither.
        CheckpointError: the hub does not have it, or it is not in the cache and downloading is not allowed.
    """
    name = os.fspath(model)
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / INDEX_FILE).is_file():
            raise ConfigError("model", name, _ACCEPTED, f"the folder has no {INDEX_FILE}")
        return folder
    if not _is_hub_id(name):
        raise ConfigError("model", name, _ACCEPTED, "there is no such folder")
    from huggingface_hub import snapshot_download

    try:
        path = Path(
            snapshot_download(name, revision=revision, local_files_only=local_files_only, allow_patterns=list(_WANTED))
        )
    except (OSError, ValueError) as error:
        raise CheckpointError(name, None, f"could not be had from the hub or its cache: {error}") from None
    if not (path / INDEX_FILE).is_file():
        raise ConfigError("model", name, _ACCEPTED, f"the repository has no {INDEX_FILE}")
    return path


def _is_hub_id(name: str) -> bool:
    parts = name.split("/")
    plain = all(
        p and not p.startswith((".", "~")) and p.replace("-", "").replace("_", "").replace(".", "").isalnum()
        for p in parts
    )
    return len(parts) == 2 and plain


def read_index(folder: Path) -> dict[str, Any]:
    """`model_index.json` of a checkpoint.

    Raises:
        CheckpointError: it is not JSON, or names no pipeline class.
    """
    file = folder / INDEX_FILE
    try:
        index = json.loads(file.read_text())
        if not isinstance(index, dict) or "_class_name" not in index:
            raise ValueError("it names no pipeline class")
    except ValueError as error:
        raise CheckpointError(file, None, f"is not the index of a pipeline: {error}") from None
    return index


def recommended_call(folder: Path, kind: type | None = None) -> dict[str, Any]:
    """Arguments that the checkpoint recommends for a call (`greenroom.json`, field "call"); often none.

    Args:
        folder: of the checkpoint.
        kind: the pipeline's class, which must have them as parameters; None where it is not known.

    Raises:
        CheckpointError: the file is there and not readable, or says something that is not accepted.
    """
    file = folder / DEFAULTS_FILE
    if not file.is_file():
        return {}
    try:
        words = json.loads(file.read_text())
        if not isinstance(words, dict):
            raise ValueError("it is no mapping")
    except ValueError as error:
        raise CheckpointError(file, None, f"is not readable: {error}") from None
    call = words.pop("call", {})
    if words:
        raise CheckpointError(file, None, f'has the field "{next(iter(words))}"; accepted: "call"')
    if not isinstance(call, dict):
        raise CheckpointError(file, None, f"call = {call!r} is not accepted; accepted: a mapping")
    accepted = None if kind is None else [*inspect.signature(kind.__call__).parameters][1:]
    for name, value in call.items():
        if accepted is not None and name not in accepted:
            raise CheckpointError(
                file, None, f"call.{name} = {value!r}: no parameter of the pipeline; these are: {', '.join(accepted)}"
            )
    try:
        check_numbers(call)
    except ConfigError as error:
        raise CheckpointError(file, None, f"call.{error}") from None
    return call
