"""What each strategy would do with a checkpoint, from its headers alone.

The weights are mapped and not read, so this takes as long as building the modules does, however large they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from greenroom import discovery
from greenroom.accelerator import Accelerator, find_device
from greenroom.config import OffloadConfig
from greenroom.errors import ConfigError, TopologyError
from greenroom.memory import Memory, format_bytes
from greenroom.residency import Block, BudgetTooSmall, PipelineModel, TransferCurve, plan_call
from greenroom.residency import Component as Numbers
from greenroom.strategies.parts import Part, cut
from greenroom.topology import STREAM, SWAP, resolve

_ROLES = {
    discovery.DIT: "dit",
    discovery.TEXT_ENCODER: "text_encoder",
    discovery.IMAGE_ENCODER: "text_encoder",
    discovery.VAE: "vae",
}
# Compute times are unknown here: with none, the plan that moves the least wins, on any bus.
_ANY_BUS = TransferCurve(0.0, 10e9)
_STEPS = 30
STRATEGIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("resident", {}),
    ("model-level", {"mode": "module"}),
    ("model-level, VAE too", {"mode": "module", "components": ["dit", "text_encoder", "vae"]}),
    ("layerwise, DiT", {"mode": "layer", "components": ["dit"]}),
    ("layerwise, text encoder", {"mode": "layer", "components": ["text_encoder"]}),
    ("layerwise, both", {"mode": "layer", "components": ["dit", "text_encoder"]}),
)


@dataclass(frozen=True)
class PlannedComponent:
    """One component; sizes in bytes. `blocks` are those that can be streamed, `largest_block` the largest of them."""

    name: str
    class_name: str
    role: str
    dtype: str
    weights: int
    blocks: int
    largest_block: int


@dataclass(frozen=True)
class PlannedStrategy:
    """What one strategy keeps and moves; sizes in bytes, weights only.

    Attributes:
        name: in the words of the guides.
        device: the most bytes of weights on the device at any one time.
        per_step: bytes copied for one forward of a DiT; of two experts, the larger.
        per_call: bytes copied once in a call, beside the steps.
    """

    name: str
    device: int
    per_step: int
    per_call: int


@dataclass(frozen=True)
class CheckpointPlan:
    """What can be said of a checkpoint before a weight is read; sizes in bytes, activations not counted.

    Attributes:
        components: its components.
        strategies: what each would do; those that the pipeline does not allow are left out.
        smallest: the smallest budget that any plan fits into.
        budget: the budget that was asked about, or None.
        chosen: what "auto" would do within it, in words; None without a budget.
        chosen_device: the bytes that this keeps on the device at most.
        why: why it was chosen.
    """

    components: tuple[PlannedComponent, ...]
    strategies: tuple[PlannedStrategy, ...]
    smallest: int
    budget: int | None
    chosen: str | None
    chosen_device: int | None
    why: str | None

    @property
    def weights(self) -> int:
        return sum(c.weights for c in self.components)


def budget_bytes(memory_budget: int | float | str, device: str | torch.device | None = None) -> int:
    """A memory budget in bytes; a share is one of `device`, or of the accelerator that is present.

    Raises:
        ConfigError: not an amount of memory.
        OffloadError: a share of a device that is not there.
    """
    budget = Memory.parse(memory_budget, "memory_budget")
    if budget.bytes is not None:
        return budget.bytes
    accelerator = Accelerator.of(None if device is None else find_device(device))
    if accelerator.is_cpu:
        raise ConfigError("device", str(device), "an accelerator, whose memory the budget is a share of")
    return budget.resolve(accelerator.free_and_total()[1])


def plan_pipeline(pipeline: Any, budget: int | None = None) -> CheckpointPlan:
    """The plan of a loaded (mapped) pipeline; nothing is read, moved or changed.

    Raises:
        ConfigError: the budget is too small; it says what would do.
        TopologyError: the pipeline holds no modules.
    """
    resolved = resolve(pipeline, OffloadConfig(mode="layer"))
    parts = {c.name: cut(c, resolved.shared, may_leave=False) for c in resolved.components}
    shared = sum(t.nbytes for t in resolved.shared)
    components = tuple(
        PlannedComponent(
            name=c.name,
            class_name=type(c.module).__name__,
            role=c.role,
            dtype=_dtype(c.module),
            weights=c.nbytes,
            blocks=len(c.blocks),
            largest_block=max((b.nbytes for b in c.blocks), default=0),
        )
        for c in resolved.components
    )
    strategies = []
    for name, words in STRATEGIES:
        try:
            strategies.append(_strategy(name, words, pipeline, parts, shared))
        except TopologyError:  # the pipeline has no such component
            continue
    model = _model(parts, shared)
    smallest = _smallest(model)
    chosen = None
    if budget is not None:
        try:
            chosen = plan_call(model, budget, _ANY_BUS)
        except BudgetTooSmall as error:
            raise ConfigError(
                "memory_budget",
                budget,
                f"at least {error.minimum_bytes} bytes ({format_bytes(error.minimum_bytes)}) for this checkpoint",
            ) from None
    return CheckpointPlan(
        components,
        tuple(strategies),
        smallest,
        budget,
        chosen.label if chosen else None,
        chosen.peak_bytes if chosen else None,
        chosen.why if chosen else None,
    )


def _strategy(name: str, words: dict[str, Any], pipeline: Any, parts: dict[str, Part], shared: int) -> PlannedStrategy:
    placements: dict[str, tuple[str, str]] = {}
    if words:
        placements = {c.name: (c.placement, c.group) for c in resolve(pipeline, OffloadConfig(**words)).components}
    always, arena, per_step, per_call = shared, 0, 0, 0
    turns: dict[str, int] = {}
    for part in parts.values():
        placement, group = placements.get(part.name, ("resident", ""))
        blocks = [b.unit.nbytes for b in part.blocks]
        whole = part.rest.nbytes + part.pinned_down.nbytes + sum(blocks)
        if placement == STREAM:
            always += whole - sum(blocks)
            arena = max(arena, 2 * max(blocks))
            if part.role == discovery.DIT:
                per_step = max(per_step, sum(blocks))  # of two experts, a step runs one
            else:
                per_call += sum(blocks)
        elif placement == SWAP:
            turns[group] = turns.get(group, 0) + whole
            per_call += whole
        else:
            always += whole
    return PlannedStrategy(name, always + arena + max(turns.values(), default=0), per_step, per_call)


def _model(parts: dict[str, Part], shared: int) -> PipelineModel:
    numbers = []
    for part in parts.values():
        role = _ROLES.get(part.role, "other")
        numbers.append(
            Numbers(
                name=part.name,
                role=role,
                other_bytes=part.rest.nbytes + part.pinned_down.nbytes,
                blocks=tuple(Block(b.unit.nbytes, 0.0) for b in part.blocks if b.unit.tensors),
                calls=_STEPS if role == "dit" else 1,
                group=part.group if role == "text_encoder" else None,
            )
        )
    return PipelineModel(tuple(numbers), shared)


def _smallest(model: PipelineModel) -> int:
    try:
        return plan_call(model, 1, _ANY_BUS).peak_bytes
    except BudgetTooSmall as error:
        return error.minimum_bytes


def _dtype(module: Any) -> str:
    sizes: dict[str, int] = {}
    for tensor in module.parameters():
        word = str(tensor.dtype).removeprefix("torch.")
        sizes[word] = sizes.get(word, 0) + tensor.nbytes
    return max(sizes, key=lambda word: sizes[word], default="")


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as aligned lines: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def describe(plan: CheckpointPlan) -> str:
    """The plan for people."""
    head = ("component", "class", "dtype", "weights", "blocks", "largest block")
    rows = [head] + [
        (c.name, c.class_name, c.dtype, format_bytes(c.weights), str(c.blocks or ""),
         format_bytes(c.largest_block) if c.blocks else "")
        for c in plan.components
    ]  # fmt: skip
    rows.append(("all", "", "", format_bytes(plan.weights), "", ""))
    lines = [*columns(rows), ""]
    titles = ("strategy", "on the device", "moved a forward", "moved a call besides")
    lines += columns(
        [titles] + [(s.name, *map(format_bytes, (s.device, s.per_step, s.per_call))) for s in plan.strategies]
    )
    lines += ["", f"smallest budget: {format_bytes(plan.smallest)} ({plan.smallest} bytes) of weights"]
    if plan.budget is not None:
        lines.append(
            f"within {format_bytes(plan.budget)}, auto would take: {plan.chosen}, at most "
            f"{format_bytes(plan.chosen_device or 0)} on the device"
        )
    lines.append("Activations come on top; they are measured in the first call.")
    return "\n".join(lines)
