"""Parts of a block that its model calls by themselves, before the block runs.

A few models reach into a block (`self.blocks[0].norm.emb(timestep)`). What lies there cannot pass through the ring
with the rest of the block. The first forward of a streamed component shows it: until that is over, every part of a
block looks whether its block is on the device, and one that finds it absent is given a place beside the blocks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from greenroom.streaming import StreamedBlock

Found = Callable[[StreamedBlock, nn.Module], None]


def watch_parts(modules: Sequence[weakref.ref[nn.Module]], blocks: Sequence[StreamedBlock], found: Found) -> list[Any]:
    """Hooks on what holds tensors inside the blocks; `found` is told who was called while its block was away.

    Compiled blocks are left out: a hook inside would break their graph.
    """
    handles = []
    for reference, block in zip(modules, blocks, strict=True):
        module = reference()
        if module is None or module.__dict__.get("_compiled_call_impl") is not None:
            continue
        for part in module.modules():
            if part is not module and (part._parameters or part._buffers):
                handles.append(part.register_forward_pre_hook(_Look(block, found), prepend=True))
    return handles


class _Look:
    def __init__(self, block: StreamedBlock, found: Found) -> None:
        self.block = block
        self.found = found

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self.block.fixed is None and not self.block.unit.bound:
            self.found(self.block, module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _nothing


def _nothing(module: nn.Module, args: Any) -> None: ...
