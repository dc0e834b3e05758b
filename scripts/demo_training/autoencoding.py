"""Trains the autoencoder and encodes the pictures with it."""

from __future__ import annotations

import math
import time

import torch
from diffusers import AutoencoderKL
from torch.nn import functional as F

from demo_training.pictures import render

BATCH = 64


def train_autoencoder(vae: AutoencoderKL, ink: torch.Tensor, steps: int, generator: torch.Generator) -> None:
    """Squared error + 0.1 absolute error + 0.001 KL; sets the scaling and shift factors measured afterwards."""
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.02 + 0.49 * (1 + math.cos(math.pi * step / steps))
    )
    began = time.perf_counter()
    for step in range(steps):
        index = torch.randint(len(ink), (BATCH,), generator=generator)
        pictures = render(ink[index], generator)
        posterior = vae.encode(pictures).latent_dist
        noise = torch.randn(posterior.mean.shape, generator=generator)
        out = vae.decode(posterior.mean + posterior.std * noise).sample
        kl = posterior.kl().mean() / posterior.mean[0].numel()
        loss = F.mse_loss(out, pictures) + 0.1 * F.l1_loss(out, pictures) + 1e-3 * kl
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            elapsed = time.perf_counter() - began
            print(f"autoencoder {step:5d}  loss {loss.item():.4f}  {elapsed:.0f} s", flush=True)
    with torch.no_grad():
        latents = vae.encode(render(ink, generator)).latent_dist.mean
    vae.register_to_config(scaling_factor=1 / latents.std().item(), shift_factor=latents.mean().item())


@torch.no_grad()
def encode(vae: AutoencoderKL, ink: torch.Tensor, copies: int, generator: torch.Generator) -> torch.Tensor:
    """(copies, N, 16, 16): packed latents of ``copies`` differently moved renderings of each picture."""
    scale, shift = vae.config.scaling_factor, vae.config.shift_factor
    encoded = []
    for _ in range(copies):
        latents = (vae.encode(render(ink, generator)).latent_dist.mean - shift) * scale
        # 2 x 2 patches become channels, exactly as FluxPipeline packs them.
        count, channels, height, width = latents.shape
        latents = latents.view(count, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
        encoded.append(latents.reshape(count, height * width // 4, channels * 4))
    return torch.stack(encoded)
