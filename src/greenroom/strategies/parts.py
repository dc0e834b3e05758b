"""Cutting a component into units that travel together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from greenroom import catalog, discovery
from greenroom.errors import NotSupportedError
from greenroom.host import HostUnit, alias_groups, module_tensors
from greenroom.streaming import DeviceCopy, StreamedBlock, Track
from greenroom.topology import SWAP, Component


@dataclass
class Part:
    """One component at work: its units and where they are. Holds no module.

    Attributes:
        rest: what stays on the device while the part is at all there: all outside the blocks.
        blocks: one unit a block, in execution order.
        pinned_down: what never leaves, whatever the placement: the pipeline reads it from outside.
        copies: what of `rest` and, for a swapped part, `blocks` is on the device now.
        track: the streamed blocks, for a part that is streamed.
        phase: streamed blocks that are on the device only while this part is at work.
    """

    name: str
    role: str
    placement: str
    group: str
    rest: HostUnit
    blocks: list[HostUnit]
    pinned_down: HostUnit
    nbytes: int
    hold: frozenset[str] = frozenset()
    copies: list[DeviceCopy] = field(default_factory=list)
    kept: list[DeviceCopy] = field(default_factory=list)
    track: Track | None = None
    phase: list[StreamedBlock] = field(default_factory=list)

    @property
    def units(self) -> list[HostUnit]:
        return [u for u in (*self.blocks, self.rest, self.pinned_down) if u.tensors]

    def excludes(self, other: Part) -> bool:
        """Whether the two are never at work on the device together."""
        if self.group == other.group:
            return False
        return {self.role, other.role} != {discovery.DIT, discovery.COMPANION}


def cut(component: Component, shared: Iterable[torch.Tensor]) -> Part:
    """Units for the blocks of a component and for the rest.

    Tensors that two blocks share, or a block and the rest, have one owner: the rest, which does not move while the
    blocks do. Tensors in `shared` belong to several components and are left out.

    Raises:
        NotSupportedError: a tensor is a wrapper whose bytes lie elsewhere.
    """
    left_out = {id(t) for t in shared}
    owner: dict[int, int] = {}
    for i, block in enumerate(component.blocks):
        for tensor in module_tensors(block.module):
            owner[id(tensor)] = -1 if owner.get(id(tensor), i) != i else i
    outside = _read_from_outside(component) if component.placement == SWAP else set()
    per_block: list[list[torch.Tensor]] = [[] for _ in component.blocks]
    rest: list[torch.Tensor] = []
    pinned_down: list[torch.Tensor] = []
    for group in alias_groups(module_tensors(component.module)):
        for tensor in group:
            _check_plain(component.name, tensor)
        if any(id(t) in left_out for t in group):
            continue
        owners = {owner.get(id(t), -1) for t in group}
        if any(id(t) in outside for t in group):
            pinned_down += group
        elif len(owners) == 1 and (index := owners.pop()) >= 0:
            per_block[index] += group
        else:
            rest += group
    return Part(
        name=component.name,
        role=component.role,
        placement=component.placement,
        group=component.group,
        rest=HostUnit(f"{component.name} (outside the blocks)", rest),
        blocks=[HostUnit(f"{component.name}.{b.path}", ts) for b, ts in zip(component.blocks, per_block, strict=True)],
        pinned_down=HostUnit(f"{component.name} (read from outside)", pinned_down),
        nbytes=component.nbytes,
        hold=frozenset(component.hold),
    )


def _read_from_outside(component: Component) -> set[int]:
    """Tensors that a pipeline reads without entering the component: statistics of a VAE, mostly buffers."""
    declaration = catalog.lookup(component.module)
    names = declaration.resident if declaration else ()
    found = {id(t) for name in names for t in module_tensors(component.module.get_submodule(name))}
    if component.role == discovery.VAE:
        found |= {id(b) for b in component.module.buffers()}
    return found


def _check_plain(name: str, tensor: torch.Tensor) -> None:
    if type(tensor.data) is not torch.Tensor or tensor.layout is not torch.strided:
        raise NotSupportedError(
            f"{name} holds a {type(tensor.data).__name__} ({tensor.layout}), which cannot be moved yet; accepted: "
            "plain dense tensors"
        )
