"""The offloaders that are compared, each as a context manager around a fresh model.

Inside the context the model can be called with inputs on the device; `Running.end_call` is what a pipeline does at
the end of a call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import greenroom
from bench.subjects import Subject
from greenroom.accelerator import Accelerator
from greenroom.config import parse_config
from greenroom.strategies.runtime import Runtime
from greenroom.topology import resolve

LAYERWISE = {"mode": "layer", "components": ["dit"]}


class Pipeline:
    """What the offloaders that know pipelines are given: one DiT."""

    def __init__(self, transformer: nn.Module) -> None:
        self.transformer = transformer

    def maybe_free_model_hooks(self) -> None: ...


@dataclass
class Running:
    """An offloaded model at work.

    Attributes:
        model: call this.
        end_call: the pipeline's call is over.
        handle: Greenroom's, where it is Greenroom.
        block_bytes: what each block takes on the device, where it is Greenroom's runtime.
    """

    model: nn.Module
    end_call: Callable[[], Any] = lambda: None
    handle: Any = None
    block_bytes: Sequence[int] = ()


Offloader = Callable[[Subject, torch.device], contextlib.AbstractContextManager[Running]]


@contextlib.contextmanager
def resident(subject: Subject, device: torch.device) -> Iterator[Running]:
    """No offloading: the whole model on the device."""
    yield Running(subject.model().to(device))


def greenroom_layerwise(resident_layers: int = 0) -> Offloader:
    """Greenroom as a user calls it, with a number of resident blocks."""
    options = {"layer_options": {"dit": {"resident_layers": resident_layers}}} if resident_layers else {}
    return _greenroom({**LAYERWISE, **options}, None)


def greenroom_budget(memory: int) -> Offloader:
    """Greenroom as a user calls it, with a budget in bytes."""
    return _greenroom(LAYERWISE, memory)


def _greenroom(config: dict[str, Any], memory: int | None) -> Offloader:
    @contextlib.contextmanager
    def offloaded(subject: Subject, device: torch.device) -> Iterator[Running]:
        pipe = Pipeline(subject.model())
        handle = greenroom.offload(pipe, config, memory=memory, device=device)
        try:
            yield Running(pipe.transformer, pipe.maybe_free_model_hooks, handle)
        finally:
            handle.disable()

    return offloaded


def greenroom_residents(residents: Collection[int], arena_bytes: int | None) -> Offloader:
    """Greenroom's runtime with a given resident set and arena, to compare sets with each other."""

    @contextlib.contextmanager
    def offloaded(subject: Subject, device: torch.device) -> Iterator[Running]:
        pipe = Pipeline(subject.model())
        config = parse_config(LAYERWISE)
        runtime = Runtime(
            Accelerator.of(device),
            config,
            resolve(pipe, config),
            residents=lambda component: sorted(residents),
            arena_bytes=arena_bytes,
        )
        try:
            sizes = [block.unit.nbytes for track in runtime.stream.tracks for block in track.blocks]
            yield Running(pipe.transformer, runtime.end_call, block_bytes=sizes)
        finally:
            runtime.disable()

    return offloaded


@contextlib.contextmanager
def model_offload(subject: Subject, device: torch.device) -> Iterator[Running]:
    """What `enable_model_cpu_offload` of diffusers installs on the DiT."""
    from accelerate import cpu_offload_with_hook

    model, hook = cpu_offload_with_hook(subject.model(), device)
    yield Running(model, hook.offload)


@contextlib.contextmanager
def sequential_offload(subject: Subject, device: torch.device) -> Iterator[Running]:
    """What `enable_sequential_cpu_offload` of diffusers installs on the DiT."""
    from accelerate import cpu_offload

    model = subject.model()
    cpu_offload(model, device, offload_buffers=len(model._parameters) > 0)
    yield Running(model)


def group_offload(kind: str, *, stream: bool, record: bool = False) -> Offloader:
    """diffusers' group offload: kind "block_level" (groups of one block) or "leaf_level"."""

    @contextlib.contextmanager
    def offloaded(subject: Subject, device: torch.device) -> Iterator[Running]:
        model = subject.model()
        options: dict[str, Any] = {"num_blocks_per_group": 1} if kind == "block_level" else {}
        model.enable_group_offload(device, offload_type=kind, use_stream=stream, record_stream=record, **options)
        yield Running(model)

    return offloaded
