"""Tiny text encoders in the real classes: four layers each, 20 to 40 kB a layer in fp32."""

from __future__ import annotations

from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

from greenroom.testing.tokenizers import CHAT_TOKENS

LAYERS = 4
HIDDEN = 32
CLIP_HIDDEN = 16
CLIP_VOCABULARY = 514
T5_VOCABULARY = 98
T5_HIDDEN = 32

# The byte tokens come first, so the markers' ids follow from their order.
_ID = {token: 256 + index for index, token in enumerate(CHAT_TOKENS)}
CHAT_VOCABULARY = 256 + len(CHAT_TOKENS)


def clip() -> CLIPTextModel:
    return CLIPTextModel(_clip_config(hidden_act="quick_gelu"))


def clip_with_projection() -> CLIPTextModelWithProjection:
    return CLIPTextModelWithProjection(_clip_config(hidden_act="gelu"))


def _clip_config(hidden_act: str) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=CLIP_VOCABULARY,
        hidden_size=CLIP_HIDDEN,
        intermediate_size=4 * CLIP_HIDDEN,
        projection_dim=CLIP_HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=77,
        hidden_act=hidden_act,
        bos_token_id=CLIP_VOCABULARY - 2,
        eos_token_id=CLIP_VOCABULARY - 1,
        pad_token_id=CLIP_VOCABULARY - 1,
    )


def t5() -> T5EncoderModel:
    return T5EncoderModel(T5Config(**_t5_words()))


def umt5() -> UMT5EncoderModel:
    """Unlike T5, every layer has its own table of relative positions."""
    return UMT5EncoderModel(UMT5Config(**_t5_words()))


def _t5_words() -> dict:
    return {
        "vocab_size": T5_VOCABULARY,
        "d_model": T5_HIDDEN,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": LAYERS,
        "num_heads": 4,
        "feed_forward_proj": "gated-gelu",
        "pad_token_id": 0,
        "eos_token_id": 1,
    }


def qwen3() -> Qwen3Model:
    return Qwen3Model(Qwen3Config(**_decoder_words(), head_dim=8, tie_word_embeddings=True))


def qwen2_5_vl() -> Qwen2_5_VLForConditionalGeneration:
    """With a vision tower, which no text-only call runs, and an untied head, which only generate runs."""
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={
                **_decoder_words(),
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
                "bos_token_id": _ID["<|endoftext|>"],
                "eos_token_id": _ID["<|im_end|>"],
            },
            vision_config={
                "depth": 2,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_heads": 2,
                "out_hidden_size": HIDDEN,
                "fullatt_block_indexes": [1],
            },
            image_token_id=_ID["<|image_pad|>"],
            video_token_id=_ID["<|video_pad|>"],
            vision_start_token_id=_ID["<|vision_start|>"],
            vision_end_token_id=_ID["<|vision_end|>"],
        )
    )


def mistral3() -> Mistral3ForConditionalGeneration:
    return Mistral3ForConditionalGeneration(
        Mistral3Config(
            text_config={
                **_decoder_words(),
                "model_type": "mistral",
                "head_dim": 8,
                "bos_token_id": _ID["<|endoftext|>"],
                "eos_token_id": _ID["<|im_end|>"],
                "sliding_window": None,
            },
            vision_config={
                "model_type": "pixtral",
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "head_dim": 8,
                "image_size": 56,
                "patch_size": 14,
            },
            image_token_index=_ID["<|image_pad|>"],
            spatial_merge_size=2,
            tie_word_embeddings=False,
        )
    )


def _decoder_words() -> dict:
    return {
        "vocab_size": CHAT_VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
    }
