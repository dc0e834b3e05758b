"""Tiny pipelines of many classes, built in code: what no declaration was written for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers as d
import torch
from PIL import Image
from transformers import (
    CLIPImageProcessor,
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    Gemma2Config,
    Gemma2Model,
    LlamaConfig,
    LlamaModel,
)

from greenroom import testing
from greenroom.testing import encoders, tokenizers, vaes

PROMPT = {"prompt": "a red cube", "num_inference_steps": 3}
SIZE = {"height": 64, "width": 64}
SMALL = {"height": 32, "width": 32}
PICTURE = Image.radial_gradient("L").resize((64, 64)).convert("RGB")
MASK = Image.linear_gradient("L").resize((64, 64))
H = encoders.T5_HIDDEN
CLIP = encoders.CLIP_HIDDEN

Entry = tuple[Callable[[], Any], dict[str, Any]]
ZOO: dict[str, Entry] = {}


def entry(name: str, build: Callable[[], Any], **call: Any) -> None:
    ZOO[name] = (build, call)


def make(name: str) -> Any:
    """The pipeline with random weights, in eval mode, silent."""
    torch.manual_seed(0)
    pipe = ZOO[name][0]()
    for i, component in enumerate(c for c in pipe.components.values() if isinstance(c, torch.nn.Module)):
        component.eval()
        testing.randomise(component, seed=i)
    if hasattr(pipe, "set_progress_bar_config"):
        pipe.set_progress_bar_config(disable=True)
    return pipe


# ---------------------------------------------------------------------- U-Nets with one or two CLIP encoders


def unet(cross: int = CLIP, channels: int = 4, **words: Any) -> Any:
    return d.UNet2DConditionModel(
        **{
            "sample_size": 8,
            "in_channels": channels,
            "out_channels": 4,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "block_out_channels": (16, 32),
            "layers_per_block": 1,
            "attention_head_dim": 4,
            "norm_num_groups": 8,
            "cross_attention_dim": cross,
            **words,
        }
    )


def ddim() -> Any:
    return d.DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, set_alpha_to_one=False
    )


def sd(**words: Any) -> dict[str, Any]:
    return {
        "vae": vaes.image(4, quant_convs=True),
        "text_encoder": encoders.clip(),
        "tokenizer": tokenizers.clip_tokenizer(),
        "unet": unet(),
        "scheduler": ddim(),
        "safety_checker": None,
        "feature_extractor": None,
        **words,
    }


def controlnet(of: Any) -> Any:
    return d.ControlNetModel.from_unet(of, conditioning_embedding_out_channels=(4, 8, 8, 8))


def sd_controlnet(cls: Any) -> Any:
    parts = sd(requires_safety_checker=False)
    return cls(**parts, controlnet=controlnet(parts["unet"]))


def quiet_checker(cls: Any, **words: Any) -> Any:
    return cls(**sd(requires_safety_checker=False, **words))


entry("StableDiffusionPipeline", lambda: quiet_checker(d.StableDiffusionPipeline), **PROMPT, **SIZE)
entry(
    "StableDiffusionImg2ImgPipeline", lambda: quiet_checker(d.StableDiffusionImg2ImgPipeline), **PROMPT, image=PICTURE
)
entry(
    "StableDiffusionInpaintPipeline",
    lambda: quiet_checker(d.StableDiffusionInpaintPipeline),
    **PROMPT,
    **SIZE,
    image=PICTURE,
    mask_image=MASK,
)
entry(
    "StableDiffusionInstructPix2PixPipeline",
    lambda: quiet_checker(d.StableDiffusionInstructPix2PixPipeline, unet=unet(channels=8)),
    **PROMPT,
    image=PICTURE,
)
entry(
    "StableDiffusionControlNetPipeline",
    lambda: sd_controlnet(d.StableDiffusionControlNetPipeline),
    **PROMPT,
    **SIZE,
    image=PICTURE,
)
entry(
    "StableDiffusionControlNetImg2ImgPipeline",
    lambda: sd_controlnet(d.StableDiffusionControlNetImg2ImgPipeline),
    **PROMPT,
    image=PICTURE,
    control_image=PICTURE,
)
entry(
    "StableDiffusionControlNetInpaintPipeline",
    lambda: sd_controlnet(d.StableDiffusionControlNetInpaintPipeline),
    **PROMPT,
    **SIZE,
    image=PICTURE,
    mask_image=MASK,
    control_image=PICTURE,
)
entry("StableDiffusionPAGPipeline", lambda: quiet_checker(d.StableDiffusionPAGPipeline), **PROMPT, **SIZE)
entry(
    "StableDiffusionPAGImg2ImgPipeline",
    lambda: quiet_checker(d.StableDiffusionPAGImg2ImgPipeline),
    **PROMPT,
    image=PICTURE,
)
entry("StableDiffusionSAGPipeline", lambda: quiet_checker(d.StableDiffusionSAGPipeline), **PROMPT, **SIZE)
entry("StableDiffusionPanoramaPipeline", lambda: quiet_checker(d.StableDiffusionPanoramaPipeline), **PROMPT, **SIZE)
entry(
    "LatentConsistencyModelPipeline",
    lambda: d.LatentConsistencyModelPipeline(
        **sd(
            unet=unet(time_cond_proj_dim=16),
            scheduler=d.LCMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear"),
            requires_safety_checker=False,
        )
    ),
    **PROMPT,
    **SIZE,
)
entry(
    "LatentConsistencyModelImg2ImgPipeline",
    lambda: d.LatentConsistencyModelImg2ImgPipeline(
        **sd(
            unet=unet(time_cond_proj_dim=16),
            scheduler=d.LCMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear"),
            requires_safety_checker=False,
        )
    ),
    **{**PROMPT, "num_inference_steps": 4},
    image=PICTURE,
    strength=0.9,
)


def upscale() -> Any:
    parts = sd(unet=unet(channels=7, num_class_embeds=1000))
    for name in ("feature_extractor",):
        parts.pop(name)
    return d.StableDiffusionUpscalePipeline(
        **{k: v for k, v in parts.items() if k != "safety_checker"},
        low_res_scheduler=d.DDPMScheduler(),
        max_noise_level=350,
    )


entry("StableDiffusionUpscalePipeline", upscale, **PROMPT, image=PICTURE.resize((16, 16)))


def animatediff() -> Any:
    parts = sd()
    adapter = d.MotionAdapter(
        block_out_channels=(16, 32), motion_layers_per_block=1, motion_norm_num_groups=2, motion_num_attention_heads=4
    )
    words = {k: v for k, v in parts.items() if k not in ("safety_checker",)}
    return d.AnimateDiffPipeline(**words, motion_adapter=adapter, image_encoder=None)


entry("AnimateDiffPipeline", animatediff, **PROMPT, **SIZE, num_frames=3)


def sdxl_parts(**words: Any) -> dict[str, Any]:
    base = testing.build_pipeline("sdxl")
    return {**{k: v for k, v in base.components.items() if v is not None}, "add_watermarker": False, **words}


entry(
    "StableDiffusionXLImg2ImgPipeline",
    lambda: d.StableDiffusionXLImg2ImgPipeline(**sdxl_parts()),
    **PROMPT,
    image=PICTURE,
    strength=0.9,
)
entry(
    "StableDiffusionXLInpaintPipeline",
    lambda: d.StableDiffusionXLInpaintPipeline(**sdxl_parts()),
    **PROMPT,
    **SIZE,
    image=PICTURE,
    mask_image=MASK,
    strength=0.9,
)
entry("StableDiffusionXLPAGPipeline", lambda: d.StableDiffusionXLPAGPipeline(**sdxl_parts()), **PROMPT, **SIZE)


# ---------------------------------------------------------------------- U-Nets without text


def unet2d() -> Any:
    return d.UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(16, 32),
        layers_per_block=1,
        attention_head_dim=4,
        norm_num_groups=8,
    )


entry("DDPMPipeline", lambda: d.DDPMPipeline(unet=unet2d(), scheduler=d.DDPMScheduler()), num_inference_steps=3)
entry("DDIMPipeline", lambda: d.DDIMPipeline(unet=unet2d(), scheduler=d.DDIMScheduler()), num_inference_steps=3)
entry(
    "LDMSuperResolutionPipeline",
    lambda: d.LDMSuperResolutionPipeline(
        vqvae=d.VQModel(
            block_out_channels=(16, 32),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=3,
            norm_num_groups=8,
        ),
        unet=d.UNet2DModel(
            sample_size=8,
            in_channels=6,
            out_channels=3,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            block_out_channels=(16, 32),
            layers_per_block=1,
            attention_head_dim=4,
            norm_num_groups=8,
        ),
        scheduler=d.DDIMScheduler(),
    ),
    image=PICTURE.resize((32, 32)),
    num_inference_steps=3,
)
entry(
    "DiTPipeline",
    lambda: d.DiTPipeline(
        transformer=d.DiTTransformer2DModel(
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=4,
            out_channels=8,
            num_layers=3,
            sample_size=8,
            patch_size=2,
            num_embeds_ada_norm=1000,
        ),
        vae=vaes.image(4, quant_convs=True),
        scheduler=d.DDIMScheduler(),
    ),
    class_labels=[3],
    num_inference_steps=3,
)


# ---------------------------------------------------------------------- DiTs with T5


def t5() -> dict[str, Any]:
    return {"text_encoder": encoders.t5(), "tokenizer": tokenizers.t5_tokenizer()}


def flow() -> Any:
    return d.FlowMatchEulerDiscreteScheduler()


def pixart(cls: Any) -> Any:
    return cls(
        transformer=d.PixArtTransformer2DModel(
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=4,
            out_channels=8,
            num_layers=3,
            sample_size=8,
            patch_size=2,
            cross_attention_dim=16,
            caption_channels=H,
            use_additional_conditions=False,
        ),
        vae=vaes.image(4, quant_convs=True),
        scheduler=d.DPMSolverMultistepScheduler(),
        **t5(),
    )


TEXT16 = {"max_sequence_length": 16}
entry(
    "PixArtAlphaPipeline",
    lambda: pixart(d.PixArtAlphaPipeline),
    **PROMPT,
    **SIZE,
    **TEXT16,
    use_resolution_binning=False,
    clean_caption=False,
)
entry(
    "PixArtSigmaPipeline",
    lambda: pixart(d.PixArtSigmaPipeline),
    **PROMPT,
    **SIZE,
    **TEXT16,
    use_resolution_binning=False,
    clean_caption=False,
)
entry(
    "PixArtSigmaPAGPipeline",
    lambda: pixart(lambda **p: d.PixArtSigmaPAGPipeline(**p, pag_applied_layers=["blocks.1"])),
    **PROMPT,
    **SIZE,
    **TEXT16,
    use_resolution_binning=False,
    clean_caption=False,
)
entry(
    "AuraFlowPipeline",
    lambda: d.AuraFlowPipeline(
        transformer=d.AuraFlowTransformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            num_mmdit_layers=2,
            num_single_dit_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=H,
            caption_projection_dim=16,
            out_channels=4,
            pos_embed_max_size=64,
        ),
        vae=vaes.image(4, quant_convs=True),
        scheduler=flow(),
        text_encoder=encoders.umt5(),
        tokenizer=tokenizers.t5_tokenizer(),
    ),
    **PROMPT,
    **SIZE,
    **TEXT16,
)


def flux_parts(**words: Any) -> dict[str, Any]:
    return {
        "scheduler": flow(),
        "vae": vaes.image(4, quant_convs=False),
        "text_encoder": encoders.clip(),
        "tokenizer": tokenizers.clip_tokenizer(),
        "text_encoder_2": encoders.t5(),
        "tokenizer_2": tokenizers.t5_tokenizer(),
        "transformer": flux_dit(),
        **words,
    }


def flux_dit(channels: int = 16, **words: Any) -> Any:
    return d.FluxTransformer2DModel(
        **{
            "in_channels": channels,
            "out_channels": 16,
            "num_layers": 2,
            "num_single_layers": 3,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": H,
            "pooled_projection_dim": CLIP,
            "axes_dims_rope": (4, 6, 6),
            "guidance_embeds": True,
            **words,
        }
    )


entry("FluxPipeline", lambda: d.FluxPipeline(**flux_parts()), **PROMPT, **SIZE, **TEXT16)
entry(
    "FluxImg2ImgPipeline",
    lambda: d.FluxImg2ImgPipeline(**flux_parts()),
    **PROMPT,
    **SIZE,
    **TEXT16,
    image=PICTURE,
    strength=0.9,
)
entry(
    "FluxInpaintPipeline",
    lambda: d.FluxInpaintPipeline(**flux_parts()),
    **PROMPT,
    **SIZE,
    **TEXT16,
    image=PICTURE,
    mask_image=MASK,
    strength=0.9,
)
entry(
    "FluxKontextPipeline",
    lambda: d.FluxKontextPipeline(**flux_parts()),
    **PROMPT,
    **SIZE,
    **TEXT16,
    image=PICTURE,
    max_area=64 * 64,
    _auto_resize=False,
)
entry(
    "FluxControlPipeline",
    lambda: d.FluxControlPipeline(**flux_parts(transformer=flux_dit(32))),
    **PROMPT,
    **SIZE,
    **TEXT16,
    control_image=PICTURE,
)
entry(
    "FluxControlNetPipeline",
    lambda: d.FluxControlNetPipeline(
        **flux_parts(),
        controlnet=d.FluxControlNetModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=H,
            pooled_projection_dim=CLIP,
            axes_dims_rope=(4, 6, 6),
        ),
    ),
    **PROMPT,
    **SIZE,
    **TEXT16,
    control_image=PICTURE,
)


def chroma(cls: Any) -> Any:
    return cls(
        scheduler=flow(),
        vae=vaes.image(4, quant_convs=False),
        **t5(),
        transformer=d.ChromaTransformer2DModel(
            in_channels=16,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=H,
            axes_dims_rope=(4, 6, 6),
            approximator_hidden_dim=32,
            approximator_layers=2,
            approximator_num_channels=16,
        ),
    )


entry("ChromaPipeline", lambda: chroma(d.ChromaPipeline), **PROMPT, **SIZE, **TEXT16)
entry(
    "ChromaImg2ImgPipeline",
    lambda: chroma(d.ChromaImg2ImgPipeline),
    **PROMPT,
    **SIZE,
    **TEXT16,
    image=PICTURE,
    strength=0.9,
)


def sd3_parts() -> dict[str, Any]:
    return {k: v for k, v in testing.build_pipeline("sd3").components.items() if v is not None}


SD3_CALL = {"prompt": "a red cube", "num_inference_steps": 3, "max_sequence_length": 32}
entry(
    "StableDiffusion3Img2ImgPipeline",
    lambda: d.StableDiffusion3Img2ImgPipeline(**sd3_parts()),
    **SD3_CALL,
    **SIZE,
    image=PICTURE,
    strength=0.9,
)
entry(
    "StableDiffusion3InpaintPipeline",
    lambda: d.StableDiffusion3InpaintPipeline(**sd3_parts()),
    **SD3_CALL,
    **SIZE,
    image=PICTURE,
    mask_image=MASK,
    strength=0.9,
)
entry(
    "StableDiffusion3ControlNetPipeline",
    lambda: d.StableDiffusion3ControlNetPipeline(
        **(parts := sd3_parts()),
        controlnet=d.SD3ControlNetModel.from_transformer(
            parts["transformer"], num_layers=1, num_extra_conditioning_channels=0
        ),
    ),
    **SD3_CALL,
    **SIZE,
    control_image=PICTURE,
)


def cogvideox(cls: Any, channels: int = 4) -> Any:
    return cls(
        transformer=d.CogVideoXTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=channels,
            out_channels=4,
            time_embed_dim=4,
            text_embed_dim=H,
            num_layers=3,
            sample_width=8,
            sample_height=8,
            sample_frames=9,
            patch_size=2,
            temporal_compression_ratio=4,
            max_text_seq_length=16,
        ),
        vae=d.AutoencoderKLCogVideoX(
            down_block_types=("CogVideoXDownBlock3D",) * 4,
            up_block_types=("CogVideoXUpBlock3D",) * 4,
            block_out_channels=(8, 8, 8, 8),
            latent_channels=4,
            layers_per_block=1,
            norm_num_groups=2,
            temporal_compression_ratio=4,
        ),
        scheduler=d.DDIMScheduler(),
        **t5(),
    )


VIDEO = {"num_frames": 9, "max_sequence_length": 16}
entry("CogVideoXPipeline", lambda: cogvideox(d.CogVideoXPipeline), **PROMPT, height=16, width=16, **VIDEO)
entry(
    "CogVideoXImageToVideoPipeline",
    lambda: cogvideox(d.CogVideoXImageToVideoPipeline, 8),
    **PROMPT,
    height=16,
    width=16,
    **VIDEO,
    image=PICTURE.resize((16, 16)),
)
entry(
    "LTXPipeline",
    lambda: d.LTXPipeline(
        transformer=d.LTXVideoTransformer3DModel(
            in_channels=8,
            out_channels=8,
            patch_size=1,
            patch_size_t=1,
            num_attention_heads=4,
            attention_head_dim=8,
            cross_attention_dim=32,
            num_layers=2,
            caption_channels=H,
        ),
        vae=ltx_vae(),
        scheduler=flow(),
        **t5(),
    ),
    **PROMPT,
    **SMALL,
    **VIDEO,
)
entry(
    "LTXImageToVideoPipeline",
    lambda: d.LTXImageToVideoPipeline(
        transformer=d.LTXVideoTransformer3DModel(
            in_channels=8,
            out_channels=8,
            patch_size=1,
            patch_size_t=1,
            num_attention_heads=4,
            attention_head_dim=8,
            cross_attention_dim=32,
            num_layers=2,
            caption_channels=H,
        ),
        vae=ltx_vae(),
        scheduler=flow(),
        **t5(),
    ),
    **PROMPT,
    **SMALL,
    **VIDEO,
    image=PICTURE.resize((32, 32)),
)


def ltx_vae() -> Any:
    return d.AutoencoderKLLTXVideo(
        in_channels=3,
        out_channels=3,
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False,) * 5,
        upsample_residual=(False,) * 4,
        upsample_factor=(1,) * 4,
        timestep_conditioning=False,
        patch_size=1,
        patch_size_t=1,
        encoder_causal=True,
        decoder_causal=False,
    )


entry(
    "MochiPipeline",
    lambda: d.MochiPipeline(
        transformer=d.MochiTransformer3DModel(
            patch_size=2,
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=2,
            pooled_projection_dim=16,
            in_channels=12,
            qk_norm="rms_norm",
            text_embed_dim=H,
            time_embed_dim=4,
            activation_fn="swiglu",
            max_sequence_length=16,
        ),
        vae=d.AutoencoderKLMochi(
            latent_channels=12,
            out_channels=3,
            encoder_block_out_channels=(32, 32, 32, 32),
            decoder_block_out_channels=(32, 32, 32, 32),
            layers_per_block=(1, 1, 1, 1, 1),
        ),
        scheduler=flow(),
        **t5(),
    ),
    **PROMPT,
    height=16,
    width=16,
    num_frames=7,
    max_sequence_length=16,
)
entry(
    "LattePipeline",
    lambda: d.LattePipeline(
        transformer=d.LatteTransformer3DModel(
            sample_size=8,
            num_layers=2,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=2,
            caption_channels=H,
            in_channels=4,
            cross_attention_dim=16,
            out_channels=8,
            attention_bias=True,
            activation_fn="gelu-approximate",
            num_embeds_ada_norm=1000,
            norm_type="ada_norm_single",
            norm_elementwise_affine=False,
            norm_eps=1e-6,
        ),
        vae=vaes.image(4, quant_convs=True),
        scheduler=d.DDIMScheduler(),
        **t5(),
    ),
    **PROMPT,
    **SIZE,
    video_length=16,
    clean_caption=False,
)
entry(
    "AllegroPipeline",
    lambda: d.AllegroPipeline(
        transformer=d.AllegroTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            cross_attention_dim=24,
            sample_width=8,
            sample_height=8,
            sample_frames=8,
            caption_channels=H,
        ),
        vae=d.AutoencoderKLAllegro(
            in_channels=3,
            out_channels=3,
            down_block_types=("AllegroDownBlock3D",) * 4,
            up_block_types=("AllegroUpBlock3D",) * 4,
            block_out_channels=(8, 8, 8, 8),
            latent_channels=4,
            layers_per_block=1,
            norm_num_groups=2,
            temporal_compression_ratio=4,
        ),
        scheduler=d.DDIMScheduler(),
        **t5(),
    ),
    **PROMPT,
    height=16,
    width=16,
    num_frames=8,
    max_sequence_length=16,
    output_type="latent",
    clean_caption=False,
)


# ---------------------------------------------------------------------- Wan, Qwen and their relatives


def parts_of(name: str, *without: str) -> dict[str, Any]:
    base = testing.build_pipeline(name)
    return {k: v for k, v in base.components.items() if k not in without}


WAN = {"prompt": "a red cube", "num_inference_steps": 3, **SMALL, "max_sequence_length": 16}


def wan_one() -> dict[str, Any]:
    return parts_of("wan22_t2v", "transformer_2")


entry("WanPipeline", lambda: d.WanPipeline(**wan_one()), **WAN, num_frames=5)
entry(
    "WanVideoToVideoPipeline",
    lambda: d.WanVideoToVideoPipeline(**wan_one()),
    **WAN,
    video=[PICTURE.resize((32, 32))] * 5,
)
entry(
    "WanVACEPipeline",
    lambda: d.WanVACEPipeline(
        **{
            **wan_one(),
            "transformer": d.WanVACETransformer3DModel(
                num_attention_heads=2,
                attention_head_dim=12,
                in_channels=16,
                out_channels=16,
                text_dim=H,
                freq_dim=32,
                ffn_dim=32,
                num_layers=3,
                rope_max_seq_len=32,
                vace_layers=[0, 2],
                vace_in_channels=96,
            ),
        }
    ),
    **WAN,
    num_frames=5,
)
entry(
    "SkyReelsV2Pipeline",
    lambda: d.SkyReelsV2Pipeline(
        **{
            **wan_one(),
            "transformer": d.SkyReelsV2Transformer3DModel(
                num_attention_heads=2,
                attention_head_dim=12,
                in_channels=16,
                out_channels=16,
                text_dim=H,
                freq_dim=32,
                ffn_dim=32,
                num_layers=3,
                rope_max_seq_len=32,
            ),
        }
    ),
    **WAN,
    num_frames=5,
)
QWEN = {"prompt": "a red cube", "negative_prompt": "blurry", "true_cfg_scale": 3.0, "num_inference_steps": 3}
entry(
    "QwenImageImg2ImgPipeline",
    lambda: d.QwenImageImg2ImgPipeline(**parts_of("qwen_image")),
    **QWEN,
    **SIZE,
    image=PICTURE,
    strength=0.9,
)
entry(
    "QwenImageInpaintPipeline",
    lambda: d.QwenImageInpaintPipeline(**parts_of("qwen_image")),
    **QWEN,
    **SIZE,
    image=PICTURE,
    mask_image=MASK,
    strength=0.9,
)


def gemma() -> Any:
    torch.manual_seed(0)
    return Gemma2Model(
        Gemma2Config(
            vocab_size=encoders.CHAT_VOCABULARY,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
        )
    )


entry(
    "Lumina2Pipeline",
    lambda: d.Lumina2Pipeline(
        transformer=d.Lumina2Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            hidden_size=24,
            num_layers=2,
            num_refiner_layers=1,
            num_attention_heads=3,
            num_kv_heads=1,
            multiple_of=2,
            norm_eps=1e-5,
            scaling_factor=1.0,
            axes_dim_rope=[4, 2, 2],
            cap_feat_dim=16,
        ),
        vae=vaes.image(4, quant_convs=False),
        scheduler=flow(),
        text_encoder=gemma(),
        tokenizer=tokenizers.chat_tokenizer(),
    ),
    **PROMPT,
    **SMALL,
    max_sequence_length=16,
)
entry(
    "SanaPipeline",
    lambda: d.SanaPipeline(
        transformer=d.SanaTransformer2DModel(
            patch_size=1,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=4,
            num_cross_attention_heads=2,
            cross_attention_head_dim=4,
            cross_attention_dim=8,
            caption_channels=16,
            sample_size=32,
        ),
        vae=d.AutoencoderDC(
            in_channels=3,
            latent_channels=4,
            attention_head_dim=2,
            encoder_block_types=("ResBlock", "EfficientViTBlock"),
            decoder_block_types=("ResBlock", "EfficientViTBlock"),
            encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8),
            encoder_qkv_multiscales=((), (5,)),
            decoder_qkv_multiscales=((), (5,)),
            encoder_layers_per_block=(1, 1),
            decoder_layers_per_block=(1, 1),
            downsample_block_type="conv",
            upsample_block_type="interpolate",
            decoder_norm_types="rms_norm",
            decoder_act_fns="silu",
            scaling_factor=0.41407,
        ),
        scheduler=flow(),
        text_encoder=gemma(),
        tokenizer=tokenizers.chat_tokenizer(),
    ),
    **PROMPT,
    **SMALL,
    max_sequence_length=16,
    use_resolution_binning=False,
    complex_human_instruction=None,
    clean_caption=False,
)


# ---------------------------------------------------------------------- other kinds


def clip_projection(width: int = 32) -> Any:
    torch.manual_seed(0)
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=encoders.CLIP_VOCABULARY,
            hidden_size=width,
            intermediate_size=37,
            projection_dim=width,
            num_hidden_layers=3,
            num_attention_heads=4,
            bos_token_id=encoders.CLIP_VOCABULARY - 2,
            eos_token_id=encoders.CLIP_VOCABULARY - 1,
            pad_token_id=encoders.CLIP_VOCABULARY - 1,
        )
    )


def clip_vision(width: int = 32, image_size: int = 32) -> Any:
    return CLIPVisionModelWithProjection(
        CLIPVisionConfig(
            hidden_size=width,
            intermediate_size=37,
            projection_dim=width,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=image_size,
            patch_size=image_size // 4,
        )
    )


def movq() -> Any:
    return d.VQModel(
        block_out_channels=[32, 64],
        down_block_types=["DownEncoderBlock2D", "AttnDownEncoderBlock2D"],
        in_channels=3,
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=8,
        norm_type="spatial",
        num_vq_embeddings=12,
        out_channels=3,
        up_block_types=["AttnUpDecoderBlock2D", "UpDecoderBlock2D"],
        vq_embed_dim=4,
    )


entry(
    "KandinskyV22Pipeline",
    lambda: d.KandinskyV22Pipeline(
        unet=d.UNet2DConditionModel(
            in_channels=4,
            out_channels=8,
            addition_embed_type="image",
            down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
            up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
            mid_block_type="UNetMidBlock2DSimpleCrossAttn",
            block_out_channels=(32, 64),
            layers_per_block=1,
            encoder_hid_dim=32,
            encoder_hid_dim_type="image_proj",
            cross_attention_dim=32,
            attention_head_dim=4,
            resnet_time_scale_shift="scale_shift",
            class_embed_type=None,
        ),
        movq=movq(),
        scheduler=ddim(),
    ),
    image_embeds=torch.full((1, 32), 0.3),
    negative_image_embeds=torch.full((1, 32), -0.2),
    num_inference_steps=3,
    **SIZE,
)
entry(
    "KandinskyV22PriorPipeline",
    lambda: d.KandinskyV22PriorPipeline(
        prior=d.PriorTransformer(
            num_attention_heads=2, attention_head_dim=12, embedding_dim=32, num_layers=2, additional_embeddings=4
        ),
        image_encoder=clip_vision(),
        text_encoder=clip_projection(),
        tokenizer=tokenizers.clip_tokenizer(),
        scheduler=d.UnCLIPScheduler(
            variance_type="fixed_small_log",
            prediction_type="sample",
            num_train_timesteps=1000,
            clip_sample=True,
            clip_sample_range=10.0,
        ),
        image_processor=None,
    ),
    **PROMPT,
)
entry(
    "StableCascadePriorPipeline",
    lambda: d.StableCascadePriorPipeline(
        prior=d.StableCascadeUNet(
            in_channels=16,
            out_channels=16,
            block_out_channels=(16, 16),
            num_attention_heads=(2, 2),
            down_num_layers_per_block=(1, 1),
            up_num_layers_per_block=(1, 1),
            down_blocks_repeat_mappers=(1, 1),
            up_blocks_repeat_mappers=(1, 1),
            block_types_per_layer=(
                ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),
                ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),
            ),
            conditioning_dim=32,
            clip_text_in_channels=32,
            clip_text_pooled_in_channels=32,
            clip_image_in_channels=32,
            switch_level=(False,),
            timestep_conditioning_type=("sca", "crp"),
            timestep_ratio_embedding_dim=16,
        ),
        text_encoder=clip_projection(),
        tokenizer=tokenizers.clip_tokenizer(),
        scheduler=d.DDPMWuerstchenScheduler(),
        feature_extractor=None,
        image_encoder=None,
    ),
    **PROMPT,
    **SIZE,
)
entry(
    "AmusedPipeline",
    lambda: d.AmusedPipeline(
        transformer=d.UVit2DModel(
            hidden_size=8,
            use_bias=False,
            hidden_dropout=0.0,
            cond_embed_dim=32,
            micro_cond_encode_dim=2,
            micro_cond_embed_dim=10,
            encoder_hidden_size=32,
            vocab_size=32,
            codebook_size=32,
            in_channels=8,
            block_out_channels=8,
            num_res_blocks=1,
            downsample=True,
            upsample=True,
            block_num_heads=1,
            num_hidden_layers=2,
            num_attention_heads=1,
            attention_dropout=0.0,
            intermediate_size=8,
            layer_norm_eps=1e-6,
            ln_elementwise_affine=True,
        ),
        vqvae=d.VQModel(
            act_fn="silu",
            block_out_channels=[8],
            down_block_types=["DownEncoderBlock2D"],
            in_channels=3,
            latent_channels=8,
            layers_per_block=1,
            norm_num_groups=8,
            num_vq_embeddings=32,
            out_channels=3,
            sample_size=8,
            up_block_types=["UpDecoderBlock2D"],
            mid_block_add_attention=False,
            lookup_from_codebook=True,
        ),
        text_encoder=clip_projection(),
        tokenizer=tokenizers.clip_tokenizer(),
        scheduler=d.AmusedScheduler(mask_token_id=31),
    ),
    prompt="a red cube",
    num_inference_steps=3,
    height=4,
    width=4,
)
entry(
    "TextToVideoSDPipeline",
    lambda: d.TextToVideoSDPipeline(
        vae=vaes.image(4, quant_convs=True),
        text_encoder=encoders.clip(),
        tokenizer=tokenizers.clip_tokenizer(),
        unet=d.UNet3DConditionModel(
            block_out_channels=(8, 8),
            layers_per_block=1,
            sample_size=8,
            in_channels=4,
            out_channels=4,
            down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
            up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
            cross_attention_dim=CLIP,
            attention_head_dim=4,
            norm_num_groups=2,
        ),
        scheduler=ddim(),
    ),
    **PROMPT,
    **SIZE,
    num_frames=3,
)
entry(
    "HunyuanVideoPipeline",
    lambda: d.HunyuanVideoPipeline(
        text_encoder=llama(),
        tokenizer=tokenizers.chat_tokenizer(),
        text_encoder_2=encoders.clip(),
        tokenizer_2=tokenizers.clip_tokenizer(),
        transformer=d.HunyuanVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=10,
            num_layers=2,
            num_single_layers=2,
            num_refiner_layers=1,
            patch_size=1,
            patch_size_t=1,
            guidance_embeds=True,
            text_embed_dim=16,
            pooled_projection_dim=CLIP,
            rope_axes_dim=(2, 4, 4),
        ),
        vae=d.AutoencoderKLHunyuanVideo(
            in_channels=3,
            out_channels=3,
            latent_channels=4,
            down_block_types=("HunyuanVideoDownBlock3D",) * 4,
            up_block_types=("HunyuanVideoUpBlock3D",) * 4,
            block_out_channels=(8, 8, 8, 8),
            layers_per_block=1,
            act_fn="silu",
            norm_num_groups=4,
            scaling_factor=0.476986,
            spatial_compression_ratio=8,
            temporal_compression_ratio=4,
            mid_block_add_attention=True,
        ),
        scheduler=flow(),
    ),
    **PROMPT,
    height=16,
    width=16,
    num_frames=9,
    max_sequence_length=16,
    prompt_template={"template": "{}", "crop_start": 0},
)


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaModel(
        LlamaConfig(
            bos_token_id=0,
            eos_token_id=2,
            hidden_size=16,
            intermediate_size=37,
            num_attention_heads=4,
            num_hidden_layers=4,
            pad_token_id=1,
            vocab_size=1000,
        )
    )


entry(
    "CogView3PlusPipeline",
    lambda: d.CogView3PlusPipeline(
        transformer=d.CogView3PlusTransformer2DModel(
            patch_size=2,
            in_channels=4,
            num_layers=2,
            attention_head_dim=4,
            num_attention_heads=2,
            out_channels=4,
            text_embed_dim=H,
            time_embed_dim=8,
            condition_dim=2,
            pos_embed_max_size=8,
            sample_size=8,
        ),
        vae=vaes.image(4, quant_convs=True),
        scheduler=d.CogVideoXDDIMScheduler(),
        **t5(),
    ),
    **PROMPT,
    **SMALL,
    max_sequence_length=16,
)
entry(
    "BriaPipeline",
    lambda: d.BriaPipeline(
        transformer=d.BriaTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=H,
            pooled_projection_dim=None,
            axes_dims_rope=[0, 4, 4],
        ),
        vae=vaes.image(4, quant_convs=False),
        scheduler=flow(),
        **t5(),
    ),
    **PROMPT,
    **SIZE,
    max_sequence_length=16,
)
entry(
    "ZImagePipeline",
    lambda: d.ZImagePipeline(
        transformer=d.ZImageTransformer2DModel(
            all_patch_size=(2,),
            all_f_patch_size=(1,),
            in_channels=16,
            dim=32,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            qk_norm=True,
            cap_feat_dim=encoders.HIDDEN,
            rope_theta=256.0,
            t_scale=1000.0,
            axes_dims=[8, 4, 4],
            axes_lens=[256, 32, 32],
        ),
        vae=vaes.image(16, quant_convs=False),
        scheduler=flow(),
        text_encoder=encoders.qwen3(),
        tokenizer=tokenizers.chat_tokenizer(),
    ),
    **PROMPT,
    **SIZE,
    max_sequence_length=16,
)
entry(
    "StableVideoDiffusionPipeline",
    lambda: d.StableVideoDiffusionPipeline(
        unet=d.UNetSpatioTemporalConditionModel(
            block_out_channels=(32, 64),
            layers_per_block=1,
            sample_size=8,
            in_channels=8,
            out_channels=4,
            down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
            cross_attention_dim=32,
            num_attention_heads=4,
            projection_class_embeddings_input_dim=96,
            addition_time_embed_dim=32,
        ),
        vae=d.AutoencoderKLTemporalDecoder(
            block_out_channels=[32, 32],
            in_channels=3,
            out_channels=3,
            down_block_types=["DownEncoderBlock2D", "DownEncoderBlock2D"],
            latent_channels=4,
        ),
        scheduler=d.EulerDiscreteScheduler(prediction_type="v_prediction", use_karras_sigmas=True),
        image_encoder=clip_vision(image_size=224),
        feature_extractor=CLIPImageProcessor(crop_size=32, size=32),
    ),
    image=PICTURE.resize((32, 32)),
    num_frames=2,
    num_inference_steps=3,
    **SMALL,
)
