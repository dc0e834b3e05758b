"""How much memory a component's activations will take, told without running it.

The component is run on tensors that have shapes and no values, and the sizes of all storages that are alive at once
are added up. What kernels allocate for themselves (workspaces, packed copies) does not show, so the figure comes
with an uncertainty; after the first real call the measured one replaces it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# How far above the figure the real peak may lie. On the tiny pipelines of `greenroom.testing`, on the emulated
# accelerator, transformers were 0.8 to 1.5 times the figure, two-dimensional convolutions up to 1.8 and
# three-dimensional ones up to 3.0: their kernels unfold the input.
UNCERTAINTY = {"transformer": 0.5, "conv2d": 1.0, "conv3d": 2.0}


@dataclass(frozen=True)
class Estimate:
    """Peak bytes of activations beside weights and inputs.

    Attributes:
        nbytes: bytes.
        uncertainty: how much more the real peak may take, relative: 0.5 means up to half as much again.
    """

    nbytes: int
    uncertainty: float

    @property
    def upper(self) -> int:
        """Bytes that should do."""
        return int(self.nbytes * (1 + self.uncertainty)) + 1


def estimate_call(
    module: nn.Module, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Estimate:
    """The activations of `method(module, *args, **kwargs)`, from the shapes of its inputs alone.

    Args:
        module: a component whose weights are on the CPU.
        method: a function of its class.
        args, kwargs: what the method takes; values are not looked at, shapes and dtypes are.

    Raises:
        RuntimeError: the method looks at values, so that it cannot be run without them.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def stand_in(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cpu")

    with torch.no_grad(), mode:
        args, kwargs = tree_map(stand_in, (args, kwargs))
        with _Alive() as alive:
            method(module, *args, **kwargs)
    return Estimate(alive.peak, UNCERTAINTY[_kind(module)])


def _kind(module: nn.Module) -> str:
    """What most of the module's weights belong to."""
    weights = {"conv2d": 0, "conv3d": 0, "transformer": 0}
    for child in module.modules():
        kind = "conv3d" if isinstance(child, nn.Conv3d) else "conv2d" if isinstance(child, nn.Conv2d) else "transformer"
        weights[kind] += sum(p.numel() for p in child.parameters(recurse=False))
    if weights["conv3d"] + weights["conv2d"] > 0.2 * sum(weights.values()):
        return "conv3d" if weights["conv3d"] else "conv2d"
    return "transformer"


class _Alive(TorchDispatchMode):
    """Adds up the storages that operations create, for as long as each is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in before or key in self._known:
                continue
            size = storage.nbytes()
            self._known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key, size).atexit = False
        return result

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
