"""Views of its weights that a model keeps beyond the forward in which it made them.

A block may hold on to `self.weight.detach()`, or to a part of a table. Such a view points at the bytes where the
weight was at that moment; on the device these belong to another block soon after. It is found by what it keeps alive,
and from then on travels with the weight that it shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

# Attributes are entered this deep: a list of views, a dictionary of tuples of views.
_DEPTH = 2
_OWN = frozenset({"_parameters", "_buffers", "_modules"})


def plain_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Tensors that the modules inside `module` hold as plain attributes, or in containers that are such."""
    seen: set[int] = set()
    for child in module.modules():
        for name, value in child.__dict__.items():
            if name not in _OWN and not name.endswith("_hooks"):
                for tensor in _tensors(value, _DEPTH):
                    if id(tensor) not in seen:
                        seen.add(id(tensor))
                        yield tensor


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, list | tuple | Mapping):
        for item in list(value.values()) if isinstance(value, Mapping) else value:
            yield from _tensors(item, depth - 1)


def views_into(module: nn.Module, slab: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors of `module` whose bytes lie in `slab`, and the tensors that they are views of."""
    start = slab.data_ptr()
    stop = start + slab.nbytes
    found: dict[int, torch.Tensor] = {}
    for kept in plain_tensors(module):
        for tensor in (kept, kept._base):
            if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or not tensor.numel():
                continue
            if tensor.device == slab.device and start <= tensor.data_ptr() < stop:
                found[id(tensor)] = tensor
    return list(found.values())
