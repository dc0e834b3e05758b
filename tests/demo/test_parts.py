"""The demo's small helpers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from greenroom.demo import DIGIT_WORDS, HELD_OUT, PROMPTS, SEEN, DigitReader, sheet, spell


def real_digits(count: int) -> tuple[list[Image.Image], list[int]]:
    digits = load_digits()
    pictures = [Image.fromarray((255 - image * 255 / 16).astype(np.uint8)) for image in digits.images[:count]]
    return pictures, digits.target[:count].tolist()


def test_the_reader_reads_real_digits_at_any_size() -> None:
    pictures, labels = real_digits(200)
    reader = DigitReader()
    large = [picture.resize((96, 96), Image.Resampling.BICUBIC) for picture in pictures]
    assert reader.score(pictures, labels) >= 0.98
    assert reader.score(large, labels) >= 0.98


def test_the_reader_is_no_yes_man() -> None:
    pictures, labels = real_digits(200)
    wrong = [(label + 1) % 10 for label in labels]
    assert DigitReader().score(pictures, wrong) <= 0.02


def test_the_reader_refuses_another_number_of_answers() -> None:
    pictures, labels = real_digits(3)
    with pytest.raises(ValueError, match="digits: got 2 for 3 images"):
        DigitReader().score(pictures, labels[:2])


def test_the_sheet_holds_every_picture(tmp_path: Path) -> None:
    black, white = Image.new("L", (32, 32), 0), Image.new("L", (32, 32), 255)
    path = sheet([black, white, black], tmp_path / "new" / "sheet.png", columns=2, side=64)
    paper = np.asarray(Image.open(path))
    assert paper.shape == (2 * 72 + 8, 2 * 72 + 8)
    assert (paper < 128).sum() == pytest.approx(2 * 64 * 64, rel=0.05)


def test_an_empty_sheet_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="images: got none"):
        sheet([], tmp_path / "sheet.png")


@pytest.mark.parametrize(
    ("digit", "language", "word"), [(7, "en", "seven"), (7, "de", "sieben"), (1, "fr", "1"), (0, "es", "cero")]
)
def test_digits_are_spelled(digit: int, language: str, word: str) -> None:
    assert spell(digit, language) == word


@pytest.mark.parametrize(("digit", "language"), [(10, "en"), (-1, "en"), (1, "la")])
def test_other_digits_and_languages_are_refused(digit: int, language: str) -> None:
    with pytest.raises(ValueError, match="accepted are"):
        spell(digit, language)


def test_held_out_wordings_are_not_trained() -> None:
    for language in DIGIT_WORDS:
        seen = {text.casefold() for text in SEEN[language]}
        assert seen.isdisjoint(text.casefold() for text in HELD_OUT[language])
        assert len(HELD_OUT[language]) >= len(seen) / 4


def test_ten_prompts_take_a_digit_and_half_of_them_are_held_out() -> None:
    assert len(PROMPTS) == 10
    held_out = {text.casefold() for text in HELD_OUT["en"]}
    assert sum(prompt.casefold() in held_out for prompt in PROMPTS) == 5
    assert all("seven" in prompt.format(digit="seven") for prompt in PROMPTS)
