"""The models of the demo pipeline, freshly initialised: stock classes of diffusers and transformers, only small."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer

TEXT_WIDTH = 128
POOLED_WIDTH = 96


def autoencoder() -> AutoencoderKL:
    """32 x 32 x 3 picture <-> 8 x 8 x 4 latent: 16 tokens of 16 channels for the transformer."""
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 32),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=32,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def transformer() -> FluxTransformer2DModel:
    """14 blocks: 2 double-stream, 12 single-stream; about 2.4 million parameters."""
    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=12,
        attention_head_dim=24,
        num_attention_heads=4,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=POOLED_WIDTH,
        guidance_embeds=False,
        axes_dims_rope=(8, 8, 8),
    )
    # Every block starts as the identity and the output as zero, as in DiT (Peebles and Xie 2022,
    # "adaLN-Zero").
    zeroed: list[nn.Linear] = [model.norm_out.linear, model.proj_out]
    for double in model.transformer_blocks:
        zeroed += [double.norm1.linear, double.norm1_context.linear]
    zeroed += [single.norm.linear for single in model.single_transformer_blocks]
    for linear in zeroed:
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
    return model


def clip_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=POOLED_WIDTH,
            intermediate_size=2 * POOLED_WIDTH,
            projection_dim=POOLED_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=tokenizer.model_max_length,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def t5_encoder(tokenizer: T5Tokenizer) -> T5EncoderModel:
    """Four layers: with CLIP's two about a quarter of the pipeline's weights, so that its absence shows."""
    return T5EncoderModel(
        T5Config(
            vocab_size=len(tokenizer),
            d_model=TEXT_WIDTH,
            d_kv=TEXT_WIDTH // 4,
            d_ff=2 * TEXT_WIDTH,
            num_layers=4,
            num_heads=4,
            feed_forward_proj="gated-gelu",
            dropout_rate=0.0,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def assemble(
    vae: AutoencoderKL,
    denoiser: FluxTransformer2DModel,
    clip: CLIPTextModel,
    clip_tokens: CLIPTokenizer,
    t5: T5EncoderModel,
    t5_tokens: T5Tokenizer,
) -> FluxPipeline:
    """The pipeline of these parts. Its scheduler has no shift: 16 image tokens need none."""
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0, use_dynamic_shifting=False),
        vae=vae,
        text_encoder=clip,
        tokenizer=clip_tokens,
        text_encoder_2=t5,
        tokenizer_2=t5_tokens,
        transformer=denoiser,
    )


def parameter_count(*modules: nn.Module) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


class Average:
    """An exponential moving average of parameters: smoother weights than the last step's."""

    def __init__(self, modules: list[nn.Module], decay: float = 0.998) -> None:
        self._parameters = [parameter for module in modules for parameter in module.parameters()]
        self._values = [parameter.detach().clone() for parameter in self._parameters]
        self._decay = decay
        self._steps = 0

    @torch.no_grad()
    def update(self) -> None:
        self._steps += 1
        # A young average forgets faster, or it would remember the initial weights.
        decay = min(self._decay, (1 + self._steps) / (10 + self._steps))
        torch._foreach_lerp_(self._values, self._parameters, 1 - decay)

    @torch.no_grad()
    def apply(self) -> None:
        """Puts the averaged values into the modules."""
        torch._foreach_copy_(self._parameters, self._values)
