"""Tiny VAEs in the real classes, with the real scale factors."""

from __future__ import annotations

from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    Cosmos3AVAEAudioTokenizer,
)

_CHANNELS = (8, 8, 16, 16)
_IMAGE = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": _CHANNELS,
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "sample_size": 64,
}


def image(latent_channels: int, quant_convs: bool) -> AutoencoderKL:
    """Eight-fold. With ``quant_convs`` small convolutions lie outside encoder and decoder, as in SDXL's."""
    return AutoencoderKL(
        **_IMAGE,
        latent_channels=latent_channels,
        scaling_factor=0.5,
        shift_factor=None if quant_convs else 0.1,
        force_upcast=quant_convs,
        use_quant_conv=quant_convs,
        use_post_quant_conv=quant_convs,
    )


def flux2() -> AutoencoderKLFlux2:
    """Eight-fold, with the batch norm whose statistics the pipeline reads from outside."""
    return AutoencoderKLFlux2(**_IMAGE, latent_channels=8)


def qwen_image() -> AutoencoderKLQwenImage:
    return AutoencoderKLQwenImage(base_dim=3, z_dim=16, num_res_blocks=1)


def wan() -> AutoencoderKLWan:
    """Wan 2.1's, which the A14B models use: eight-fold in space, four-fold in time, 16 channels."""
    return AutoencoderKLWan(base_dim=3, z_dim=16, num_res_blocks=1)


def wan22() -> AutoencoderKLWan:
    """Wan 2.2's, which Cosmos3 uses: residual, patchified, sixteen-fold in space, 48 channels."""
    return AutoencoderKLWan(
        base_dim=2,
        decoder_base_dim=3,
        z_dim=48,
        num_res_blocks=1,
        latents_mean=[0.05 * (index % 7 - 3) for index in range(48)],
        latents_std=[0.5 + 0.05 * (index % 5) for index in range(48)],
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
    )


def cosmos3_sound() -> Cosmos3AVAEAudioTokenizer:
    """The decoder half alone, eight samples a latent, at 800 samples a second."""
    return Cosmos3AVAEAudioTokenizer(
        sampling_rate=800,
        vocoder_input_dim=8,
        dec_dim=8,
        dec_c_mults=(1, 2),
        dec_strides=(2, 4),
        hop_size=8,
        encoder_enabled=False,
    )
