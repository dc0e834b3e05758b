"""Random weights that leave nothing hidden."""

from __future__ import annotations

import math

import torch
from torch import nn


@torch.no_grad()
def randomise(module: nn.Module, seed: int) -> None:
    """Give every parameter of ``module`` a random value, in place, from its own generator.

    The libraries initialise many layers to zero (the last layer, adaLN gates, modality embeddings) or to one;
    with such weights a block that read wrong memory could leave the output unchanged. Matrices and kernels are
    drawn with variance 1 / fan-in, so that signals neither vanish nor blow up; norm scales lie around one.
    Tied parameters are drawn once and stay tied. Running statistics of batch norms are drawn too.

    Args:
        module: any module on the CPU.
        seed: of the generator; the same seed and structure give the same bits.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(tensor: torch.Tensor, scale: float, centre: float = 0.0) -> None:
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
        tensor.copy_(centre + scale * noise)

    for name, parameter in module.named_parameters():
        leaf = name.rpartition(".")[2]
        if leaf in ("gamma", "weight_g") or (leaf == "weight" and parameter.ndim == 1):
            draw(parameter, 0.1, centre=1.0)
        elif parameter.ndim < 2 or leaf.endswith(("_table", "_embed", "_token", "embedding")):
            draw(parameter, 0.1)
        else:
            draw(parameter, 1 / math.sqrt(math.prod(parameter.shape[1:])))
    for norm in module.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm) and norm.running_mean is not None:
            assert norm.running_var is not None
            draw(norm.running_mean, 0.3)
            draw(norm.running_var, 0.3)
            norm.running_var.abs_().add_(0.5)


@torch.no_grad()
def realign(module: nn.Module) -> None:
    """Move every parameter and buffer of ``module`` to freshly allocated memory, in place, value for value.

    The CPU's matrix kernels take another path, with other rounding, where a weight does not start at a multiple
    of 16 bytes, and a checkpoint mapped from a file starts its weights anywhere. Outputs can therefore only be
    compared bit by bit when both sides' weights are aligned, as PyTorch's own allocations are. Parameter
    objects, ties, strides and dtypes are kept.
    """
    for tensor in [*module.parameters(), *module.buffers()]:
        tensor.data = tensor.data.clone()
