"""Checkpoints: from a folder or a hub id to a pipeline, without a second copy of the weights.

loaded = load_checkpoint("Qwen/Qwen-Image")
handle = greenroom.offload(loaded.pipeline, {"mode": "layer"})  # each tensor is copied here, once
"""

from greenroom.loading.errors import CheckpointError
from greenroom.loading.headers import ComponentFiles, TensorEntry, component_files, read_header
from greenroom.loading.load import (
    DTYPES,
    ComponentLoad,
    Loaded,
    LoadReport,
    check_dtype,
    load_checkpoint,
    pipeline_class,
)
from greenroom.loading.locate import locate, read_index, recommended_call

__all__ = [
    "DTYPES",
    "CheckpointError",
    "ComponentFiles",
    "ComponentLoad",
    "LoadReport",
    "Loaded",
    "TensorEntry",
    "check_dtype",
    "component_files",
    "load_checkpoint",
    "locate",
    "pipeline_class",
    "read_header",
    "read_index",
    "recommended_call",
]
