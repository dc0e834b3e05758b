"""Cutting a component into units that travel together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from greenroom import catalog, discovery
from greenroom.errors import NotSupportedError
from greenroom.host import HostUnit, alias_groups, module_tensors, movable
from greenroom.strategies.layout import Share
from greenroom.streaming import BlockStream, DeviceCopy, StreamedBlock, Track
from greenroom.topology import RESIDENT, STREAM, SWAP, Component, ResolvedPlan

# Bytes up to which a parameter may stay on the device for the sake of an answer.
_SMALL = 2**16


@dataclass(eq=False)
class Addition:
    """Tensors that came to a component after it was cut.

    Attributes:
        block: index of the block that they were added to, None outside the blocks.
        copies: their device copy, while there is one.
    """

    unit: HostUnit
    block: int | None
    copies: list[DeviceCopy] = field(default_factory=list)


@dataclass(eq=False)
class Part:
    """One component at work: its units and where they are. Holds no module.

    Attributes:
        name: the component's dotted path from the pipeline.
        role: as in `topology.Component`.
        group: parts of one group may be on the device together.
        rest: all outside the blocks; on the device while the part is there at all.
        track: the blocks in execution order, None for a part without any.
        pinned_down: what never leaves: the pipeline reads it from outside.
        nbytes: bytes of all parameters and buffers.
        hold: entry points, beside forward, for whose whole duration all blocks stay.
        share: what it is meant to keep on the device.
        present: whether everything of its share is there.
        copies: `rest`, while it is there.
        kept: `pinned_down`.
        stream: the ring that its blocks pass through, None while all of them stay.
        known: ids of all tensors of the component as they were when they were last looked at; the units keep those
            tensors alive, so that no id is used twice.
        noticed: whether that was in the call that is running.
        apart: tensors of blocks that the model reads while their block is away.
        views: what the model keeps of its weights beside its parameters and buffers; they move with them.
        watched: whether a whole forward was watched for such.
        unmovable: tensors whose bytes nothing can stand in for; they stay where they are.
        additions: what was added to the component since it was cut, adapters mostly.
    """

    name: str
    role: str
    group: str
    rest: HostUnit
    track: Track | None
    pinned_down: HostUnit
    nbytes: int
    hold: frozenset[str] = frozenset()
    share: Share = field(default_factory=lambda: Share("always", frozenset()))
    present: bool = False
    copies: list[DeviceCopy] = field(default_factory=list)
    kept: list[DeviceCopy] = field(default_factory=list)
    stream: BlockStream | None = None
    known: list[int] = field(default_factory=list)
    noticed: bool = False
    apart: list[torch.Tensor] = field(default_factory=list)
    views: list[torch.Tensor] = field(default_factory=list)
    watched: bool = False
    unmovable: list[torch.Tensor] = field(default_factory=list)
    additions: list[Addition] = field(default_factory=list)

    @property
    def blocks(self) -> list[StreamedBlock]:
        return self.track.blocks if self.track is not None else []

    @property
    def units(self) -> list[HostUnit]:
        return [u for u in (*self.cut_units, *(a.unit for a in self.additions)) if u.tensors]

    @property
    def cut_units(self) -> list[HostUnit]:
        """The units that the component was cut into, without what was added later."""
        return [*(b.unit for b in self.blocks), self.rest, self.pinned_down]

    @property
    def other_bytes(self) -> int:
        """Bytes that are on the device while the part is there, beside its blocks."""
        return self.rest.nbytes + sum(a.unit.nbytes for a in self.additions)

    def stays(self, addition: Addition) -> bool:
        """Whether an addition is on the device between two calls, as what it was added to is."""
        if self.share.hold != "always":
            return False
        return addition.block is None or addition.block in self.share.resident

    @property
    def placement(self) -> str:
        """ "resident", "swap" or "stream", as users know them."""
        if any(b.unit.tensors and b.index not in self.share.resident for b in self.blocks):
            return STREAM
        return RESIDENT if self.share.hold == "always" else SWAP

    @property
    def streamed(self) -> list[StreamedBlock]:
        return [b for b in self.blocks if b.unit.tensors and b.index not in self.share.resident]

    def excludes(self, other: Part) -> bool:
        """Whether the two are never at work on the device together."""
        if self.group == other.group:
            return False
        return {self.role, other.role} != {discovery.DIT, discovery.COMPANION}


def cut(component: Component, shared: Iterable[torch.Tensor], *, may_leave: bool, first: bool = False) -> Part:
    """Units for the blocks of a component and for the rest.

    Tensors that two blocks share, or a block and the rest, have one owner: the rest, which does not move while the
    blocks do. Tensors in `shared` belong to several components and are left out. For a component that `may_leave`
    the device, what the pipeline reads without entering it is set apart; of the `first` one in the pipeline that is
    also its first parameter, if it is small, since some pipelines ask that where they compute (`pipe.device`).

    """
    left_out = {id(t) for t in shared}
    owner: dict[int, int] = {}
    for i, block in enumerate(component.blocks):
        for tensor in module_tensors(block.module):
            owner[id(tensor)] = -1 if owner.get(id(tensor), i) != i else i
    outside = _read_from_outside(component) if may_leave else set()
    if first and may_leave:
        outside |= {id(p) for p in [*component.module.parameters()][:1] if p.nbytes <= _SMALL}
    statistics = _running_statistics(component.module)
    if may_leave:
        outside |= statistics
    per_block: list[list[torch.Tensor]] = [[] for _ in component.blocks]
    rest: list[torch.Tensor] = []
    pinned_down: list[torch.Tensor] = []
    unmovable: list[torch.Tensor] = []
    for group in alias_groups(module_tensors(component.module)):
        if any(id(t) in left_out for t in group):
            continue
        if not all(movable(t) for t in group):
            unmovable += group
            continue
        owners = {owner.get(id(t), -1) for t in group}
        if any(id(t) in outside for t in group):
            pinned_down += group
        elif len(owners) == 1 and (index := owners.pop()) >= 0 and not any(id(t) in statistics for t in group):
            per_block[index] += group
        else:
            rest += group
    blocks = [HostUnit(f"{component.name}.{b.path}", ts) for b, ts in zip(component.blocks, per_block, strict=True)]
    return Part(
        name=component.name,
        role=component.role,
        group=component.group,
        rest=HostUnit(f"{component.name} (outside the blocks)", rest),
        track=Track(component.name, blocks) if blocks else None,
        pinned_down=HostUnit(f"{component.name} (read from outside)", pinned_down),
        nbytes=component.nbytes,
        hold=frozenset(component.hold),
        unmovable=unmovable,
    )


def cut_all(plan: ResolvedPlan, device: torch.device, *, all_may_leave: bool) -> list[Part]:
    """A part for each component of `plan`; nothing is changed.

    Args:
        device: where the pipeline computes.
        all_may_leave: whether every component may leave it, or only those that take turns.

    Raises:
        NotSupportedError: a component holds tensors that cannot be moved.
    """
    parts = [
        cut(
            component,
            plan.shared,
            may_leave=all_may_leave or component.placement == SWAP,
            first=component is plan.components[0],
        )
        for component in plan.components
    ]
    for part in parts:
        refuse_unmovable(part.name, part.unmovable, device)
    return parts


def _read_from_outside(component: Component) -> set[int]:
    """Tensors that a pipeline reads without entering the component: statistics of a VAE, mostly buffers."""
    declaration = catalog.lookup(component.module)
    names = declaration.resident if declaration else ()
    found = {id(t) for name in names for t in module_tensors(component.module.get_submodule(name))}
    if component.role == discovery.VAE:
        found |= {id(b) for b in component.module.buffers()}
    return found


def _running_statistics(module: nn.Module) -> set[int]:
    """Statistics that normalisation layers update in forward, in a way that leaves no trace on the tensor."""
    layers = (m for m in module.modules() if isinstance(m, nn.modules.batchnorm._NormBase) and m.track_running_stats)
    return {id(b) for layer in layers for b in layer.buffers(recurse=False)}


def refuse_unmovable(name: str, tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Lets tensors that cannot be moved pass where they are on `device` already.

    Raises:
        NotSupportedError: one is elsewhere.
    """
    for tensor in tensors:
        if tensor.device != device:
            raise NotSupportedError(
                f"{name} holds a {type(tensor).__name__} ({tensor.layout}) on {tensor.device}, which cannot be moved; "
                f"accepted: dense tensors, wrapper subclasses with __tensor_flatten__, or weights on {device} already"
            )
