"""Declarations for text and image encoders (transformers)."""

from __future__ import annotations

from greenroom.catalog.declaration import ModelDeclaration, Role

_TEXT: Role = "text_encoder"
_GENERATE = ("generate",)


def _language_models(family: str) -> tuple[ModelDeclaration, ModelDeclaration]:
    """A decoder-only language model, bare and with its head."""
    return (
        ModelDeclaration(f"{family}Model", _TEXT, ("layers",)),
        ModelDeclaration(f"{family}ForCausalLM", _TEXT, ("model.layers",), hold=_GENERATE),
    )


def _vision_language_models(
    family: str, vision: str, bare: str | None = None
) -> tuple[ModelDeclaration, ModelDeclaration]:
    """A vision-language model, bare and with its head; a text-only call does not run the vision blocks."""
    return (
        ModelDeclaration(bare or f"{family}Model", _TEXT, ("language_model.layers",), occasional_blocks=(vision,)),
        ModelDeclaration(
            f"{family}ForConditionalGeneration",
            _TEXT,
            ("model.language_model.layers",),
            occasional_blocks=(f"model.{vision}",),
            hold=_GENERATE,
        ),
    )


TEXT_ENCODERS = (
    ModelDeclaration("T5EncoderModel", _TEXT, ("encoder.block",), notes="shared is tied to encoder.embed_tokens."),
    ModelDeclaration("UMT5EncoderModel", _TEXT, ("encoder.block",), notes="shared is tied to encoder.embed_tokens."),
    ModelDeclaration("CLIPTextModel", _TEXT, ("encoder.layers",)),
    ModelDeclaration("CLIPTextModelWithProjection", _TEXT, ("text_model.encoder.layers",)),
    *_vision_language_models("Qwen2_5_VL", "visual.blocks"),
    *_vision_language_models("Qwen3VL", "visual.blocks"),
    *_vision_language_models("Mistral3", "vision_tower.transformer.layers"),
    *_language_models("Llama"),
    *_language_models("Mistral"),
    *_language_models("Qwen2"),
    *_language_models("Qwen3"),
    *_language_models("Gemma"),
    *_language_models("Gemma2"),
    ModelDeclaration("Gemma3TextModel", _TEXT, ("layers",)),
    ModelDeclaration("Gemma3ForCausalLM", _TEXT, ("model.layers",), hold=_GENERATE),
)

IMAGE_ENCODERS = (
    ModelDeclaration("CLIPVisionModel", "resident"),
    ModelDeclaration("CLIPVisionModelWithProjection", "resident"),
    ModelDeclaration("SiglipVisionModel", "resident"),
)
