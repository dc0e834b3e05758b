"""Declarations for denoisers: diffusion transformers and U-Nets (diffusers)."""

from __future__ import annotations

from greenroom.catalog.declaration import ModelDeclaration

_DOUBLE_THEN_SINGLE = ("transformer_blocks", "single_transformer_blocks")

DENOISERS = (
    ModelDeclaration("FluxTransformer2DModel", "dit", _DOUBLE_THEN_SINGLE),
    ModelDeclaration("Flux2Transformer2DModel", "dit", _DOUBLE_THEN_SINGLE),
    ModelDeclaration("LongCatImageTransformer2DModel", "dit", _DOUBLE_THEN_SINGLE),
    ModelDeclaration("OvisImageTransformer2DModel", "dit", _DOUBLE_THEN_SINGLE),
    ModelDeclaration("QwenImageTransformer2DModel", "dit", ("transformer_blocks",)),
    ModelDeclaration(
        "SD3Transformer2DModel",
        "dit",
        ("transformer_blocks",),
        notes="Skip-layer guidance leaves blocks out of some forwards. pos_embed is a large buffer.",
    ),
    ModelDeclaration(
        "WanTransformer3DModel",
        "dit",
        ("blocks",),
        notes="scale_shift_table, on the root and in each block, is read outside any submodule.",
    ),
    ModelDeclaration(
        "Cosmos3OmniTransformer",
        "dit",
        ("layers",),
        notes="Text and generation pathways share each layer; modality embeddings are root parameters.",
    ),
    ModelDeclaration(
        "UNet2DConditionModel",
        "dit",
        (
            "down_blocks.*.{resnets,attentions}",
            "mid_block.{resnets,attentions}",
            "up_blocks.*.{resnets,attentions}",
        ),
        notes=(
            "Whole stages differ in size by a factor of two hundred, so the lists inside them are streamed. "
            "Down- and upsamplers, single convolutions, stay."
        ),
    ),
)
