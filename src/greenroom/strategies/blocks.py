"""Hooks on a block that let it in and out of its ring."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from greenroom.errors import OffloadError
from greenroom.strategies.brackets import Bracket
from greenroom.streaming import BlockStream, StreamedBlock


def around_block(module: nn.Module, stream: BlockStream, block: StreamedBlock) -> Bracket:
    before, after = functools.partial(_before, stream, block), functools.partial(_after, stream, block)

    def hooks(module: nn.Module) -> list[Any]:
        return [
            module.register_forward_pre_hook(before, prepend=True),
            module.register_forward_hook(after, always_call=True),
        ]

    return Bracket(module, before, after, hooks)


def _before(stream: BlockStream, block: StreamedBlock, module: nn.Module, args: Any, kwargs: Any = None) -> None:
    stream.enter(block)


def _after(stream: BlockStream, block: StreamedBlock, module: nn.Module, args: Any, output: Any) -> None:
    stream.leave(block)
    if block.fixed is None and torch.is_grad_enabled():
        _refuse_gradients(output)


def _refuse_gradients(output: Any) -> None:
    """Lets backward fail where it would read weights whose place another block has taken since."""
    for value in output if isinstance(output, list | tuple) else (output,):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            value.register_hook(_no_gradients)


def _no_gradients(gradient: torch.Tensor) -> None:
    raise OffloadError(
        "gradients reached a streamed block, whose weights have left the device since its forward; streaming is for "
        'inference: use mode "module", or disable() the offload to train'
    )
