"""Tiny models of the classes that the emulator is promised to run, with inputs and the way to call them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    FluxTransformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def tensor_of(output: Any) -> torch.Tensor:
    while not torch.is_tensor(output):
        output = output.latent_dist.parameters if hasattr(output, "latent_dist") else output[0]
    return output


def moved(value: Any, device: Any, dtype: torch.dtype | None = None) -> Any:
    if torch.is_tensor(value):
        return value.to(device, dtype if value.is_floating_point() else None)
    if isinstance(value, dict):
        return {k: moved(v, device, dtype) for k, v in value.items()}
    return value


@dataclass
class Case:
    build: Callable[[], torch.nn.Module]
    inputs: dict[str, Any]
    call: Callable[[torch.nn.Module, dict[str, Any]], Any] = lambda model, inputs: model(**inputs)

    def model(self) -> torch.nn.Module:
        torch.manual_seed(0)
        return self.build().eval()

    @torch.no_grad()
    def run(self, model: torch.nn.Module, device: Any = "cpu", dtype: torch.dtype | None = None) -> torch.Tensor:
        return tensor_of(self.call(model, moved(self.inputs, device, dtype)))


def wan() -> WanTransformer3DModel:
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=32,
        freq_dim=64,
        ffn_dim=32,
        num_layers=3,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )


def flux() -> FluxTransformer2DModel:
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )


def sd3() -> SD3Transformer2DModel:
    return SD3Transformer2DModel(
        sample_size=16,
        patch_size=1,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
    )


def qwen_image() -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )


def autoencoder_kl() -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=8,
    )


def autoencoder_wan() -> AutoencoderKLWan:
    return AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )


def unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        block_out_channels=(32, 64),
        layers_per_block=1,
        sample_size=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        norm_num_groups=8,
    )


def umt5() -> UMT5EncoderModel:
    return UMT5EncoderModel(UMT5Config(vocab_size=100, d_model=32, d_ff=64, num_layers=2, num_heads=4, d_kv=8))


def t5() -> T5EncoderModel:
    return T5EncoderModel(T5Config(vocab_size=100, d_model=32, d_ff=64, num_layers=2, num_heads=4, d_kv=8))


def clip() -> CLIPTextModel:
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=100,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=16,
            bos_token_id=0,
            pad_token_id=1,
            eos_token_id=2,
        )
    )


def qwen3() -> Qwen3Model:
    return Qwen3Model(
        Qwen3Config(
            vocab_size=100,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
        )
    )


_IDS = torch.randint(3, 90, (2, 11), generator=torch.Generator().manual_seed(0))
_MASK = torch.ones(2, 11, dtype=torch.long)
_MASK[1, 7:] = 0
_TEXT = {"input_ids": _IDS, "attention_mask": _MASK}

CASES: dict[str, Case] = {
    "wan": Case(
        wan,
        {
            "hidden_states": randn(1, 16, 3, 8, 8),
            "timestep": torch.tensor([500]),
            "encoder_hidden_states": randn(1, 12, 32),
        },
    ),
    "flux": Case(
        flux,
        {
            "hidden_states": randn(1, 16, 4),
            "encoder_hidden_states": randn(1, 8, 32),
            "pooled_projections": randn(1, 32),
            "timestep": torch.tensor([0.5]),
            "img_ids": randn(16, 3).abs(),
            "txt_ids": torch.zeros(8, 3),
        },
    ),
    "sd3": Case(
        sd3,
        {
            "hidden_states": randn(1, 4, 16, 16),
            "encoder_hidden_states": randn(1, 7, 32),
            "pooled_projections": randn(1, 64),
            "timestep": torch.tensor([3]),
        },
    ),
    "qwen_image": Case(
        qwen_image,
        {
            "hidden_states": randn(1, 16, 16),
            "encoder_hidden_states": randn(1, 7, 16),
            "encoder_hidden_states_mask": torch.ones(1, 7, dtype=torch.long),
            "timestep": torch.tensor([0.5]),
            "img_shapes": [(1, 4, 4)],
        },
    ),
    "unet": Case(
        unet,
        {
            "sample": randn(1, 4, 16, 16),
            "timestep": torch.tensor(10),
            "encoder_hidden_states": randn(1, 9, 32),
        },
    ),
    "autoencoder_kl": Case(autoencoder_kl, {"sample": randn(1, 3, 16, 16)}),
    "autoencoder_kl_wan": Case(
        autoencoder_wan, {"z": randn(1, 16, 2, 4, 4)}, lambda model, inputs: model.decode(inputs["z"])
    ),
    "t5": Case(t5, _TEXT),
    "umt5": Case(umt5, _TEXT),
    "clip": Case(clip, _TEXT),
    "qwen3": Case(qwen3, _TEXT),
}


def _tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[PAD]", "</s>", "[UNK]", *["a", "cat", "dog", "runs", "in", "the", "sun", "bad", "ugly", "photo", "of"]]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="[PAD]", eos_token="</s>", unk_token="[UNK]", model_max_length=64
    )


def wan_pipeline() -> WanPipeline:
    torch.manual_seed(0)
    pipe = WanPipeline(
        tokenizer=_tokenizer(),
        text_encoder=umt5().eval(),
        vae=autoencoder_wan().eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        transformer=wan().eval(),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe: WanPipeline, steps: int = 2) -> torch.Tensor:
    frames = pipe(
        "a cat runs in the sun",
        negative_prompt="bad",
        height=16,
        width=16,
        num_frames=5,
        num_inference_steps=steps,
        guidance_scale=4.0,
        generator=torch.Generator().manual_seed(1),
        output_type="pt",
        max_sequence_length=16,
    ).frames
    return frames.cpu()
