"""What is taken of an offloaded component is whole: a deep copy, and its state.

Note [A copy is never half there]
    Python copies a module tensor by tensor, each where it happens to be: some on the device, most on the host. So
    every tensor is copied beforehand from wherever its value is now, and what Python then copies finds these. Ties
    and overlapping views are kept.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from greenroom.host import alias_groups, bytes_of, extent, movable
from greenroom.strategies.kept import plain_tensors


def copy_component(module: nn.Module, state: dict[str, Any], memo: dict[int, Any]) -> nn.Module:
    """A deep copy of `module`, all of it on the host, whatever is on the device now.

    Args:
        module: the component.
        state: its attributes, without those that belong to the offload.
        memo: as `copy.deepcopy` passes it.
    """
    for key, value in host_copies(module).items():
        memo.setdefault(key, value)
    twin = type(module).__new__(type(module))
    memo[id(module)] = twin
    twin.__dict__.update(copy.deepcopy({k: v for k, v in state.items() if k != "_compiled_call_impl"}, memo))
    for original, copied in zip(module.modules(), twin.modules(), strict=True):
        for name in _HOOKS:
            for key, hook in getattr(original, name).items():
                if _ours(hook):
                    getattr(copied, name).pop(key, None)
    return twin


def whole_state(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Gives `state_dict()` values that stand by themselves: those that lie packed on the device are copied to the host.

    `torch.save` refuses one storage that is read with two dtypes, and would write all of it for each tensor in it.
    """
    copies: dict[tuple[Any, ...], torch.Tensor] = {}
    for name, value in state.items():
        on_device = type(value) is torch.Tensor and value.device.type not in ("cpu", "meta")
        if not name.startswith(prefix) or not on_device or not movable(value):
            continue
        if value.untyped_storage().nbytes() > value.nbytes:
            key = (value.data_ptr(), value.dtype, value.size(), value.stride())
            if key not in copies:
                copies[key] = value.cpu()
            state[name] = copies[key]


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_hooks")


def _ours(hook: Any) -> bool:
    hook = getattr(hook, "func", hook)
    return str(getattr(hook, "__module__", "")).startswith("greenroom.")


def host_copies(module: nn.Module) -> dict[int, torch.Tensor]:
    """Copies on the host of all parameters, buffers and kept tensors, by the ids of what they are copies of."""
    tensors = [t for m in module.modules() for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
    known = {id(t) for t in tensors}
    tensors += [t for t in plain_tensors(module) if id(t) not in known]
    copies: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for group in alias_groups(tensors):
            if not movable(group[0]) or group[0].is_inference():
                for tensor in group:
                    copies[id(tensor)] = _like(tensor, tensor.detach().to("cpu", copy=True))
                continue
            base = min(extent(t)[0] for t in group)
            own = torch.empty(max(extent(t)[1] for t in group) - base, dtype=torch.uint8)
            own.copy_(bytes_of(group))
            for tensor in group:
                start, stop = extent(tensor)
                flat = own[start - base : stop - base].view(tensor.dtype)
                copies[id(tensor)] = _like(tensor, flat.as_strided(tensor.size(), tensor.stride()))
    return copies


def _like(original: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value` as what `original` is: a Parameter, or one of its subclasses, with the same attributes."""
    if not isinstance(original, nn.Parameter):
        made = value.detach()
        made.requires_grad_(original.requires_grad and original.is_leaf)
    elif type(value) is torch.Tensor and type(original) is not nn.Parameter:
        made = value.detach().as_subclass(type(original))
        made.requires_grad_(original.requires_grad)
    else:
        made = nn.Parameter(value.detach(), requires_grad=original.requires_grad)
    if original.__dict__:
        made.__dict__.update(copy.deepcopy(original.__dict__))
    return made
