"""What is measured of an engine, for metrics; one set for each rank."""

from __future__ import annotations

from dataclasses import dataclass

from greenroom.handle import Report


@dataclass(frozen=True)
class Figures:
    """One rank at one moment; sizes in bytes.

    Attributes:
        rank: its number, or None for an engine of one process.
        device: where it computes.
        alive: whether it serves requests.
        allocated: device memory in use.
        report: what its offload keeps where, or None.
        served: requests that it has finished; counted, as the two below, for each of several ranks, else 0.
        copied: weights copied to the device for them.
        steps: denoising steps that were run for them.
    """

    rank: int | None
    device: str
    alive: bool
    allocated: int = 0
    report: Report | None = None
    served: int = 0
    copied: int = 0
    steps: int = 0
