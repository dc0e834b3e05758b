"""Discovery on every model class that diffusers exports, on the meta device: blocks are found, and the bytes add up."""

from __future__ import annotations

import inspect
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

from greenroom import catalog, discovery
from greenroom.declare import block_paths
from greenroom.host import module_tensors, unique_bytes

pytestmark = pytest.mark.filterwarnings("ignore")
ROOMS = ("diffusers.models.transformers", "diffusers.models.unets", "diffusers.models.autoencoders")

# For classes that cannot be made without arguments.
SMALL: dict[str, dict[str, Any]] = {
    "AutoencoderKLHunyuanImage": {
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 4,
        "block_out_channels": (32, 32),
        "layers_per_block": 1,
        "spatial_compression_ratio": 2,
        "sample_size": 8,
    },
    "DreamLiteTransformer2DModel": {"in_channels": 32, "num_attention_heads": 2, "attention_head_dim": 16},
    "EasyAnimateTransformer3DModel": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "time_embed_dim": 8,
        "text_embed_dim": 8,
        "num_layers": 2,
        "sample_width": 8,
        "sample_height": 8,
        "patch_size": 2,
    },
    "HiDreamImageTransformer2DModel": {
        "patch_size": 2,
        "in_channels": 4,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "caption_channels": [8, 8],
        "text_emb_dim": 8,
        "num_routed_experts": 2,
        "num_activated_experts": 1,
        "axes_dims_rope": (8, 4, 4),
        "max_resolution": (8, 8),
        "llama_layers": [0, 1, 0, 1],
    },
    "HunyuanDiT2DModel": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": 4,
        "patch_size": 2,
        "sample_size": 8,
        "num_layers": 4,
        "hidden_size": 32,
        "cross_attention_dim": 8,
        "pooled_projection_dim": 8,
        "cross_attention_dim_t5": 8,
    },
    "LatteTransformer3DModel": {
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "in_channels": 4,
        "num_layers": 2,
        "sample_size": 8,
        "patch_size": 2,
        "caption_channels": 8,
        "norm_type": "ada_norm_single",
        "cross_attention_dim": 16,
    },
    "LuminaNextDiT2DModel": {
        "sample_size": 8,
        "patch_size": 2,
        "in_channels": 4,
        "hidden_size": 32,
        "num_layers": 2,
        "num_attention_heads": 2,
        "num_kv_heads": 1,
        "multiple_of": 8,
        "cross_attention_dim": 8,
    },
    "OmniGenTransformer2DModel": {
        "in_channels": 4,
        "rope_scaling": {"long_factor": [1.0] * 48, "short_factor": [1.0] * 48},
    },
    "Transformer2DModel": {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 32, "num_layers": 2},
    "TransformerTemporalModel": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": 32,
        "num_layers": 2,
    },
}
# Classes without blocks of their own, and why.
NO_BLOCKS = {
    "AutoencoderTiny": "plain sequences of convolutions",
    "LongCatAudioDiTVae": "plain sequences of convolutions",
}
NOT_MADE = {"RFD4ProteinaAutoencoder": "needs the tables of a protein's atoms"}


def exported() -> list[str]:
    found = []
    for name in dir(diffusers):
        cls = getattr(diffusers, name, None)
        if inspect.isclass(cls) and issubclass(cls, nn.Module) and cls.__module__.startswith(ROOMS):
            found.append(name)
    return found


def make(name: str) -> nn.Module:
    with torch.device("meta"):
        return getattr(diffusers, name)(**SMALL.get(name, {}))


def size(module: nn.Module) -> int:
    return unique_bytes(module_tensors(module))


def test_the_exceptions_are_still_exported() -> None:
    assert {*SMALL, *NO_BLOCKS, *NOT_MADE} <= set(exported())
    assert len(exported()) > 100


@pytest.mark.parametrize("name", exported())
def test_blocks_are_found_and_the_bytes_add_up(name: str) -> None:
    if name in NOT_MADE:
        pytest.skip(NOT_MADE[name])
    model = make(name)
    total = size(model)
    assert total == sum({id(t): t.nbytes for t in (*model.parameters(), *model.buffers())}.values())
    role = discovery.role_of(model)
    cls = getattr(diffusers, name)
    assert role == (discovery.VAE if cls.__module__.startswith(ROOMS[2]) else discovery.DIT)
    blocks = discovery.find_blocks(model)
    if name in NO_BLOCKS:
        assert not blocks
        return
    assert blocks
    assert len(set(blocks)) == len(blocks)
    modules = [model.get_submodule(path) for path in blocks]
    # No block lies inside another, and each is called: it computes with parts of its own.
    inside = [id(m) for block in modules for m in block.modules()]
    assert len(inside) == len(set(inside))
    assert all(type(block).forward is not nn.Module.forward for block in modules)
    of_blocks = sum(map(size, modules))
    assert of_blocks + rest(model, modules) == total
    if role == discovery.DIT and name not in SMALL:  # of real size
        assert of_blocks > 0.85 * total  # nearly all can be streamed
        assert max(map(size, modules)) < 0.6 * total


def rest(model: nn.Module, blocks: list[nn.Module]) -> int:
    inside = {id(t) for block in blocks for t in module_tensors(block)}
    return unique_bytes(t for t in module_tensors(model) if id(t) not in inside)


@pytest.mark.parametrize("name", [n for n in exported() if n in catalog.CATALOG])
def test_what_is_declared_is_what_would_be_found(name: str) -> None:
    """For a class that is declared: its blocks hold as much as discovery's would."""
    model = make(name)
    declared = [model.get_submodule(p) for p in block_paths(model, catalog.CATALOG[name].blocks)]
    if not declared:
        assert catalog.CATALOG[name].role == "vae"
        return
    found = [model.get_submodule(p) for p in discovery.find_blocks(model)]
    assert sum(map(size, declared)) > 0.8 * sum(map(size, found))
