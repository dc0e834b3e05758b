"""Pure arithmetic of residency: sizes and a budget -> what stays on the device, predicted peak and step time.

Numbers in, dataclasses out: nothing here knows torch, a device or a module. Bytes and seconds everywhere.
"""

from greenroom.residency.choose import Residency, choose, minimum_bytes, resident_count, spread
from greenroom.residency.curve import TransferCurve
from greenroom.residency.pipeline import (
    Alternative,
    BudgetTooSmall,
    Component,
    ComponentPlan,
    Phase,
    PipelineModel,
    Plan,
    plan_call,
)
from greenroom.residency.ring import Block, Steady, run_s, simulate

__all__ = [
    "Alternative",
    "Block",
    "BudgetTooSmall",
    "Component",
    "ComponentPlan",
    "Phase",
    "PipelineModel",
    "Plan",
    "Residency",
    "Steady",
    "TransferCurve",
    "choose",
    "minimum_bytes",
    "plan_call",
    "resident_count",
    "run_s",
    "simulate",
    "spread",
]
