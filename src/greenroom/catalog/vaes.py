"""Declarations for VAEs and other codecs (diffusers)."""

from __future__ import annotations

from greenroom.catalog.declaration import ModelDeclaration

# A VAE is never streamed by block: the video ones run their blocks once a latent frame, the image ones once a
# tile, which would copy every weight that often.
_CODEC = ("encode", "decode")
VAES = (
    ModelDeclaration("AutoencoderKL", "vae", hold=_CODEC),
    ModelDeclaration("AutoencoderKLFlux2", "vae", hold=_CODEC, resident=("bn",), notes="Statistics read outside."),
    ModelDeclaration("AutoencoderKLQwenImage", "vae", hold=_CODEC),
    ModelDeclaration("AutoencoderKLWan", "vae", hold=_CODEC),
    ModelDeclaration("AutoencoderTiny", "vae", hold=_CODEC),
    ModelDeclaration("Cosmos3AVAEAudioTokenizer", "vae", hold=_CODEC),
)
