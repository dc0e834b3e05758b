"""What users do to a component while it is offloaded: adapters come and go, weights are replaced, layers fused.

Note [Additions stay small, replacements are cut again]
    What is added (an adapter) gets a unit of its own, so that nothing else has to be packed and locked again, and is
    brought in once a call: next to the weights of a block it is small, and fetching it block by block would cost one
    more copy each. What is heavy beside its block, or comes in place of something that is gone, is packed together
    with its block.

Note [An adapter is where its weights are]
    Between two calls an adapter is on the host if the weights under it are, and on the device if those stay there, so
    that fusing finds both on one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from greenroom.errors import OffloadError
from greenroom.host import HostUnit, module_tensors, movable, unique_bytes
from greenroom.strategies.parts import Part, refuse_unmovable

if TYPE_CHECKING:
    from greenroom.strategies.runtime import Runtime

# Beside its block an addition is heavy from this share on.
_HEAVY = 0.25
# Instead of the index of a block.
_OUTSIDE, _PINNED_DOWN = -1, -2


def tensor_ids(module: nn.Module) -> list[int]:
    """The ids of all parameters and buffers, in an order that only a change of the module changes."""
    found: list[int] = []
    stack = [module]
    pop = stack.pop
    while stack:
        state = pop().__dict__
        for kind in ("_parameters", "_buffers"):
            if state[kind]:
                found += map(id, state[kind].values())
        if state["_modules"]:
            stack += [child for child in state["_modules"].values() if child is not None]
    return found


def adapt(
    runtime: Runtime, part: Part, module: nn.Module, blocks: Sequence[nn.Module | None], shared: set[int]
) -> None:
    """Makes the units of `part` stand for the tensors that `module` has now.

    Raises:
        OffloadError: its blocks themselves were replaced.
    """
    inside = {id(m) for m in module.modules()}
    if any(b is None or id(b) not in inside for b in blocks):
        raise OffloadError(f"{part.name}: blocks were replaced since the offload; call handle.rescan()")
    part.unmovable = [t for t in module_tensors(module) if not movable(t)]
    refuse_unmovable(part.name, part.unmovable, runtime.accelerator.device)
    runtime.drop_all_additions(part)
    owner: dict[int, int] = {id(t): _OUTSIDE for t in part.apart}
    for i, block in enumerate(blocks):
        assert block is not None
        for tensor in module_tensors(block):
            owner[id(tensor)] = _OUTSIDE if owner.get(id(tensor), i) != i else i
    tensors = [t for t in module_tensors(module) if movable(t)]
    present = {id(t) for t in (*tensors, *part.views)}
    kept = {id(t) for t in part.views}
    homes: list[tuple[HostUnit, int]] = [(b.unit, b.index) for b in part.blocks]
    homes += [(part.rest, _OUTSIDE), (part.pinned_down, _PINNED_DOWN)]
    remain: list[list[torch.Tensor]] = []
    for unit, index in homes:
        # A tensor of a block that others were tied to since goes to what they have in common.
        stays = [t for t in unit.tensors if id(t) in present and (index < 0 or id(t) in kept or owner[id(t)] == index)]
        remain.append(stays)
        if len(stays) < len(unit.tensors):
            _release(runtime, part, unit)
            runtime.let_go(unit, stays)
    had = shared | {id(t) for u in part.cut_units for t in u.tensors}
    fresh = [t for t in tensors if id(t) not in had]
    for (unit, index), stays in zip(homes, remain, strict=True):
        mine = [t for t in fresh if owner.get(id(t), _OUTSIDE) == index]
        apart = [t for t in mine if any(t is a for a in part.apart)]
        if apart:
            runtime.add(part, apart, None)
            mine = [t for t in mine if not any(t is a for a in apart)]
        if unit.master is None and (stays or mine):
            runtime.adopt_again(unit, [*stays, *mine])
        elif unique_bytes(mine) > _HEAVY * unit.nbytes:
            _release(runtime, part, unit)
            runtime.adopt_again(unit, [*stays, *mine])
        elif mine:
            runtime.add(part, mine, None if index < 0 else index)
    part.known = tensor_ids(module)
    part.nbytes = unique_bytes(tensors)
    runtime.widen_ring()
    if runtime.keeper is not None:
        runtime.keeper.changed(runtime)


def _release(runtime: Runtime, part: Part, unit: HostUnit) -> None:
    """Takes one unit off the device; it is brought in again with what is missing of its part."""
    for copies in (part.copies, part.kept):
        if any(c.unit is unit for c in copies):
            runtime.copier.drop(copies, thorough=True)
    block = next((b for b in part.blocks if b.unit is unit), None)
    if block is not None:
        runtime.copier.unfix([block], thorough=True)
        if block.stay is not None:
            block.stay.wanted = False
            block.stay = None
    part.present = False
