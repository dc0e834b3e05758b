#!/usr/bin/env python
"""Trains the demo pipeline from nothing on scikit-learn's handwritten digits, repeatably, on a CPU.

    python scripts/train_demo.py                      # a quarter to half an hour on two cores
    python scripts/train_demo.py --out /tmp/digits    # not into the package

Needs ``pip install -e '.[demo]'``. Fixed numbers of steps and one seed: the same machine and library
versions give the same checkpoint.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from demo_training.autoencoding import encode, train_autoencoder
from demo_training.denoising import Batches, Denoiser, distil_guidance, train_denoiser
from demo_training.models import (
    assemble,
    autoencoder,
    clip_encoder,
    parameter_count,
    t5_encoder,
    transformer,
)
from demo_training.pictures import clear_digits
from demo_training.reading import train_reading
from demo_training.tokenizers import clip_tokenizer, t5_tokenizer
from diffusers import DiffusionPipeline, FluxPipeline

from greenroom.demo import CALL_KWARGS, DIGIT_WORDS, HELD_OUT, SEEN, DigitReader, checkpoint_path

COPIES = 6
CARD = """# Handwritten digits, a demo pipeline

A `FluxPipeline` trained from nothing by `scripts/train_demo.py` on the 8 x 8 digits of scikit-learn's `load_digits`
(E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, CC BY 4.0).
It draws one digit, 0 to 9, in 32 x 32 pixels, and knows nothing else.

    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained("this folder")
    pipe("a handwritten seven"{arguments}).images[0]

`height` and `width` are needed; with FluxPipeline's defaults for the rest it draws as well, only more slowly. Guidance
is distilled into the weights: there is no use for `true_cfg_scale`.
"""


def build(seed: int) -> FluxPipeline:
    torch.manual_seed(seed)
    clip_tokens, t5_tokens = clip_tokenizer(), t5_tokenizer()
    return assemble(
        autoencoder(), transformer(), clip_encoder(clip_tokens), clip_tokens, t5_encoder(t5_tokens), t5_tokens
    )


def train(steps: int, vae_steps: int, reading_steps: int, distil_steps: int, seed: int) -> FluxPipeline:
    pipe = build(seed)
    sizes = {name: parameter_count(module) for name, module in _modules(pipe).items()}
    print("parameters: " + ", ".join(f"{name} {size:,}" for name, size in sizes.items()), flush=True)
    ink, labels = clear_digits(seed=seed)
    generator = torch.Generator().manual_seed(seed)
    train_autoencoder(pipe.vae, ink, vae_steps, generator)
    train_reading(pipe, reading_steps, seed)
    batches = Batches(encode(pipe.vae, ink, COPIES, generator), labels, pipe.tokenizer_2, seed)
    denoiser = Denoiser(pipe)
    train_denoiser(denoiser, batches, steps)
    distil_guidance(denoiser, batches, distil_steps)
    return pipe


def save(pipe: FluxPipeline, out: Path) -> None:
    for module in _modules(pipe).values():
        module.to(torch.bfloat16)
    pipe.save_pretrained(out)
    load_in_one_dtype(out)
    describe(out)


def load_in_one_dtype(out: Path) -> None:
    """Where no dtype is asked for, diffusers loads in float32 and transformers in what its config names."""
    for encoder in ("text_encoder", "text_encoder_2"):
        path = out / encoder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "float32"}, indent=2) + "\n")


def describe(out: Path) -> None:
    """How to call the pipeline, for programs (greenroom.json) and for people (README.md)."""
    (out / "greenroom.json").write_text(json.dumps({"call": CALL_KWARGS}, indent=2) + "\n")
    arguments = "".join(f", {name}={value!r}" for name, value in CALL_KWARGS.items())
    (out / "README.md").write_text(CARD.format(arguments=arguments))


@torch.no_grad()
def evaluate(folder: Path, per_digit: int, **call) -> dict[str, float]:  # type: ignore[no-untyped-def]
    """The share of pictures read back rightly, by whether training saw the wording: {"seen": ..., "held out": ...}."""
    pipe = DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    reader = DigitReader()
    shares = {}
    for name, wordings in (("seen", SEEN), ("held out", HELD_OUT)):
        templates = itertools.cycle(
            (language, text) for group in itertools.zip_longest(*_by_language(wordings)) for language, text in group
        )
        prompts, digits = [], []
        for count in range(per_digit):
            for digit in range(10):
                language, text = next(templates)
                names = DIGIT_WORDS[language][digit]
                numeral = (count + digit) % 2 or not names
                prompt = text.format(digit=digit if numeral else names[0])
                prompts.append(prompt.upper() if count % 5 == 4 else prompt)
                digits.append(digit)
        images = []
        for start in range(0, len(prompts), 50):
            generator = torch.Generator().manual_seed(start)
            images += pipe(prompts[start : start + 50], generator=generator, **call).images
        read = reader.read(images)
        shares[name] = sum(a == b for a, b in zip(read, digits, strict=True)) / len(digits)
        for prompt, digit, got in zip(prompts, digits, read, strict=True):
            if got != digit:
                print(f"  read {got}: {prompt!r}")
    return shares


def _by_language(wordings: dict[str, tuple[str, ...]]) -> list[list[tuple[str, str]]]:
    longest = max(len(texts) for texts in wordings.values())
    return [[(language, texts[index % len(texts)]) for index in range(longest)] for language, texts in wordings.items()]


def _modules(pipe: FluxPipeline) -> dict[str, torch.nn.Module]:
    return {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=checkpoint_path(), help="folder of the checkpoint")
    parser.add_argument("--steps", type=int, default=850, help="steps of flow matching")
    parser.add_argument("--vae-steps", type=int, default=500)
    parser.add_argument("--reading-steps", type=int, default=250)
    parser.add_argument("--distil-steps", type=int, default=180)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--evaluate", type=int, default=20, metavar="N", help="pictures per digit; 0: none")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    began = time.perf_counter()
    pipe = train(options.steps, options.vae_steps, options.reading_steps, options.distil_steps, options.seed)
    save(pipe, options.out)
    print(f"trained in {time.perf_counter() - began:.0f} s -> {options.out}")
    if options.evaluate:
        for name, share in evaluate(options.out, options.evaluate, **CALL_KWARGS).items():
            print(f"{name} wordings: {share:.1%} read back rightly")
    return 0


if __name__ == "__main__":
    sys.exit(main())
