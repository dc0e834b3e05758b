"""What nobody declared: the role of a module and the blocks in it, found by type, structure and size.

An attribute's name alone never decides: people rename components, and two libraries use one name for two things.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from greenroom.host import module_tensors, unique_bytes

DIT = "dit"
TEXT_ENCODER = "text_encoder"
IMAGE_ENCODER = "image_encoder"
VAE = "vae"
COMPANION = "companion"  # runs beside a DiT in every step: ControlNets, adapters
OTHER = "other"

# A list of blocks is worth streaming when it holds at least this share of its component.
_WORTHWHILE = 0.02
# A child of a list that holds more than this share of the component is split where it has lists of its own.
_TOO_LARGE = 0.15
# ... if these lists hold more than this share of it; the experts of one block are no blocks of their own.
_MOSTLY = 0.8

_LIBRARY_ROLES = (
    ("diffusers.models.transformers", DIT),
    ("diffusers.models.unets", DIT),
    ("diffusers.models.autoencoders", VAE),
    ("diffusers.models.vq_model", VAE),
    ("diffusers.models.controlnets", COMPANION),
    ("diffusers.models.controlnet", COMPANION),
    ("diffusers.models.adapter", COMPANION),
)


def uncompiled(module: Any) -> Any:
    """The module inside what `torch.compile(module)` returns; anything else as it is."""
    inner = getattr(module, "_orig_mod", None) if type(module).__name__ == "OptimizedModule" else None
    return module if inner is None else inner


def role_of(module: nn.Module) -> str:
    """The role of an undeclared module: from the library it comes from, then from what it is made of."""
    for cls in type(module).__mro__:
        for prefix, role in _LIBRARY_ROLES:
            if cls.__module__.startswith(prefix):
                return role
        if cls.__module__ == "transformers.modeling_utils":
            return _encoder_role(module)
    if callable(getattr(module, "encode", None)) and callable(getattr(module, "decode", None)):
        return VAE
    if not find_blocks(module):
        return OTHER
    return TEXT_ENCODER if _reads_tokens(module) else DIT


def _encoder_role(module: nn.Module) -> str:
    return TEXT_ENCODER if _reads_tokens(module) else IMAGE_ENCODER


def _reads_tokens(module: nn.Module) -> bool:
    """Whether the module owns an embedding the size of its vocabulary."""
    config = getattr(module, "config", None)
    for found in (config, getattr(config, "text_config", None)):
        size = getattr(found, "vocab_size", None)
        if isinstance(size, int):
            return True
    return any(isinstance(m, nn.Embedding) and m.num_embeddings >= 256 for m in module.modules())


def find_blocks(module: nn.Module) -> tuple[str, ...]:
    """Dotted names of the blocks in an undeclared module, in the order of registration.

    A block is a child of a ModuleList that computes with parts of its own. A child that holds a large share of the
    whole is split into its own blocks where it has any, as the stages of a U-Net do.
    """
    total = unique_bytes(module_tensors(module))
    if total == 0:
        return ()
    found: list[str] = []
    _search(module, "", total, found)
    return tuple(found)


def _search(module: nn.Module, prefix: str, total: int, found: list[str]) -> None:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, nn.ModuleList) and _is_block_list(child, total):
            for index, block in child.named_children():
                inner: list[str] = []
                size = unique_bytes(module_tensors(block))
                if size > _TOO_LARGE * total:
                    _search(block, "", total, inner)
                whole = f"{path}.{index}"
                covered = unique_bytes(t for i in inner for t in module_tensors(block.get_submodule(i)))
                found += [f"{whole}.{i}" for i in inner] if covered > _MOSTLY * size else [whole]
        else:
            _search(child, f"{path}.", total, found)


def _is_block_list(modules: nn.ModuleList, total: int) -> bool:
    children = [child for child in modules if child is not None]  # some models leave places empty
    if not children or unique_bytes(t for c in children for t in module_tensors(c)) < _WORTHWHILE * total:
        return False
    # A layer such as a Linear may be read by `F.linear(x, layer.weight)` without ever being called.
    return all(
        any(True for _ in child.children()) and type(child).forward is not nn.Module.forward for child in children
    )
