"""Model-level: whole components take turns on the device.

Text encoders, DiTs and, where selected, the VAE exclude each other, so the peak is the largest group. Masters stay
on the host: a component that leaves is dropped, not copied back.
"""

from __future__ import annotations

from greenroom.accelerator import Accelerator
from greenroom.config import OffloadConfig
from greenroom.strategies.runtime import Runtime
from greenroom.topology import ResolvedPlan


def enable(accelerator: Accelerator, config: OffloadConfig, plan: ResolvedPlan) -> Runtime:
    """Installs the strategy; nothing is changed when it raises."""
    return Runtime(accelerator, config, plan)
