"""Models to offload, shaped like well-known ones and scaled down, each with one step of a denoising loop.

A step takes a latent and returns one of the same shape, so that forwards follow one another as they do when an image
is made, and one wrong weight anywhere shows in the last latent.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Step = Callable[[nn.Module, torch.Tensor, dict[str, Any]], torch.Tensor]


@dataclass
class Subject:
    """One model and how it is run.

    Attributes:
        name: for tables.
        template: the model on the CPU; never offloaded itself.
        containers: attributes that hold the blocks, in execution order.
        latent: the first latent; extras: the other inputs, all on the CPU.
        step: one denoising step.
    """

    name: str
    template: nn.Module
    containers: tuple[str, ...]
    latent: torch.Tensor
    step: Step
    extras: dict[str, Any] = field(default_factory=dict)

    def model(self) -> nn.Module:
        """A fresh copy with the same weights."""
        return copy.deepcopy(self.template)

    def blocks(self, model: nn.Module | None = None) -> list[nn.Module]:
        owner = self.template if model is None else model
        return [block for name in self.containers for block in getattr(owner, name)]

    def block_bytes(self) -> list[int]:
        return [nbytes(block) for block in self.blocks()]


def nbytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers."""
    return sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))


def wan(blocks: int, width: int, side: int, dtype: torch.dtype = torch.float32, tokens: int = 16) -> Subject:
    """Equal blocks: Wan's transformer; `side` x `side` video tokens of one frame, `tokens` text tokens."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=max(1, width // 64),
        attention_head_dim=min(64, width),
        text_dim=width,
        freq_dim=256,
        ffn_dim=4 * width,
        num_layers=blocks,
        rope_max_seq_len=max(32, side),
    )

    def step(model: nn.Module, latent: torch.Tensor, extras: dict[str, Any]) -> torch.Tensor:
        return latent - 0.1 * model(latent, extras["t"], extras["text"], return_dict=False)[0]

    latent = torch.randn(1, 16, 1, 2 * side, 2 * side).to(dtype)
    extras = {"t": torch.tensor([500]), "text": torch.randn(1, tokens, width).to(dtype)}
    return Subject(f"Wan, {blocks} equal blocks", model.to(dtype).eval(), ("blocks",), latent, step, extras)


def flux2(double: int, single: int, heads: int, side: int) -> Subject:
    """A few large blocks, then many small ones, as in FLUX.2: `double` + `single` blocks."""
    from diffusers import Flux2Transformer2DModel

    torch.manual_seed(0)
    model = Flux2Transformer2DModel(
        in_channels=16,
        num_layers=double,
        num_single_layers=single,
        attention_head_dim=32,
        num_attention_heads=heads,
        joint_attention_dim=64,
        axes_dims_rope=(8, 8, 8, 8),
    )

    def step(model: nn.Module, latent: torch.Tensor, extras: dict[str, Any]) -> torch.Tensor:
        return latent - 0.1 * model(latent, return_dict=False, **extras)[0]

    image, text = side * side, side * side
    ids = torch.zeros(image, 4)
    ids[:, 1] = torch.arange(side).repeat_interleave(side)
    ids[:, 2] = torch.arange(side).repeat(side)
    extras = {
        "encoder_hidden_states": torch.randn(1, text, 64),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([3.5]),
        "img_ids": ids,
        "txt_ids": torch.zeros(text, 4),
    }
    containers = ("transformer_blocks", "single_transformer_blocks")
    name = f"FLUX.2, {double} large + {single} small blocks"
    return Subject(name, model.eval(), containers, torch.randn(1, image, 16), step, extras)


def sd35_medium(dual: int, plain: int, heads: int, side: int) -> Subject:
    """Three kinds of block, as in SD3.5 Medium: `dual` with a second attention, `plain`, and one last, smaller one."""
    from diffusers import SD3Transformer2DModel

    torch.manual_seed(0)
    width = 32 * heads
    model = SD3Transformer2DModel(
        sample_size=2 * side,
        num_layers=dual + plain + 1,
        attention_head_dim=32,
        num_attention_heads=heads,
        joint_attention_dim=64,
        caption_projection_dim=width,
        pooled_projection_dim=64,
        pos_embed_max_size=2 * side,
        dual_attention_layers=tuple(range(dual)),
        qk_norm="rms_norm",
    )

    def step(model: nn.Module, latent: torch.Tensor, extras: dict[str, Any]) -> torch.Tensor:
        return latent - 0.1 * model(latent, return_dict=False, **extras)[0]

    extras = {
        "encoder_hidden_states": torch.randn(1, side * side, 64),
        "pooled_projections": torch.randn(1, 64),
        "timestep": torch.tensor([500]),
    }
    name = f"SD3.5 Medium, {dual} + {plain} + 1 blocks"
    return Subject(name, model.eval(), ("transformer_blocks",), torch.randn(1, 16, 2 * side, 2 * side), step, extras)


class PlainBlock(nn.Module):
    """A transformer block of torch alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, count, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, count, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class PlainDiT(nn.Module):
    """A stack of `PlainBlock`s, for machines without diffusers."""

    _layerwise_offload_blocks_attrs = ("blocks",)

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.blocks = nn.ModuleList(PlainBlock(width) for _ in range(blocks))
        self.leave = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def plain(blocks: int, width: int, tokens: int, dtype: torch.dtype) -> Subject:
    """Equal blocks, torch alone; one sequence of `tokens`."""
    torch.manual_seed(0)
    model = PlainDiT(blocks, width).to(dtype).eval()

    def step(model: nn.Module, latent: torch.Tensor, extras: dict[str, Any]) -> torch.Tensor:
        return latent - 0.1 * model(latent)

    return Subject(
        f"plain DiT, {blocks} equal blocks", model, ("blocks",), torch.randn(1, tokens, width).to(dtype), step
    )


def quieten() -> None:
    """Lets the libraries under test keep their advice to themselves."""
    warnings.filterwarnings("ignore")
    try:
        import diffusers

        diffusers.utils.logging.set_verbosity_error()
    except ImportError:
        pass
