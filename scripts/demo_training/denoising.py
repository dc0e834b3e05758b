"""Trains the transformer and both text encoders together: flow matching first, then guidance distilled into them.

The second phase makes the plain conditional model draw what classifier-free guidance would (Meng et al.
2022, "On Distillation of Guided Diffusion Models"), so that a call needs neither a negative prompt nor two
forwards a step.
"""

from __future__ import annotations

import copy
import math
import random
import time
from dataclasses import dataclass

import torch
from diffusers import FluxPipeline
from torch import nn
from torch.nn import functional as F
from transformers import T5Tokenizer

from demo_training.models import Average
from demo_training.prompts import PromptWriter
from demo_training.reading import encode_prompts

# (T5 length in tokens, batch size, share of the steps). The pipeline pads every prompt and masks nothing, by
# default to 512: the model must have seen both short and long padding. Long batches are small, to cost the same.
LENGTHS = ((16, 64, 0.58), (32, 64, 0.26), (64, 40, 0.04), (128, 24, 0.05), (512, 6, 0.07))
PROMPT_DROP = 0.1
PEAK_RATE = 1.5e-3
DISTIL_RATE = 4e-4
GUIDANCE = 2.0


@dataclass(frozen=True)
class Batch:
    clean: torch.Tensor  # (B, 16, 16) latents
    noise: torch.Tensor
    sigma: torch.Tensor  # (B,)
    labels: torch.Tensor  # (B,)
    prompts: list[str]
    length: int

    @property
    def noisy(self) -> torch.Tensor:
        sigma = self.sigma[:, None, None]
        return (1 - sigma) * self.clean + sigma * self.noise


class Denoiser:
    """The trained modules of a pipeline, and their forward on a batch of prompts."""

    def __init__(self, pipe: FluxPipeline) -> None:
        self._clip_tokens, self._t5_tokens = pipe.tokenizer, pipe.tokenizer_2
        self.clip, self.t5, self.transformer = pipe.text_encoder, pipe.text_encoder_2, pipe.transformer
        self._image_ids = FluxPipeline._prepare_latent_image_ids(1, 4, 4, torch.device("cpu"), torch.float32)

    @property
    def modules(self) -> list[nn.Module]:
        return [self.clip, self.t5, self.transformer]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for module in self.modules for parameter in module.parameters()]

    def frozen_copy(self) -> Denoiser:
        twin = copy.copy(self)
        twin.clip, twin.t5, twin.transformer = (copy.deepcopy(module) for module in self.modules)
        return twin

    def velocity(self, batch: Batch, prompts: list[str]) -> torch.Tensor:
        clip, t5 = self.clip, self.t5
        pooled, text = encode_prompts(self._clip_tokens, clip, self._t5_tokens, t5, prompts, batch.length)
        return self.transformer(
            hidden_states=batch.noisy,
            encoder_hidden_states=text,
            pooled_projections=pooled,
            timestep=batch.sigma,
            img_ids=self._image_ids,
            txt_ids=torch.zeros(text.shape[1], 3),
            return_dict=False,
        )[0]


class Batches:
    """Endless batches, repeatable from a seed."""

    def __init__(self, latents: torch.Tensor, labels: torch.Tensor, tokens: T5Tokenizer, seed: int) -> None:
        self._latents, self._labels, self._tokens = latents, labels, tokens
        self._generator = torch.Generator().manual_seed(seed)
        self._random = random.Random(seed)
        self._writer = PromptWriter(seed)

    def draw(self, *, drop: float) -> Batch:
        lengths, sizes, shares = zip(*LENGTHS, strict=True)
        which = self._random.choices(range(len(LENGTHS)), shares)[0]
        size, generator = sizes[which], self._generator
        copies, count = self._latents.shape[:2]
        index = torch.randint(count, (size,), generator=generator)
        clean = self._latents[torch.randint(copies, (size,), generator=generator), index]
        labels = self._labels[index]
        # Half logit-normal (Esser et al. 2024), half uniform: the few large steps of a short schedule, the
        # very first one above all, lie where logit-normal hardly looks.
        normal = torch.sigmoid(torch.randn(size, generator=generator))
        uniform = 1 - torch.rand(size, generator=generator)
        sigma = torch.where(torch.rand(size, generator=generator) < 0.5, normal, uniform)
        sigma = torch.where(torch.rand(size, generator=generator) < 0.05, torch.ones(size), sigma)
        prompts = [
            "" if self._random.random() < drop else self._writer.write_fitting(self._tokens, lengths[which], label)
            for label in labels.tolist()
        ]
        noise = torch.randn(clean.shape, generator=generator)
        return Batch(clean, noise, sigma, labels, prompts, lengths[which])


def train_denoiser(denoiser: Denoiser, batches: Batches, steps: int) -> None:
    """Flow matching (Lipman et al. 2022): the velocity noise - clean, squared error; leaves the averaged weights."""
    warmup = min(100, steps // 10 + 1)

    def rate(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = max(0.0, step / steps - 0.5) * 2
        return 0.03 + 0.485 * (1 + math.cos(math.pi * done))

    def loss(batch: Batch) -> torch.Tensor:
        return F.mse_loss(denoiser.velocity(batch, batch.prompts), batch.noise - batch.clean)

    _optimise("flow", denoiser, batches, steps, PEAK_RATE, rate, loss, PROMPT_DROP)


def distil_guidance(denoiser: Denoiser, batches: Batches, steps: int) -> None:
    """The model without guidance learns to say what a frozen copy says with guidance; leaves averaged weights."""
    teacher = denoiser.frozen_copy()

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / 20) * (0.05 + 0.475 * (1 + math.cos(math.pi * step / steps)))

    def loss(batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            told = teacher.velocity(batch, batch.prompts)
            untold = teacher.velocity(batch, [""] * len(batch.prompts))
            target = untold + GUIDANCE * (told - untold)
        return F.mse_loss(denoiser.velocity(batch, batch.prompts), target)

    _optimise("guidance", denoiser, batches, steps, DISTIL_RATE, rate, loss, 0.05)


def _optimise(name, denoiser, batches, steps, peak, rate, loss_of, drop) -> None:  # type: ignore[no-untyped-def]
    optimizer = torch.optim.AdamW(denoiser.parameters, lr=peak, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    average = Average(denoiser.modules)
    began, running = time.perf_counter(), None
    for step in range(steps):
        loss = loss_of(batches.draw(drop=drop))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(denoiser.parameters, 1.0)
        optimizer.step()
        schedule.step()
        average.update()
        running = loss.item() if running is None else 0.98 * running + 0.02 * loss.item()
        if step % 50 == 0 or step == steps - 1:
            elapsed = time.perf_counter() - began
            print(f"{name:11s} {step:5d}  loss {running:.4f}  {elapsed:.0f} s", flush=True)
    average.apply()
