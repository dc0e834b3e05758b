"""Teaches the two text encoders to find the digit in a prompt, before there is any drawing to do.

Learnt through the transformer alone this takes most of the training; asked directly it takes two minutes. Every
position of the T5 output, padding included, must name the digit: then nothing depends on how long the padding is.
"""

from __future__ import annotations

import math
import random
import time

import torch
from diffusers import FluxPipeline
from torch import nn
from torch.nn import functional as F

from demo_training.models import POOLED_WIDTH, TEXT_WIDTH
from demo_training.prompts import PromptWriter

BATCH = 64
NOTHING = 10  # the class of the empty prompt
# (T5 length in tokens, share of the steps); long ones in batches of a quarter.
LENGTHS = ((16, 0.45), (32, 0.35), (64, 0.1), (128, 0.05), (512, 0.05))


def train_reading(pipe: FluxPipeline, steps: int, seed: int) -> None:
    """Cross entropy of throw-away linear heads on CLIP's pooled output and on each T5 position."""
    generator = torch.Generator().manual_seed(seed + 1)
    pick, writer = random.Random(seed + 1), PromptWriter(seed + 1)
    heads = nn.ModuleList([nn.Linear(POOLED_WIDTH, NOTHING + 1), nn.Linear(TEXT_WIDTH, NOTHING + 1)])
    parameters = [p for part in (pipe.text_encoder, pipe.text_encoder_2, heads) for p in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1.5e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 30) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
    )
    lengths, shares = zip(*LENGTHS, strict=True)
    began = time.perf_counter()
    for step in range(steps):
        length = pick.choices(lengths, shares)[0]
        size = BATCH if length <= 32 else BATCH // 4
        labels = torch.randint(11, (size,), generator=generator)
        prompts = [writer.write_fitting(pipe.tokenizer_2, length, digit) for digit in labels.tolist()]
        clip, t5 = encode_prompts(
            pipe.tokenizer, pipe.text_encoder, pipe.tokenizer_2, pipe.text_encoder_2, prompts, length
        )
        every_position = labels[:, None].expand(size, length).reshape(-1)
        told = heads[1](t5)
        loss = F.cross_entropy(heads[0](clip), labels) + F.cross_entropy(told.flatten(0, 1), every_position)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            right = (told.argmax(-1) == labels[:, None]).float().mean().item()
            elapsed = time.perf_counter() - began
            print(f"reading     {step:5d}  loss {loss.item():.4f}  {right:.0%} right  {elapsed:.0f} s", flush=True)


def encode_prompts(clip_tokens, clip, t5_tokens, t5, prompts: list[str], length: int):  # type: ignore[no-untyped-def]
    """(B, 96) pooled CLIP output and (B, length, 128) T5 output, as FluxPipeline computes them."""
    # CLIP is causal and read at its end token, so padding only to the longest prompt changes nothing.
    clip_ids = clip_tokens(prompts, padding="longest", truncation=True, return_tensors="pt").input_ids
    t5_ids = t5_tokens(prompts, padding="max_length", max_length=length, truncation=True, return_tensors="pt").input_ids
    return clip(clip_ids).pooler_output, t5(t5_ids)[0]
