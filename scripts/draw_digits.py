#!/usr/bin/env python
"""Draws docs/digits.png: the ten digits, each from a wording of its own, by the demo pipeline.

python scripts/draw_digits.py [--out FILE] [--seed N] [--rows N]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from greenroom.demo import CALL_KWARGS, PROMPTS, load_pipeline, sheet, spell

DEFAULT = Path(__file__).resolve().parent.parent / "docs" / "digits.png"


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=DEFAULT)
    parser.add_argument("--seed", type=int, default=4)
    parser.add_argument("--rows", type=int, default=1, help="rows of ten digits, each with another seed")
    options = parser.parse_args()
    pipe = load_pipeline()
    images = []
    for row in range(options.rows):
        for digit in range(10):
            prompt = PROMPTS[(digit + row) % len(PROMPTS)].format(digit=spell(digit))
            generator = torch.Generator().manual_seed(options.seed + row)
            images += pipe(prompt, generator=generator, **CALL_KWARGS).images
            if row == 0:
                print(f"{digit}: {prompt}")
    print(sheet(images, options.out, columns=10))
    return 0


if __name__ == "__main__":
    sys.exit(main())
