"""Small pictures made large enough for a person, alone and as a sheet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

PAPER = 255


def enlarge(image: Image.Image, side: int = 256) -> Image.Image:
    """A smooth (bicubic) copy whose longer side is ``side`` pixels."""
    scale = side / max(image.size)
    size = (round(image.width * scale), round(image.height * scale))
    return image.convert("L").resize(size, Image.Resampling.BICUBIC)


def sheet(images: Sequence[Image.Image], path: str | Path, *, columns: int | None = None, side: int = 128) -> Path:
    """Writes all ``images`` to one picture file, in rows of ``columns`` (default: one row up to ten, else ten).

    Each image is enlarged to ``side`` pixels with a margin of an eighth. Returns the path written. Raises
    ValueError if there is no image.
    """
    if not images:
        raise ValueError("images: got none, at least one is accepted")
    columns = columns or min(len(images), 10)
    rows = -(-len(images) // columns)
    margin = side // 8
    cell = side + margin
    paper = Image.new("L", (columns * cell + margin, rows * cell + margin), PAPER)
    for index, image in enumerate(images):
        row, column = divmod(index, columns)
        paper.paste(enlarge(image, side), (margin + column * cell, margin + row * cell))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    paper.save(path)
    return path
