"""Reads a drawn digit back: the judge of the demo pipeline's pictures, itself trained on real handwriting only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from numpy.typing import NDArray


class DigitReader:
    """A support-vector classifier fitted on scikit-learn's 1,797 real 8 x 8 handwritten digits.

    A picture of any size is read by shrinking it (bicubic) to the 8 x 8 pixels of the real ones, so the
    classifier never sees a drawn digit while it is fitted. Needs scikit-learn (``pip install
    'greenroom[demo]'``).

    Raises ImportError, with that hint, where scikit-learn is missing.
    """

    def __init__(self) -> None:
        try:
            from sklearn.datasets import load_digits
            from sklearn.svm import SVC
        except ImportError as error:
            raise ImportError("reading digits back needs scikit-learn: pip install 'greenroom[demo]'") from error
        digits = load_digits()
        self._svm = SVC(C=10.0, gamma=0.001).fit(digits.data, digits.target)

    def read(self, images: Sequence[Image.Image]) -> list[int]:
        """The digit read in each picture (dark ink on white, any size)."""
        return [int(digit) for digit in self._svm.predict(np.stack([_features(image) for image in images]))]

    def score(self, images: Sequence[Image.Image], digits: Sequence[int]) -> float:
        """The share of ``images`` read as the digit asked for, between 0 and 1."""
        if len(images) != len(digits):
            raise ValueError(f"digits: got {len(digits)} for {len(images)} images, one each is accepted")
        return float(np.mean(np.asarray(self.read(images)) == np.asarray(digits)))


def _features(image: Image.Image) -> NDArray[np.float64]:
    """64 ink values from 0 (white) to 16 (black), the scale of the real digits."""
    small = image.convert("L").resize((8, 8), Image.Resampling.BICUBIC)
    return (255.0 - np.asarray(small, dtype=np.float64)).reshape(-1) * (16.0 / 255.0)
