"""The trained demo pipeline: where its checkpoint lies, how it is loaded, how it is best called."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from greenroom.loading.quiet import quiet

if TYPE_CHECKING:
    from diffusers import FluxPipeline

# Also written into the checkpoint (greenroom.json), for whoever has the folder but not this module. Nothing
# but height and width is required: FluxPipeline's own defaults for the rest give the same digits, more
# slowly.
CALL_KWARGS: dict[str, Any] = {
    "height": 32,
    "width": 32,
    "num_inference_steps": 8,
    "max_sequence_length": 32,
}


def checkpoint_path() -> Path:
    """The folder of the demo checkpoint: a ``FluxPipeline`` in the layout of ``save_pretrained``, in bfloat16."""
    return Path(__file__).parent / "checkpoint"


def load_pipeline(dtype: torch.dtype = torch.float32) -> FluxPipeline:
    """The demo pipeline on the CPU, quiet, its weights in ``dtype``.

    float32 by default: CPUs without bfloat16 arithmetic emulate it slowly. Raises FileNotFoundError where the
    package was installed without its checkpoint.
    """
    path = checkpoint_path()
    if not (path / "model_index.json").is_file():
        raise FileNotFoundError(f"no demo checkpoint at {path}: train one with scripts/train_demo.py")
    with quiet():
        from diffusers import DiffusionPipeline

        pipe: Any = DiffusionPipeline.from_pretrained(path, dtype=dtype, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe
