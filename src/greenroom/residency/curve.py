"""How long a host-to-device copy takes, from measured samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

# Theil-Sen looks at every pair of samples; beyond this many samples an even subsample says the same.
_MAX_SAMPLES = 256
# A sample further from the robust line than this many scaled median deviations is left out of the fit.
_OUTLIER_CUT = 3.5
# Below this relative residual a sample is never called an outlier: exact data has a deviation of zero.
_RESIDUAL_FLOOR = 0.01


@dataclass(frozen=True)
class TransferCurve:
    """Time of one copy: ``latency_s + bytes / bytes_per_s`` (seconds, bytes, bytes per second).

    Raises ValueError for a negative latency or a bandwidth that is not positive.
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise ValueError(f"latency_s: got {self.latency_s!r}, accepted are finite seconds >= 0")
        if not self.bytes_per_s > 0:
            raise ValueError(f"bytes_per_s: got {self.bytes_per_s!r}, accepted is a bandwidth > 0")

    def seconds(self, nbytes: int) -> float:
        """Seconds for one copy of ``nbytes``; a copy of nothing takes no time."""
        return self.latency_s + nbytes / self.bytes_per_s if nbytes else 0.0

    def to_dict(self) -> dict[str, float]:
        return {"latency_s": self.latency_s, "bytes_per_s": self.bytes_per_s}

    @staticmethod
    def fit(samples: Sequence[tuple[int, float]]) -> TransferCurve:
        """Fit a curve to measured ``(bytes, seconds)`` pairs; a minority of wild samples does no harm.

        A Theil-Sen line (median of the pairwise slopes; Sen, 1968) marks the outliers; the rest are fitted
        by least squares on the relative error, so that small and large copies count alike. A fit with a
        negative latency is repeated with the latency held at zero.

        Raises ValueError when there is no sample, when a sample is not positive, or when time does not grow
        with size.
        """
        points = sorted((float(b), float(s)) for b, s in samples)
        if not points:
            raise ValueError("samples: got none, accepted is at least one (bytes, seconds) pair")
        for b, s in points:
            if not (b > 0 and s > 0 and math.isfinite(b) and math.isfinite(s)):
                raise ValueError(f"samples: got ({b!r}, {s!r}), accepted are finite bytes > 0 and seconds > 0")
        if len(points) > _MAX_SAMPLES:
            points = [points[i * len(points) // _MAX_SAMPLES] for i in range(_MAX_SAMPLES)]
        slopes = [(s1 - s0) / (b1 - b0) for i, (b0, s0) in enumerate(points) for b1, s1 in points[i + 1 :] if b1 > b0]
        if not slopes:  # one size only: the latency cannot be told apart
            return TransferCurve(0.0, points[0][0] / median(s for _, s in points))
        slope = median(slopes)
        intercept = median(s - slope * b for b, s in points)
        errors = [abs(s - intercept - slope * b) / s for b, s in points]
        cut = max(_OUTLIER_CUT * 1.4826 * median(errors), _RESIDUAL_FLOOR)
        kept = [p for p, e in zip(points, errors, strict=True) if e <= cut]
        if len({b for b, _ in kept}) < 2:
            kept = points
        latency, slope = _least_squares(kept)
        if latency < 0:
            latency, slope = 0.0, sum(b / s for b, s in kept) / sum((b / s) ** 2 for b, s in kept)
        if slope <= 0:
            raise ValueError(f"samples: got times that do not grow with size ({len(points)} samples)")
        return TransferCurve(latency, 1.0 / slope)


def _least_squares(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope that minimise the sum of squared relative errors (weights 1/s^2)."""
    weights = [1.0 / (s * s) for _, s in points]
    total = sum(weights)
    mean_b = sum(w * b for w, (b, _) in zip(weights, points, strict=True)) / total
    mean_s = sum(w * s for w, (_, s) in zip(weights, points, strict=True)) / total
    var = sum(w * (b - mean_b) ** 2 for w, (b, _) in zip(weights, points, strict=True))
    cov = sum(w * (b - mean_b) * (s - mean_s) for w, (b, s) in zip(weights, points, strict=True))
    slope = cov / var
    return mean_s - slope * mean_b, slope
