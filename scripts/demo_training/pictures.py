"""Real handwritten digits as 32 x 32 pictures, dark ink on white, only the clearly written ones."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F

SIDE = 32
# Between 8 x 8 source pixels lies a grey slope. This contrast makes strokes of it with an edge, which the eye
# reads better; the classifier's view, shrunk back to 8 x 8, hardly changes.
CONTRAST, MIDPOINT = 1.7, 0.47


# Two digits have a form that a classifier likes and that the eye, at this size, does not: a seven with a bar closes
# into a blob, a one with a foot turns into an L. (rows of the 8 x 8 pixels, share of the digits kept): those whose
# fullest row, where bar and foot are, has the least ink.
PLAIN_FORMS = {7: (slice(3, 6), 0.12), 1: (slice(6, 8), 0.5)}


def clear_digits(share: float = 0.7, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The most legible of scikit-learn's digits, class by class: ink (N, 1, 8, 8) in 0..1, labels (N,).

    Legibility is the margin with which a classifier fitted without the example (10-fold) names it rightly; the best
    ``share`` of each class is kept, or what ``PLAIN_FORMS`` says of those that are named rightly. Of these, the tenth
    with the most ink is left out too: blots, to the eye.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.svm import SVC

    digits = load_digits()
    folds = StratifiedKFold(10, shuffle=True, random_state=seed)
    decision = cross_val_predict(
        SVC(C=10.0, gamma=0.001), digits.data, digits.target, cv=folds, method="decision_function"
    )
    ranked = np.sort(decision, axis=1)
    margin = ranked[:, -1] - ranked[:, -2]
    right = decision.argmax(1) == digits.target
    ink = digits.data.mean(1)
    kept: list[int] = []
    for label in range(10):
        members = np.flatnonzero(right & (digits.target == label))
        if label in PLAIN_FORMS:
            rows, part = PLAIN_FORMS[label]
            legible = _least(members, digits.images[:, rows].sum(2).max(1), part)
        else:
            legible = _least(members, -margin, share)
        thin = sorted(_least(legible, ink, 0.9).tolist())
        # Few plain ones are repeated (rendering moves each copy differently), so that every digit is as frequent.
        kept.extend(thin * round(100 / len(thin)))
    images = torch.from_numpy(digits.images[kept].astype(np.float32) / 16.0)[:, None]
    return images, torch.from_numpy(digits.target[kept].astype(np.int64))


def _least(members: np.ndarray, measure: np.ndarray, share: float) -> np.ndarray:
    """The ``share`` of ``members`` (indices) whose ``measure`` is least."""
    return members[np.argsort(measure[members], kind="stable")][: int(share * len(members))]


def render(ink: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """(N, 1, 8, 8) ink in 0..1 -> (N, 3, 32, 32) pictures in -1..1, each slightly turned, scaled and shifted."""
    count = ink.shape[0]
    large = F.interpolate(ink, size=SIDE, mode="bicubic", align_corners=False)
    angle = torch.empty(count).uniform_(-0.1, 0.1, generator=generator)
    scale = torch.empty(count).uniform_(0.97, 1.08, generator=generator)
    shift = torch.empty(count, 2).uniform_(-0.05, 0.05, generator=generator)
    cos, sin = torch.cos(angle) * scale, torch.sin(angle) * scale
    affine = torch.stack([torch.stack([cos, -sin, shift[:, 0]], 1), torch.stack([sin, cos, shift[:, 1]], 1)], 1)
    grid = F.affine_grid(affine, [count, 1, SIDE, SIDE], align_corners=False)
    moved = F.grid_sample(large, grid, mode="bicubic", padding_mode="zeros", align_corners=False)
    strokes = ((moved - MIDPOINT) * CONTRAST + 0.5).clamp(0, 1)
    return (1 - 2 * strokes).repeat(1, 3, 1, 1)
