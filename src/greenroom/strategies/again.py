"""What it takes to run a component again after the device ran out of memory.

Note [Run again only what is as it was]
    An attempt that failed may have changed what the next one reads: a tensor in place, a cache that it appended to,
    the state of a step cache in the model. Tensors are told by their versions, or, where they have none, kept;
    containers and generators are given back what they held. Anything else that might have changed is an obstacle:
    the call then fails, and has made room for the next. Only the outermost call of a component is run again, so that
    what it made for itself, such as the cache of `generate`, is made anew.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from greenroom.accelerator import default_generators

_UNCHANGING = (
    type(None), bool, int, float, complex, str, bytes, range, slice, type, enum.Enum, FunctionType, MethodType,
    BuiltinFunctionType, functools.partial, nn.Module, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
# Of transformers: `generate` works on a copy.
_COPIED = frozenset({"GenerationConfig"})


class Inputs:
    """The inputs of a call as they are now, so that the call can be run a second time.

    Args:
        args, kwargs: what the call is given.
        device: whose global generator the call may use.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> None:
        self._containers: list[tuple[Any, Any]] = []
        self._mappings: list[tuple[Mapping[Any, Any], dict[Any, Any]]] = []
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._unknown: str | None = None
        self._seen: set[int] = set()
        self._generators = [(g, g.get_state()) for g in (torch.default_generator, *default_generators(device))]
        try:
            self._note(args)
            self._note(kwargs)
        except torch.OutOfMemoryError:
            self._unknown = "there was no room to keep its inputs"
            self._kept.clear()

    def _note(self, value: Any) -> None:
        if isinstance(value, _UNCHANGING):
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.is_inference():
                self._kept.append((value, value.clone()))
            else:
                self._versions.append((value, value._version))
        elif isinstance(value, torch.Generator):
            self._generators.append((value, value.get_state()))
        elif isinstance(value, Mapping):
            if type(value) is dict:
                self._containers.append((value, dict(value)))
            else:
                self._mappings.append((value, dict(value.items())))
            for item in value.values():
                self._note(item)
        elif type(value) in (list, set) or isinstance(value, tuple | frozenset):
            if isinstance(value, list | set):
                self._containers.append((value, list(value)))
            for item in value:
                self._note(item)
        elif type(value).__name__ not in _COPIED:
            self._unknown = self._unknown or f"it was given a {type(value).__name__}, which it may have changed"

    def obstacle(self) -> str | None:
        """Why the call cannot be run again, or None."""
        if self._unknown is not None:
            return self._unknown
        if any(t._version != version for t, version in self._versions):
            return "it has changed its inputs in place"
        for mapping, items in self._mappings:
            if len(mapping) != len(items) or any(mapping.get(k) is not v for k, v in items.items()):
                return f"it has changed the {type(mapping).__name__} that it was given"
        return None

    def restore(self) -> None:
        """Puts everything back; where there is no obstacle."""
        for tensor, values in self._kept:
            tensor.copy_(values)
        for container, items in self._containers:
            container.clear()
            container.extend(items) if isinstance(container, list) else container.update(items)
        for generator, state in self._generators:
            generator.set_state(state)


def stateful(module: nn.Module | None) -> str | None:
    """Why a model that remembers something from call to call cannot be run again, or None.

    Asks the hooks of diffusers' step caches, and lets them forget: what they hold is of a call that has failed.
    """
    for child in module.modules() if module is not None else ():
        registry = getattr(child, "_diffusers_hook", None)
        found = [h for h in getattr(registry, "hooks", {}).values() if getattr(h, "_is_stateful", False)]
        if found and registry is not None:
            assert module is not None
            forget = getattr(module, "_reset_stateful_cache", None)
            if forget is not None:
                forget()
            return f"{type(found[0]).__name__} remembers parts of it"
    return None
