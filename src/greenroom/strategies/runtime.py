"""What stands behind every strategy: parts, their doors, and the rules of who is on the device when.

A strategy is a choice of placements: "swap" for whole components that take turns, "stream" for components whose
blocks pass through the ring, "resident" for what stays. The rules are the same for all three, and one pipeline may
mix them.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from greenroom.accelerator import Accelerator
from greenroom.config import OffloadConfig
from greenroom.host import HostUnit, module_tensors
from greenroom.strategies.entry import Door, Occupancy
from greenroom.strategies.parts import Part, cut
from greenroom.streaming import BlockStream, Copier, StreamedBlock
from greenroom.topology import RESIDENT, STREAM, SWAP, Component, ResolvedPlan

# Entry points that run the blocks once for each token: streamed, they would move the whole model for each.
_RUNS_BLOCKS_MANY_TIMES = frozenset({"generate", "sample"})


class Runtime:
    """An enabled offload. Its hooks keep it alive; it keeps no module alive.

    Args:
        accelerator: the device.
        config: the user's words.
        plan: the resolved pipeline; not kept.
        residents: which blocks of each streamed component stay on the device, by component name.
        arena_bytes: size of the arena, or None for two of the largest streamed block.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: OffloadConfig,
        plan: ResolvedPlan,
        *,
        residents: Callable[[Component], Sequence[int]] = lambda component: (),
        arena_bytes: int | None = None,
    ) -> None:
        self.accelerator = accelerator
        self.config = config
        self.strategy = plan.strategy
        self.copier = Copier(accelerator)
        self.stream = BlockStream(self.copier)
        self.occupancy = Occupancy()
        self.parts: list[Part] = []
        self.pinned_bytes = 0
        self.unpinned_bytes = 0
        self._modules: dict[str, weakref.ref[nn.Module]] = {}
        self._undo = contextlib.ExitStack()
        self._finalizers: list[weakref.finalize] = []
        try:
            self._enable(plan, residents, arena_bytes)
        except BaseException as error:
            self.disable()
            traceback.clear_frames(error.__traceback__)  # whoever keeps it must not keep device memory
            raise
        # Kept alive by the modules and by nothing else, and taken apart when the last of them is gone: hooks, parts
        # and blocks know each other, and memory should not wait for the garbage collector.
        for component in plan.components:
            finalizer = weakref.finalize(component.module, self._module_died)
            finalizer.atexit = False
            self._finalizers.append(finalizer)

    # ------------------------------------------------------------------ enabling and disabling

    def _enable(
        self, plan: ResolvedPlan, residents: Callable[[Component], Sequence[int]], arena_bytes: int | None
    ) -> None:
        parts = [cut(component, plan.shared) for component in plan.components]
        shared = HostUnit("shared between components", plan.shared)
        origins = {c.name: _origin_devices(c.module) for c in plan.components}
        self.parts = parts
        self._modules = {c.name: weakref.ref(c.module) for c in plan.components}
        for component in plan.components:
            reference = weakref.ref(component.module)
            self._undo.callback(_sweep, reference, origins[component.name], self.accelerator.device)
        for unit in (*(u for part in parts for u in part.units), *((shared,) if shared.tensors else ())):
            self._undo.callback(unit.restore)
            self._adopt(unit)
        if shared.tensors:
            self._keep(self.copier.load([shared]))
        for part, component in zip(parts, plan.components, strict=True):
            self._place(part, component, residents)
        self._undo.callback(self._drop_all)
        streamed = self.stream.streamed
        if streamed:
            self.stream.open(arena_bytes or 2 * max(b.unit.nbytes for b in streamed))
        for part, component in zip(parts, plan.components, strict=True):
            self._install(part, component)
        with torch.inference_mode(False), torch.no_grad():
            self.stream.prime()

    def _adopt(self, unit: HostUnit) -> None:
        pin = self.config.pin_memory
        pinned = pin if isinstance(pin, bool) else self.pinned_bytes + unit.nbytes <= pin
        pinned = pinned and not self.accelerator.is_cpu
        try:
            unit.adopt(functools.partial(self.accelerator.host_buffer, pin=pinned), pinned=pinned)
        except RuntimeError:
            if not pinned or self.config.pin_failure_policy == "fail":
                raise
            pinned = False
            unit.adopt(functools.partial(self.accelerator.host_buffer, pin=False), pinned=False)
        if pinned:
            self.pinned_bytes += unit.nbytes
        else:
            self.unpinned_bytes += unit.nbytes

    def _keep(self, copies: list[Any]) -> None:
        self._undo.callback(self.copier.drop, copies, thorough=True)

    def _place(self, part: Part, component: Component, residents: Callable[[Component], Sequence[int]]) -> None:
        always = [part.pinned_down] if part.pinned_down.tensors else []
        if part.placement in (RESIDENT, STREAM) and part.rest.tensors:
            always.append(part.rest)
        if part.placement == RESIDENT:
            always += [u for u in part.blocks if u.tensors]
        part.kept = self.copier.load(always)
        self._keep(part.kept)
        if part.placement == STREAM:
            part.track = self.stream.add_track(part.name, part.blocks)
            self.stream.fix([part.track.blocks[i] for i in residents(component)])

    def _install(self, part: Part, component: Component) -> None:
        door = Door(
            component.module,
            part,
            self.accelerator.device,
            self.occupancy,
            functools.partial(self._enter, part),
            functools.partial(self._leave, part),
            children=part.placement != STREAM,
            methods=sorted(part.hold),
        )
        self._undo.callback(door.remove)
        if part.track is None:
            return
        for block, unit_block in zip(component.blocks, part.track.blocks, strict=True):
            if unit_block.unit.tensors:
                for handle in _hook_block(block.module, self.stream, unit_block):
                    self._undo.callback(handle.remove)

    def disable(self) -> None:
        """Takes off every hook and gives every tensor back its memory, where it was before."""
        for finalizer in self._finalizers:
            finalizer.detach()
        self._finalizers.clear()
        self._undo.close()
        self.parts.clear()
        self.stream.abandon()

    @property
    def enabled(self) -> bool:
        return bool(self.parts)

    def _module_died(self) -> None:
        if not any(f.alive for f in self._finalizers):
            self._undo.pop_all()
            self.parts.clear()
            self.stream.abandon()

    def _drop_all(self) -> None:
        self.stream.unfix([b for t in self.stream.tracks for b in t.blocks], thorough=True)
        self.stream.close_arena()
        for part in self.parts:
            self.copier.drop(part.copies)

    # ------------------------------------------------------------------ who is on the device when

    def _enter(self, part: Part, door: str) -> None:
        if part.placement == RESIDENT:
            self._prime_once()
            return
        if part.placement == SWAP:
            if not part.copies:
                self._make_room(part)
                part.copies = self.copier.load([u for u in (*part.blocks, part.rest) if u.tensors])
            self._prime_once()
            return
        assert part.track is not None
        self._make_room(part)
        if part.phase:
            self.stream.fix(part.phase)
        if door == "forward":
            self.stream.begin_forward(part.track)
            self._prime_once()
        elif door in _RUNS_BLOCKS_MANY_TIMES or door in part.hold:
            self.stream.hold(part.track)

    def _leave(self, part: Part, door: str, failed: bool) -> None:
        if part.track is None:
            return
        if door == "forward":
            if not failed:
                self.stream.end_forward(part.track)
        elif door in _RUNS_BLOCKS_MANY_TIMES or door in part.hold:
            self.stream.unhold(part.track)

    def _make_room(self, part: Part) -> None:
        """Evicts what excludes `part`, before anything of it is brought in: the peak is the largest, not a sum."""
        inside = [door.owner for door in self.occupancy.inside]
        for other in self.parts:
            if part.excludes(other) and not any(other is owner for owner in inside):
                self.copier.drop(other.copies)
                self.stream.unfix(other.phase)

    @contextlib.contextmanager
    def materialized(self, module: nn.Module) -> Iterator[None]:
        """The units that hold tensors of `module`, on the device, and written back to their masters afterwards."""
        wanted = {id(t) for t in module_tensors(module)}
        units = [u for part in self.parts for u in part.units if any(id(t) in wanted for t in u.tensors)]
        there = [u for u in units if u.bound]
        copies = self.copier.load([u for u in units if not u.bound])
        try:
            yield
        finally:
            self.copier.drop(copies, thorough=True)
            for unit in there:
                unit.write_back()
            self.stream.forget()

    def _prime_once(self) -> None:
        """The first component that is entered in a call starts the ring, so that its copies hide behind it."""
        if self.stream.idle:
            with torch.inference_mode(False), torch.no_grad():
                self.stream.prime()

    def end_call(self) -> None:
        """The pipeline's call is over: what takes turns leaves the device."""
        with self.occupancy.lock:
            if self.occupancy.inside:
                return
            for part in self.parts:
                self.copier.drop(part.copies)
                self.stream.unfix(part.phase)
            self.stream.end_call()


def _hook_block(module: nn.Module, stream: BlockStream, block: StreamedBlock) -> list[Any]:
    def before(module: nn.Module, args: Any) -> None:
        stream.enter(block)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        stream.leave(block)

    return [
        module.register_forward_pre_hook(before, prepend=True),
        module.register_forward_hook(after, always_call=True),
    ]


def _origin_devices(module: nn.Module) -> torch.device:
    """Where the component was, for tensors that come to be while it is offloaded."""
    return next((t.device for t in module_tensors(module)), torch.device("cpu"))


def _sweep(reference: weakref.ref[nn.Module], origin: torch.device, device: torch.device) -> None:
    """Moves tensors that came to be on the device while the component was offloaded to where the rest is."""
    module = reference()
    if module is None or origin == device:
        return
    for tensor in module_tensors(module):
        if tensor.device == device:
            with torch.inference_mode(False), torch.no_grad():
                tensor.data = tensor.detach().to(origin)
