"""One tiny pipeline for each supported architecture, and the call that runs it.

What each one is there for is said beside it: together they hold every structure that makes offloading hard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from diffusers import (
    Cosmos3OmniPipeline,
    Cosmos3OmniTransformer,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    Flux2Pipeline,
    Flux2Transformer2DModel,
    LongCatImagePipeline,
    LongCatImageTransformer2DModel,
    OvisImagePipeline,
    OvisImageTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from PIL import Image

from greenroom.testing import encoders, tokenizers, vaes

# Head size 16, split over the rotary axes in even parts.
_HEADS, _HEAD_SIZE, _AXES = 2, 16, (4, 6, 6)


@dataclass(frozen=True)
class Architecture:
    """How one tiny pipeline is built and called."""

    # Any, since diffusers shows type checkers its import-time dummies instead of the pipelines.
    build: Callable[[], Any]
    call: Mapping[str, Any]


def flux2() -> Flux2Pipeline:
    """Two block lists of different size; a VAE whose statistics are read from outside; an LLM encoder."""
    return Flux2Pipeline(
        scheduler=_shifting_scheduler(),
        vae=vaes.flux2(),
        text_encoder=encoders.mistral3(),
        # A plain tokenizer in the processor's slot: the processor itself needs torchvision.
        tokenizer=tokenizers.chat_tokenizer(),
        transformer=Flux2Transformer2DModel(
            in_channels=32,
            num_layers=4,
            num_single_layers=6,
            attention_head_dim=_HEAD_SIZE,
            num_attention_heads=3,
            joint_attention_dim=3 * encoders.HIDDEN,
            axes_dims_rope=(4, 4, 4, 4),
        ),
    )


def longcat_image() -> LongCatImagePipeline:
    """Two block lists; reads ``pipe.device``; can rewrite its prompt by generate."""
    return LongCatImagePipeline(
        scheduler=_shifting_scheduler(),
        vae=vaes.image(16, quant_convs=False),
        text_encoder=encoders.qwen2_5_vl(),
        tokenizer=tokenizers.chat_tokenizer(),
        text_processor=tokenizers.chat_tokenizer(),
        transformer=LongCatImageTransformer2DModel(
            num_layers=4,
            num_single_layers=8,
            attention_head_dim=_HEAD_SIZE,
            num_attention_heads=_HEADS,
            joint_attention_dim=encoders.HIDDEN,
            pooled_projection_dim=encoders.HIDDEN,
            axes_dims_rope=list(_AXES),
        ),
    )


def ovis_image() -> OvisImagePipeline:
    """Two block lists; a bare decoder-only encoder."""
    return OvisImagePipeline(
        scheduler=_shifting_scheduler(),
        vae=vaes.image(16, quant_convs=False),
        text_encoder=encoders.qwen3(),
        tokenizer=tokenizers.chat_tokenizer(),
        transformer=OvisImageTransformer2DModel(
            num_layers=4,
            num_single_layers=6,
            attention_head_dim=_HEAD_SIZE,
            num_attention_heads=_HEADS,
            joint_attention_dim=encoders.HIDDEN,
            axes_dims_rope=_AXES,
        ),
    )


def qwen_image() -> QwenImagePipeline:
    """One long list of equal blocks; a video VAE for pictures."""
    return QwenImagePipeline(
        scheduler=_shifting_scheduler(),
        vae=vaes.qwen_image(),
        text_encoder=encoders.qwen2_5_vl(),
        tokenizer=tokenizers.chat_tokenizer(),
        transformer=QwenImageTransformer2DModel(
            num_layers=8,
            attention_head_dim=_HEAD_SIZE,
            num_attention_heads=_HEADS,
            joint_attention_dim=encoders.HIDDEN,
            axes_dims_rope=_AXES,
        ),
    )


def sdxl() -> StableDiffusionXLPipeline:
    """A U-Net whose stages differ widely in size; two CLIP encoders; a VAE with loose convolutions."""
    return StableDiffusionXLPipeline(
        vae=vaes.image(4, quant_convs=True),
        text_encoder=encoders.clip(),
        text_encoder_2=encoders.clip_with_projection(),
        tokenizer=tokenizers.clip_tokenizer(),
        tokenizer_2=tokenizers.clip_tokenizer(pad_token="!"),
        unet=UNet2DConditionModel(
            sample_size=8,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            block_out_channels=(16, 24, 40),
            transformer_layers_per_block=(1, 1, 2),
            attention_head_dim=(2, 3, 5),
            norm_num_groups=8,
            cross_attention_dim=2 * encoders.CLIP_HIDDEN,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + encoders.CLIP_HIDDEN,
        ),
        scheduler=EulerDiscreteScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1
        ),
        add_watermarker=False,
    )


def sd3() -> StableDiffusion3Pipeline:
    """Blocks of three sizes in one list; three encoders; a position buffer larger than any block."""
    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=8,
            num_layers=8,
            attention_head_dim=_HEAD_SIZE,
            num_attention_heads=_HEADS,
            joint_attention_dim=encoders.T5_HIDDEN,
            caption_projection_dim=_HEADS * _HEAD_SIZE,
            pooled_projection_dim=2 * encoders.CLIP_HIDDEN,
            pos_embed_max_size=40,
            dual_attention_layers=(0, 1, 2, 3),
            qk_norm="rms_norm",
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vaes.image(16, quant_convs=False),
        text_encoder=encoders.clip_with_projection(),
        tokenizer=tokenizers.clip_tokenizer(),
        text_encoder_2=encoders.clip_with_projection(),
        tokenizer_2=tokenizers.clip_tokenizer(pad_token="!"),
        text_encoder_3=encoders.t5(),
        tokenizer_3=tokenizers.t5_tokenizer(),
    )


def wan22_t2v() -> WanPipeline:
    """Two experts that take turns; parameters on the root and on each block; fp32 islands; a frame loop."""
    return WanPipeline(
        tokenizer=tokenizers.t5_tokenizer(),
        text_encoder=encoders.umt5(),
        vae=vaes.wan(),
        scheduler=_video_scheduler(flow_shift=3.0),
        transformer=_wan_transformer(in_channels=16),
        transformer_2=_wan_transformer(in_channels=16),
        boundary_ratio=0.875,
    )


def wan22_i2v() -> WanImageToVideoPipeline:
    """As above, with the picture encoded by the VAE before the loop and no image encoder (a None component)."""
    return WanImageToVideoPipeline(
        tokenizer=tokenizers.t5_tokenizer(),
        text_encoder=encoders.umt5(),
        vae=vaes.wan(),
        scheduler=_video_scheduler(flow_shift=3.0),
        image_processor=None,
        image_encoder=None,
        transformer=_wan_transformer(in_channels=36),
        transformer_2=_wan_transformer(in_channels=36),
        boundary_ratio=0.9,
    )


def cosmos3() -> Cosmos3OmniPipeline:
    """No text encoder: one list of fused layers with the embedding and head around it; root parameters.

    Draws sound as well, by a decoder whose weights are recomputed at each forward (weight norm).
    """
    return Cosmos3OmniPipeline(
        transformer=Cosmos3OmniTransformer(
            head_dim=12,
            hidden_size=48,
            intermediate_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_hidden_layers=6,
            latent_channel=48,
            patch_latent_dim=4 * 48,
            rope_axes_dim=[2, 2, 2],
            vocab_size=encoders.CHAT_VOCABULARY,
            sound_gen=True,
            sound_dim=8,
            action_gen=True,
            action_dim=4,
            num_embodiment_domains=4,
        ),
        text_tokenizer=tokenizers.chat_tokenizer(),
        vae=vaes.wan22(),
        scheduler=_video_scheduler(flow_shift=10.0),
        sound_tokenizer=vaes.cosmos3_sound(),
        enable_safety_checker=False,
    )


def _shifting_scheduler() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)


def _video_scheduler(flow_shift: float) -> UniPCMultistepScheduler:
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=flow_shift)


def _wan_transformer(in_channels: int) -> WanTransformer3DModel:
    return WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=12,
        in_channels=in_channels,
        text_dim=encoders.T5_HIDDEN,
        freq_dim=32,
        ffn_dim=128,
        num_layers=5,
        rope_max_seq_len=64,
    )


def picture(height: int, width: int) -> Image.Image:
    """A small picture of smooth colour, the same every time."""
    y, x = np.mgrid[0:height, 0:width]
    channels = [x * 255 // width, y * 255 // height, (x + y) * 255 // (width + height)]
    return Image.fromarray(np.stack(channels, axis=-1).astype(np.uint8))


_IMAGE = {"prompt": "a red cube on grass", "height": 64, "width": 64, "num_inference_steps": 3}
_VIDEO = {
    "prompt": "a red cube rolls",
    "negative_prompt": "blurry",
    "height": 32,
    "width": 32,
    "num_frames": 9,
    "num_inference_steps": 4,
    "max_sequence_length": 32,
}

# Guidance is on wherever there is any, so that each step runs two forwards (one batch of two in SDXL and SD3).
ARCHITECTURES: Mapping[str, Architecture] = {
    "flux2": Architecture(flux2, {**_IMAGE, "text_encoder_out_layers": (1, 2, 3)}),
    "longcat_image": Architecture(
        longcat_image, {**_IMAGE, "negative_prompt": "blurry", "enable_prompt_rewrite": False}
    ),
    "ovis_image": Architecture(ovis_image, {**_IMAGE, "negative_prompt": "blurry", "guidance_scale": 3.0}),
    "qwen_image": Architecture(qwen_image, {**_IMAGE, "negative_prompt": "blurry", "true_cfg_scale": 3.0}),
    "sdxl": Architecture(sdxl, {**_IMAGE, "negative_prompt": "blurry"}),
    "sd3": Architecture(sd3, {**_IMAGE, "negative_prompt": "blurry", "max_sequence_length": 64}),
    "wan22_t2v": Architecture(wan22_t2v, {**_VIDEO, "guidance_scale_2": 3.0}),
    "wan22_i2v": Architecture(wan22_i2v, {**_VIDEO, "image": picture(32, 32)}),
    "cosmos3": Architecture(
        cosmos3,
        {
            "prompt": "a red cube rolls",
            "negative_prompt": "blurry",
            "height": 64,
            "width": 64,
            "num_frames": 9,
            "num_inference_steps": 3,
            "enable_sound": True,
        },
    ),
}
