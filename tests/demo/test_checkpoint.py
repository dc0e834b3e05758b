"""The demo checkpoint is an ordinary one: small, stock, recommended call included; and it draws what it is asked."""

from __future__ import annotations

import importlib
import json

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, FluxPipeline
from PIL import Image
from safetensors import safe_open

from greenroom.demo import CALL_KWARGS, HELD_OUT, DigitReader, checkpoint_path, load_pipeline, spell


def test_reloads_without_a_word_about_its_parts() -> None:
    pipe = DiffusionPipeline.from_pretrained(checkpoint_path())
    assert type(pipe) is FluxPipeline
    blocks = [*pipe.transformer.transformer_blocks, *pipe.transformer.single_transformer_blocks]
    assert len(blocks) >= 12
    assert pipe.text_encoder.dtype == pipe.text_encoder_2.dtype == pipe.vae.dtype


def test_every_part_is_a_stock_class() -> None:
    index = json.loads((checkpoint_path() / "model_index.json").read_text())
    for name, entry in index.items():
        if name.startswith("_") or entry == [None, None]:
            continue
        library, class_name = entry
        assert library in ("diffusers", "transformers"), name
        assert hasattr(importlib.import_module(library), class_name)


def test_is_small_and_in_bfloat16() -> None:
    files = [path for path in checkpoint_path().rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 16_000_000
    weights = [path for path in files if path.suffix == ".safetensors"]
    assert len(weights) == 4
    for path in weights:
        with safe_open(path, framework="pt") as tensors:
            assert {tensors.get_slice(key).get_dtype() for key in tensors.keys()} == {"BF16"}  # noqa: SIM118


def test_text_encoders_are_a_visible_share() -> None:
    pipe = load_pipeline()
    sizes = {
        name: sum(p.nbytes for p in part.parameters())
        for name, part in pipe.components.items()
        if isinstance(part, torch.nn.Module)
    }
    share = (sizes["text_encoder"] + sizes["text_encoder_2"]) / sum(sizes.values())
    assert 0.2 <= share <= 0.35


def test_recommended_call_travels_with_the_checkpoint() -> None:
    assert json.loads((checkpoint_path() / "greenroom.json").read_text())["call"] == CALL_KWARGS


def test_draws_what_fifty_prompts_ask(never_offloaded: list[np.ndarray], requests: list[tuple[str, int]]) -> None:
    images = [Image.fromarray((pixels * 255).round().astype(np.uint8)) for pixels in never_offloaded]
    assert DigitReader().score(images, [digit for _, digit in requests]) >= 0.95


@torch.no_grad()
def test_draws_in_three_more_languages_from_wordings_never_trained() -> None:
    pipe = load_pipeline()
    asked = [
        (wording.format(digit=spell(digit, language)), digit)
        for language in ("de", "fr", "es")
        for wording in HELD_OUT[language]
        for digit in (3, 7)
    ]
    generator = torch.Generator().manual_seed(0)
    images = pipe([prompt for prompt, _ in asked], generator=generator, **CALL_KWARGS).images
    assert DigitReader().score(images, [digit for _, digit in asked]) >= 0.85


@torch.no_grad()
def test_the_plain_call_draws_too() -> None:
    """Only size and steps given; the rest is FluxPipeline's own, its 512 tokens of text included."""
    pipe = load_pipeline()
    asked = [7, 2, 0, 4]
    prompts = [f"please draw me a {spell(digit)}" for digit in asked]
    generator = torch.Generator().manual_seed(0)
    images = pipe(prompts, height=32, width=32, num_inference_steps=10, generator=generator).images
    assert DigitReader().read(images) == asked


@pytest.mark.parametrize("digit", range(10))
def test_capitals_change_nothing(digit: int) -> None:
    pipe = load_pipeline()
    wording = f"Please draw me a {spell(digit)}"
    for tokenizer in (pipe.tokenizer, pipe.tokenizer_2):
        assert tokenizer(wording).input_ids == tokenizer(wording.upper()).input_ids
