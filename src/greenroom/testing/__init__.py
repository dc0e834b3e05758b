"""Tiny random-weight pipelines of every supported architecture, for tests and for trying things out.

The real pipeline and model classes with the real structure, built offline in a second: block lists, two experts,
tied encoders, fp32 islands, unequal blocks, root parameters. What they draw is noise; what matters is that every
weight counts, so a wrong byte anywhere changes the output.

    from greenroom import testing

    pipe = testing.build_pipeline("wan22_t2v", dtype=torch.bfloat16)
    video = testing.run(pipe, "wan22_t2v")
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from torch import nn

from greenroom.errors import ConfigError
from greenroom.loading.quiet import quiet
from greenroom.testing import architectures as _architectures
from greenroom.testing.weights import randomise, realign

__all__ = ["ARCHITECTURES", "build_pipeline", "call_kwargs", "quiet", "randomise", "realign", "run"]

ARCHITECTURES: tuple[str, ...] = tuple(_architectures.ARCHITECTURES)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def build_pipeline(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> DiffusionPipeline:
    """A tiny pipeline of one architecture, on the CPU, in eval mode, with no progress bar.

    In bfloat16 and float16 the dtypes are what ``from_pretrained(dtype=dtype)`` gives, islands of fp32
    included. All weights are aligned (see `realign`). The global random state is left alone.

    Args:
        name: one of `ARCHITECTURES`.
        dtype: torch.float32, torch.bfloat16 or torch.float16.
        seed: of the weights; the same seed gives the same bits.

    Raises:
        ConfigError: for an unknown name or dtype.
    """
    architecture = _architecture(name)
    if dtype not in DTYPES:
        raise ConfigError("dtype", dtype, ", ".join(map(str, DTYPES)))
    with torch.random.fork_rng(devices=[]):
        pipe: DiffusionPipeline = architecture.build()
    for index, component in enumerate(_modules(pipe)):
        component.eval()
        randomise(component, seed=1000 * seed + index)
    if dtype is not torch.float32:
        # Which tensors stay in fp32 is the loaders' decision alone, so it is left to them.
        with tempfile.TemporaryDirectory() as folder, quiet():
            pipe.save_pretrained(folder)
            pipe = type(pipe).from_pretrained(folder, dtype=dtype)
        for component in _modules(pipe):
            realign(component)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def call_kwargs(name: str, seed: int = 0) -> dict[str, Any]:
    """The arguments of a tiny call: at least three steps, guidance on, a fresh seeded CPU generator.

    Raises:
        ConfigError: for an unknown name.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    return {**_architecture(name).call, "output_type": "pt", "generator": generator}


def run(pipe: DiffusionPipeline, name: str, seed: int = 0) -> torch.Tensor:
    """Call ``pipe`` with `call_kwargs` and return all it made, on the CPU. Compare with ``torch.equal``.

    Returns:
        Images as (1, 3, height, width), videos as (frames, 3, height, width), values from 0 to 1. Where there is
        sound as well ("cosmos3"), one flat tensor: the video, then the samples.

    Raises:
        ConfigError: for an unknown name.
    """
    call: Any = pipe
    made = [part for part in call(**call_kwargs(name, seed), return_dict=False) if part is not None]
    if len(made) > 1:
        return torch.cat([part.flatten().float().cpu() for part in made])
    return made[0].reshape(-1, *made[0].shape[-3:]).cpu()


def _architecture(name: str) -> _architectures.Architecture:
    if name not in _architectures.ARCHITECTURES:
        raise ConfigError("name", name, ", ".join(f'"{known}"' for known in ARCHITECTURES))
    return _architectures.ARCHITECTURES[name]


def _modules(pipe: DiffusionPipeline) -> list[nn.Module]:
    return [component for component in pipe.components.values() if isinstance(component, nn.Module)]
