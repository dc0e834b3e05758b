"""What stands behind every strategy: parts, their doors, and the rules of who is on the device when.

A strategy is a `Layout`: for each part, which blocks stay, and whether they stay always or only for the part's phase.
A part all of whose blocks stay for its phase takes turns as a whole; one without residents streams wholly. One
pipeline may mix them, and a layout can be exchanged for another between two calls without a reload.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from greenroom.accelerator import Accelerator
from greenroom.config import OffloadConfig
from greenroom.discovery import DIT
from greenroom.errors import OffloadError
from greenroom.host import HostUnit, module_tensors, movable
from greenroom.memory import format_bytes
from greenroom.strategies.additions import adapt, tensor_ids
from greenroom.strategies.blocks import around_block
from greenroom.strategies.brackets import Bracket, compile_in_place, keep_out_of_graphs
from greenroom.strategies.calls import refuse_strangers, running, unwatch, watch
from greenroom.strategies.entry import Door
from greenroom.strategies.keeper import Keeper, SharedKeeper
from greenroom.strategies.kept import views_into
from greenroom.strategies.layout import Layout, Share
from greenroom.strategies.masters import Masters
from greenroom.strategies.occupancy import Occupancy
from greenroom.strategies.outside import watch_parts
from greenroom.strategies.parts import Addition, Part, cut_all
from greenroom.strategies.probe import Probe, Timing
from greenroom.strategies.sharing import Sharing
from greenroom.streaming import BlockStream, Copier, StreamedBlock, Track
from greenroom.topology import RESIDENT, STREAM, Component, ResolvedPlan

# Entry points that run the blocks once for each token: streamed, they would move the whole model for each.
_RUNS_BLOCKS_MANY_TIMES = frozenset({"generate", "sample"})
_CALL_AGAIN = "all weights are whole, some where they came from: free memory there and call handle.disable() again"


class Runtime:
    """An enabled offload. Its hooks keep it alive; it keeps no module alive.

    Args:
        accelerator: the device.
        config: the user's words.
        plan: the resolved pipeline; not kept.
        residents: which blocks of each streamed component stay on the device.
        arena_bytes: size of the ring, or None for two of the largest streamed block.
        keeper: chooses the layout instead, and changes it as it learns.
        sharing: of weights with other ranks, which all enable the same offload at this moment.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: OffloadConfig,
        plan: ResolvedPlan,
        *,
        residents: Callable[[Component], Sequence[int]] = lambda component: (),
        arena_bytes: int | None = None,
        keeper: Keeper | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        keep_out_of_graphs()
        self.sharing = sharing
        self.accelerator = accelerator
        self.config = config
        self.strategy = plan.strategy
        self.keeper = keeper
        self.copier = Copier(accelerator)
        self.copier.on_kept = self._take_along
        self.stream = BlockStream(self.copier)
        self.occupancy = Occupancy()
        self.parts: list[Part] = []
        self.shared: HostUnit | None = None
        self.shared_copies: list[Any] = []
        self.shared_bytes = 0
        self.memory_since: tuple[int | float | str | None] | None = None
        """The budget that was said last, where it is another than the configuration's."""
        self.layout = Layout({})
        self._halfway = False
        """Whether an exchange of layouts was interrupted; it is made whole before anybody computes again."""
        self.asleep = False
        """Set by `sleep`: nothing is on the device, and nobody may compute."""
        self.leaving = False
        """Whether `disable` has begun and did not finish."""
        self._aside: Part | None = None
        self._materialized = 0
        """How many `materialized` blocks are open."""
        self.timings: dict[str, Timing] = {}
        """The latest forward of each part that was timed."""
        self._to_time: set[str] = set()
        self._probes: dict[str, Probe] = {}
        self.masters = Masters(accelerator, config, self.copier)
        self._modules: dict[str, weakref.ref[nn.Module]] = {}
        self._block_modules: dict[str, list[weakref.ref[nn.Module]]] = {}
        self._block_hooks: dict[str, list[Bracket]] = {}
        self._doors: dict[str, Door] = {}
        self._looks: dict[str, list[Any]] = {}
        self._in_call = False
        self._looked = False
        self.pipelines: list[Callable[[], Any]] = []
        self._undo: list[Callable[[], object]] = []
        self._undo_doors: list[Callable[[], object]] = []
        self._finalizers: list[weakref.finalize] = []
        try:
            self._enable(plan, residents, arena_bytes)
        except BaseException as error:
            self._leave_for_good()
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
        keeper = self.keeper
        self.parts = cut_all(plan, self.accelerator.device, all_may_leave=keeper is not None)
        shared = self.shared = HostUnit("shared between components", plan.shared)
        self.shared_bytes = shared.nbytes
        layout = (
            keeper.first_layout(self)
            if keeper
            else _fixed_layout(plan, self.parts, residents, arena_bytes, self.gathers)
        )
        if self.sharing is not None:
            self.sharing.agree(self.parts, layout)
        for component in plan.components:
            reference = weakref.ref(component.module)
            self._modules[component.name] = reference
            self._block_modules[component.name] = [weakref.ref(b.module) for b in component.blocks]
            origin = _origin_device(component.module)
            self._undo.append(functools.partial(_sweep, reference, origin, self.accelerator.device))
        for part, component in zip(self.parts, plan.components, strict=True):
            part.known = tensor_ids(component.module)
        self._undo.append(self._restore_additions)
        units = [*(u for part in self.parts for u in part.units), *((shared,) if shared.tensors else ())]
        self.masters.reserve_staging(units)
        for unit in units:
            self._undo.append(unit.restore)
        if self.sharing is not None:
            for unit in self.sharing.adopt(self.accelerator, self.parts, layout):
                assert unit.shared is not None
                if unit.shared is not unit.master:  # of a block that is gathered, only this rank's share is copied
                    unit.pinned = self._lock_shared(unit.shared)
        for unit in units:
            if unit.master is None:
                self.masters.adopt(unit)
        self._undo.append(self.masters.end_staging)
        self.masters.stage(max((u.nbytes for u in units), default=0))
        self._undo.append(self._drop_all)
        self.bring_what_stays()
        if self.sharing is not None:
            self.sharing.gather(self.copier, self.parts, self._lock_shard)
        self.apply_what_fits(layout)
        for part, component in zip(self.parts, plan.components, strict=True):
            self._hang_door(part, component)
        with torch.inference_mode(False), torch.no_grad():
            self.stream.prime(wait=True)
        if self.sharing is not None:
            self.sharing.start(keeper.in_common(self) if isinstance(keeper, SharedKeeper) else None)

    def bring_what_stays(self) -> None:
        """Onto the device, what no layout takes off it."""
        if self.shared is not None and self.shared.tensors:
            self.shared_copies = self.copier.load([self.shared])
        for part in self.parts:
            if part.pinned_down.tensors:
                part.kept = self.copier.load([part.pinned_down])

    def apply_what_fits(self, layout: Layout) -> None:
        """Applies `layout`; where it does not fit and a keeper can learn what does, as little as possible.

        Raises:
            torch.OutOfMemoryError: nothing fits.
        """
        try:
            self.apply(layout)
        except torch.OutOfMemoryError:
            if self.keeper is None:
                raise
            self.apply(self.keeper.least_layout(self))

    def _lock_shared(self, memory: torch.Tensor) -> bool:
        """Page-locks memory that ranks share."""
        assert self.sharing is not None and self.sharing.masters is not None
        return self.masters.lock(memory, self.sharing.masters.pin)

    def _lock_shard(self, shard: torch.Tensor) -> bool:
        locked = self._lock_shared(shard)
        if not locked:
            self.masters.open_stager(shard.nbytes)
        return locked

    def _hang_door(self, part: Part, component: Component) -> None:
        if type(component.wrapper).__name__ == "OptimizedModule":
            self._undo_doors.append(compile_in_place(component.wrapper, component.module))
        door = Door(
            component.module,
            part,
            self.accelerator.device,
            self.occupancy,
            functools.partial(self._enter, part),
            functools.partial(self._leave, part),
            on_out_of_memory=functools.partial(self._make_ready, part) if self.keeper else None,
            on_call=self.call_begins,
            may_move_along=self._is_calling,
            children=component.placement != STREAM,
            # A DiT that stays should run as if nobody watched.
            unwatched=[b.module for b in component.blocks] if component.role == DIT else (),
            blocks=[b.module for b in component.blocks],
            methods=sorted(part.hold),
        )
        self._doors[part.name] = door
        self._undo_doors.append(door.remove)

    def disable(self) -> None:
        """Takes off every hook and gives every tensor back its memory, where it was before.

        Raises:
            torch.OutOfMemoryError: weights came from the device and do not fit there now. Where that was known
                beforehand the offload goes on as it was; else `leaving` is set, and calling it again does the rest.
            OffloadError: something else failed; calling it again does the rest.
        """
        self.require_room()
        try:
            self._leave_for_good()
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # whoever keeps it must not keep device memory
            told = f"handle.disable() did not finish ({error}); {_CALL_AGAIN}"
            kind = torch.OutOfMemoryError if isinstance(error, torch.OutOfMemoryError) else OffloadError
            raise kind(told) from error

    def require_room(self) -> None:
        """Raises torch.OutOfMemoryError where weights came from the device and do not fit there any more."""
        device = self.accelerator.device
        units = [*(u for part in self.parts for u in part.units), *((self.shared,) if self.shared else ())]
        owed = sum(unit.owed(device) for unit in units)
        if not owed or self.leaving:  # of a unit that is half given back, only half is owed
            return
        room = self.accelerator.free_and_total()[0] + self.device_bytes()
        if owed > room:
            raise torch.OutOfMemoryError(
                f"{format_bytes(owed)} of weights were on {device} before the offload, and no more than "
                f"{format_bytes(room)} are there for them now; free memory there before they go back; the offload "
                "goes on as it was"
            )

    def _leave_for_good(self) -> None:
        """Undoes all that was done; what cannot be undone now is left for another time."""
        self.leaving = True
        _undo_all(self._undo)
        _undo_all(self._undo_doors)  # the last to go: until then they tell whoever enters
        for finalizer in self._finalizers:
            finalizer.detach()
        self._finalizers.clear()
        for reference in self.pipelines:
            unwatch(reference())
        self.pipelines.clear()
        self._take_apart()
        self.leaving = False
        if self.sharing is not None:
            self.sharing.wait()

    def gathers(self, part: Part) -> bool:
        return self.sharing is not None and self.sharing.gathers(part)

    @property
    def enabled(self) -> bool:
        return bool(self.parts)

    def _module_died(self) -> None:
        if not any(f.alive for f in self._finalizers):
            self._undo.clear()
            self._undo_doors.clear()
            self._take_apart()

    def _take_apart(self) -> None:
        self.masters.end_staging()  # first: on the staging thread itself nothing else may wait for copies
        for part in self.parts:
            if part.stream is not None:
                part.stream.abandon()
            if part.track is not None:
                part.track.clear()
            part.stream = part.track = None
            part.copies.clear()
            part.kept.clear()
            part.additions.clear()
        self.copier.on_kept = None
        self.shared_copies.clear()
        self.parts.clear()
        self._doors.clear()
        self._looks.clear()
        self._block_hooks.clear()
        self.stream.abandon()
        if self.sharing is not None:
            self.sharing.leave()

    def _drop_all(self) -> None:
        for part in self.parts:
            self.unhook_blocks(part)
            self._stop_looking(part)
            self.copier.unfix(part.blocks, thorough=True)
            for copies in (part.copies, part.kept, *(a.copies for a in part.additions)):
                self.copier.drop(copies, thorough=True)
            if part.stream is not None and part.stream is not self.stream:
                part.stream.close_arena()
        self.copier.drop(self.shared_copies, thorough=True)
        self.stream.close_arena()

    # ------------------------------------------------------------------ layouts

    def apply(self, layout: Layout) -> None:
        """Puts the pipeline into `layout`. What leaves the device does so before anything comes in.

        Raises:
            torch.OutOfMemoryError: it does not fit; what is missing is brought in when it is used.
        """
        self.layout = layout
        self._halfway = True
        try:
            self._exchange(layout)
        except torch.OutOfMemoryError:
            self._halfway = False
            raise
        self._halfway = False

    def _exchange(self, layout: Layout) -> None:
        at_work = [door.owner for door in self.occupancy.inside]
        for part in self.parts:
            share = layout.shares[part.name]
            was, part.share = part.share, share
            self.copier.unfix([b for b in part.blocks if b.index not in share.resident], thorough=was.hold == "always")
            self._give_stream(part)
            working = any(part is owner for owner in at_work)
            if not working:
                self._drop_additions(part)
            if share.hold == "phase" and not working and (was.hold == "always" or not part.present):
                self._take_out(part)
            part.present = False
        if layout.arena_bytes != self.stream.arena_bytes:
            self.stream.close_arena()
            if layout.arena_bytes:
                self.stream.open(layout.arena_bytes)
        for part in self.parts:
            if part.share.hold == "always" or any(part is owner for owner in at_work):
                self._bring_in(part)

    def _give_stream(self, part: Part) -> None:
        """The ring that the part's blocks pass through under its share, and hooks on them if there is one."""
        share = part.share
        wanted: BlockStream | None = None
        if part.streamed:
            own = part.stream if part.stream is not self.stream else None
            wanted = (own or BlockStream(self.copier)) if share.hold == "phase" else self.stream
            if self.sharing is not None and self.sharing.gathers(part):
                wanted = self.sharing.stream
        if wanted is not part.stream:
            self.unhook_blocks(part)
            if wanted is not None:
                self._hook_blocks(part, wanted)
        if wanted is not None and wanted is not self.stream and wanted.arena_bytes != share.arena_bytes:
            wanted.close_arena()

    def _hook_blocks(self, part: Part, stream: BlockStream) -> None:
        assert part.track is not None
        part.stream = stream
        stream.attach(part.track)
        hooks = self._block_hooks[part.name] = []
        for reference, block in zip(self._block_modules[part.name], part.blocks, strict=True):
            module = reference()
            if module is not None and block.unit.tensors:
                hooks.append(around_block(module, stream, block))
        if not part.watched and part.name not in self._looks:
            found = functools.partial(self._set_apart, part)
            self._looks[part.name] = watch_parts(self._block_modules[part.name], part.blocks, found)

    def _set_apart(self, part: Part, block: StreamedBlock, module: nn.Module) -> None:
        """Gives what the model calls while its block is away a place beside the blocks, from now on."""
        mine = [t for t in module_tensors(module) if any(t is u for u in block.unit.tensors)]
        away = part.stream is not None and (part.stream.gathers or part.stream.arena is not None)
        if not mine or not part.present or not away:
            return  # the block is away because memory ran out, and the component will run again
        self.accelerator.synchronize()  # the block's master may be on its way to the device
        if block.stay is not None:
            block.stay.wanted = False
            block.stay = None
        if self.gathers(part):
            self.copier.fix([block])  # its bytes are laid out as all ranks know them
            return
        part.apart += mine
        self.adopt_again(block.unit, [t for t in block.unit.tensors if not any(t is m for m in mine)])
        self.add(part, mine, None)
        self._bring_additions(part, working=True)

    def _take_along(self, unit: HostUnit, slab: torch.Tensor) -> None:
        """Lets views of a unit that has just left `slab`, which its model keeps, point where the unit is, for good."""
        part = next((p for p in self.parts if any(u is unit for u in p.units)), None)
        module = None if part is None else self._modules[part.name]()
        kept = [] if module is None else views_into(module, slab)
        if part is None or not kept:
            return  # a view that somebody else holds for a moment: a graph for gradients, a traceback
        part.views += unit.take_along(kept, slab)

    def _stop_looking(self, part: Part) -> None:
        part.watched = True
        for handle in self._looks.pop(part.name, ()):
            handle.remove()

    def unhook_blocks(self, part: Part) -> None:
        for handle in self._block_hooks.pop(part.name, ()):
            handle.remove()
        stream, part.stream = part.stream, None
        if stream is not None and part.track is not None:
            stream.detach(part.track)
            if stream is not self.stream:
                stream.close_arena()

    def _bring_in(self, part: Part) -> None:
        """Everything of the part's share, as far as it is not there yet.

        Raises:
            torch.OutOfMemoryError: not everything fits; a later call brings in the rest.
        """
        if not part.copies and part.rest.tensors:
            part.copies = self.copier.load([part.rest])
        if not part.kept and part.pinned_down.tensors:
            part.kept = self.copier.load([part.pinned_down])
        if part.stream is not None and part.stream is not self.stream and part.stream.arena is None:
            part.stream.open(part.share.arena_bytes)
        self.copier.fix([b for b in part.blocks if b.index in part.share.resident and b.unit.tensors])
        self._bring_additions(part, working=False)
        part.present = True

    def _take_out(self, part: Part) -> None:
        """Nothing of the part stays but what is pinned down."""
        self.copier.drop(part.copies)
        self._drop_additions(part)
        self.copier.unfix(part.blocks)
        if part.stream is not None and part.stream is not self.stream:
            part.stream.close_arena()
        part.present = False

    def device_bytes(self) -> int:
        """Bytes of weights and rings on the device now, as torch's allocators count them."""
        total = 0 if self.sharing is None else _rounded(self.sharing.device_bytes)
        total += _rounded(self.stream.arena_bytes) + sum(_rounded(c.unit.nbytes) for c in self.shared_copies)
        for part in self.parts:
            total += sum(_rounded(c.unit.nbytes) for c in (*part.copies, *part.kept))
            total += sum(_rounded(b.unit.nbytes) for b in part.blocks if b.fixed is not None)
            total += sum(_rounded(a.unit.nbytes) for a in part.additions if a.copies)
            if part.stream is not None and part.stream is not self.stream:
                total += _rounded(part.stream.arena_bytes)
        return total

    # ------------------------------------------------------------------ who is on the device when

    def require_awake(self) -> None:
        """Raises OffloadError for an offload that sleeps: its device memory was promised to somebody else.

        And for one that is half undone, whose weights are partly where they came from.
        """
        self.require_staying()
        if self.asleep:
            raise OffloadError(
                "this offload sleeps, and its device memory may be in use by others; call handle.wake() first"
            )

    def require_staying(self) -> None:
        """Raises OffloadError for an offload that is half undone."""
        if self.leaving:
            raise OffloadError(f"handle.disable() did not finish; {_CALL_AGAIN}")

    def _refuse_materialized(self) -> None:
        """Raises OffloadError for a pipeline's call inside a `materialized` block.

        What the call brings in and takes out is what the block holds, and would be let go twice.
        """
        caller = running(p for reference in self.pipelines if (p := reference()) is not None)
        if caller is not None:
            raise OffloadError(
                f"{type(caller).__name__} was called inside a block of handle.materialized(), while components are "
                "materialized; call it after the block"
            )

    def _enter(self, part: Part, door: str, inputs: Any) -> None:
        self.require_awake()
        if self._materialized:
            self._refuse_materialized()
        if part is self._aside:
            return  # one method of the component has called another
        if self.sharing is not None and not (self._looked and self._in_call):
            # Before anything is fetched ahead: edits are in the masters and not in what the ranks share.
            self.sharing.look([u for p in self.parts for u in p.units])
            self._looked = True
        if self._halfway:
            self.apply(self.layout)
        self._notice(part)
        if self.keeper is not None:
            self.keeper.entering(self, part, door, inputs)
        if self.keeper is not None and part.share.hold == "always":
            self._make_room(part)  # its activations need the room that its weights do not
        while not part.present or any(not a.copies for a in part.additions):
            try:
                if not part.present:
                    self._make_room(part)
                    self._bring_in(part)
                self._bring_additions(part, working=True)
            except torch.OutOfMemoryError as error:
                if self.keeper is None:
                    raise
                self._shrink(part, error)
        if self.keeper is not None:
            self.keeper.entered(self, part, door)
        if self.sharing is not None and not (door == "forward" and self.gathers(part)):
            self.sharing.elsewhere()
        if door == "forward" and part.name in self._to_time and part.name not in self._probes:
            self.start_timing(part)
        if part.track is not None and part.stream is not None:
            if door == "forward":
                self._begin_forward(part, part.stream, part.track)
                self._prime(part.stream)
            elif self._holds(part, door):
                self._hold(part)
        self._prime(self.stream)

    def _begin_forward(self, part: Part, stream: BlockStream, track: Track) -> None:
        stream.begin_forward(track)
        if not isinstance(self.keeper, SharedKeeper) or not self.gathers(part):
            return
        stay = self.keeper.stays(part)
        self.copier.unfix([b for b in part.blocks if b.index not in stay])
        part.share = Share("always", stay)
        self.layout = self.layout.with_share(part.name, part.share)
        try:
            self.copier.fix([b for b in part.blocks if b.index in stay and b.unit.tensors])
        except torch.OutOfMemoryError as error:
            self._shrink(part, error.with_traceback(None))
            self._begin_forward(part, stream, track)  # its pass is over; this one runs with more room

    def _leave(self, part: Part, door: str, failed: bool) -> None:
        if part is self._aside:
            return
        if part.track is not None:
            if door != "forward" and self._holds(part, door):
                self.copier.unhold(part.track)
            elif part.stream is not None:
                part.stream.end_forward(part.track, failed=failed)
                if not failed and not part.watched and door == "forward":
                    self._stop_looking(part)
        if self.keeper is not None:
            self.keeper.left(self, part, door, failed)
        if door == "forward":
            self.stop_timing(part, failed=failed)
        if part.additions and (failed or not self._in_call) and not self.occupancy.inside:
            self._drop_additions(part)

    def _make_ready(self, part: Part, door: str, error: torch.OutOfMemoryError) -> None:
        """Frees memory after `part` ran out of it behind `door`, and makes it ready to run again."""
        self._shrink(part, error)
        if door == "forward" and part.stream is not None and part.track is not None and self.gathers(part):
            self._begin_forward(part, part.stream, part.track)

    def _shrink(self, part: Part, error: torch.OutOfMemoryError) -> None:
        """Frees memory after `part` ran out of it; what it had begun is over."""
        assert self.keeper is not None
        if part.track is not None:
            while part.track.held:
                self.copier.unhold(part.track)
        if part.stream is not None:
            part.stream.heal()
        self.keeper.shrink(self, part, error)

    def _hold(self, part: Part) -> None:
        """Keeps the blocks of `part` for a call that runs them many times; within a budget, as many as fit."""
        assert part.track is not None
        blocks = part.track.streamed
        if self.keeper is not None:
            room = self.keeper.room(self, part)
            sizes = itertools.accumulate(b.unit.nbytes for b in blocks)
            blocks = [b for b, size in zip(blocks, sizes, strict=True) if size <= room]
        try:
            self.copier.hold(part.track, blocks)
        except torch.OutOfMemoryError:
            # Slow is better than not at all: each block then comes by once for each token.
            if self.keeper is None:
                raise

    def _holds(self, part: Part, door: str) -> bool:
        return door in _RUNS_BLOCKS_MANY_TIMES or door in part.hold

    def _make_room(self, part: Part) -> None:
        """Evicts what excludes `part`, before anything of it is brought in: the peak is the largest, not a sum."""
        at_work = [door.owner for door in self.occupancy.inside]
        for other in self.parts:
            if other.share.hold == "phase" and part.excludes(other) and not any(other is owner for owner in at_work):
                self._take_out(other)

    def holds(self, module: nn.Module) -> bool:
        """Whether any tensor of `module` belongs to a part."""
        known = {id(t) for part in self.parts for u in part.units for t in u.tensors}
        return any(id(t) in known for t in module_tensors(module))

    @contextlib.contextmanager
    def materialized(self, module: nn.Module) -> Iterator[None]:
        """The units that hold tensors of `module`, on the device, and written back to their masters afterwards."""
        wanted = {id(t) for t in module_tensors(module)}
        units = [u for part in self.parts for u in part.units if any(id(t) in wanted for t in u.tensors)]
        there = [u for u in units if u.bound]
        copies = self.copier.load([u for u in units if not u.bound])
        self._materialized += 1
        try:
            yield
        finally:
            self._materialized -= 1
            self.copier.drop(copies, thorough=True)
            for unit in there:
                unit.write_back()
            for stream in self.streams:
                stream.forget()

    def time_next_forwards(self) -> None:
        """Times the next forward of every part."""
        self._to_time = {part.name for part in self.parts}

    def start_timing(self, part: Part) -> None:
        names = [b.unit.name for b in part.blocks]
        self._probes[part.name] = Probe(self.accelerator, self.copier, self.block_modules(part), names)

    def stop_timing(self, part: Part, *, failed: bool = False) -> Timing | None:
        """The figures of the forward that was timed, if one was; waits for the device."""
        self._to_time.discard(part.name)
        probe = self._probes.pop(part.name, None)
        if probe is None:
            return None
        probe.stop()
        if failed:
            return None
        timing = self.timings[part.name] = probe.timing()
        return timing

    def module(self, part: Part) -> nn.Module | None:
        return self._modules[part.name]()

    @contextlib.contextmanager
    def aside(self, part: Part) -> Iterator[None]:
        """Inside the block, `part` is off the device and without hooks on its blocks; it comes in when it is used."""
        self.unhook_blocks(part)
        self._take_out(part)
        self._aside = part
        try:
            yield
        finally:
            self._aside = None
            self._give_stream(part)

    def block_modules(self, part: Part) -> list[nn.Module | None]:
        """The modules of a part's blocks, None for one that is gone."""
        return [reference() for reference in self._block_modules[part.name]]

    @property
    def streams(self) -> list[BlockStream]:
        own = [p.stream for p in self.parts if p.stream is not None]
        return list({id(stream): stream for stream in (self.stream, *own)}.values())

    # ------------------------------------------------------------------ what users change between two calls

    def call_begins(self, pipeline: Any = None) -> None:
        """A call of the pipeline has begun, as far as one can tell: components are looked at again.

        Raises:
            OffloadError: the pipeline has a component that is not part of the offload and not on the device.
        """
        self.require_awake()
        if pipeline is not None and self.enabled:
            refuse_strangers(pipeline, {id(r()) for r in self._modules.values()}, self.accelerator.device)
            if not any(known() is pipeline for known in self.pipelines):
                self.serve(pipeline)
        keep_out_of_graphs()
        if self.sharing is not None and not self._in_call:
            self.sharing.expect()
        self._in_call = True
        for part in self.parts:
            part.noticed = False

    def serve(self, pipeline: Any) -> None:
        """Learns of the calls of a pipeline, one of several that may share the components."""
        watch(pipeline, self)
        with contextlib.suppress(TypeError):  # some objects cannot be referred to weakly
            self.pipelines = [r for r in self.pipelines if r() is not None] + [_reference_to_parts(pipeline)]

    def _is_calling(self) -> bool:
        return self._in_call or bool(self.occupancy.inside)

    def _notice(self, part: Part) -> None:
        """Takes in what was added to the component or replaced in it since the last call."""
        if part.noticed and self._in_call:
            return
        module = self._modules[part.name]()
        at_work = sum(door.owner is part for door in self.occupancy.inside)
        if module is None or at_work > 1 or part.name not in self._block_modules:
            return
        for bracket in (self._doors[part.name], *self._block_hooks.get(part.name, ())):
            bracket.settle()
        if tensor_ids(module) != part.known:
            blocks = [reference() for reference in self._block_modules[part.name]]
            adapt(self, part, module, blocks, {id(t) for c in self.shared_copies for t in c.unit.tensors})
        part.noticed = True

    def adopt_again(self, unit: HostUnit, tensors: Sequence[torch.Tensor]) -> None:
        """Lets a unit that is not on the device stand for other tensors from now on."""
        self.masters.disown(unit)
        unit.retake(tensors)
        if unit.tensors:
            self.masters.adopt(unit)

    def let_go(self, unit: HostUnit, stays: Sequence[torch.Tensor]) -> None:
        """Gives all tensors of a unit that is not on the device memory of their own; those that stay are meant to be
        adopted again."""
        self.masters.disown(unit)
        unit.retake(stays)

    def add(self, part: Part, tensors: Sequence[torch.Tensor], block: int | None) -> None:
        """Takes over tensors that came to `part` later; see `Addition`."""
        where = part.rest.name if block is None else part.blocks[block].unit.name
        addition = Addition(HostUnit(f"{where}, added", tensors), block)
        self.masters.adopt(addition.unit)
        part.additions.append(addition)

    def drop_all_additions(self, part: Part) -> None:
        """Gives what was added to `part` back its own memory."""
        for addition in part.additions:
            self.copier.drop(addition.copies, thorough=True)
            self.masters.disown(addition.unit)
        part.additions.clear()

    def widen_ring(self) -> None:
        """Lets the ring hold two of the largest block again, where blocks have become larger."""
        widest = max((b.unit.nbytes for p in self.parts if p.stream is self.stream for b in p.streamed), default=0)
        if self.keeper is None and 2 * widest > self.stream.arena_bytes:
            self.apply(Layout(self.layout.shares, 2 * widest))

    def _restore_additions(self) -> None:
        for part in self.parts:
            self.drop_all_additions(part)

    def _bring_additions(self, part: Part, *, working: bool) -> None:
        absent = [a for a in part.additions if not a.copies and (working or part.stays(a))]
        if not absent:
            return
        for addition, copy in zip(absent, self.copier.load([a.unit for a in absent]), strict=True):
            addition.copies.append(copy)

    def _drop_additions(self, part: Part) -> None:
        """Between two calls an adapter is where the weights are that it may be fused into."""
        for addition in part.additions:
            if not part.stays(addition):
                self.copier.drop(addition.copies)

    def _prime(self, stream: BlockStream) -> None:
        """The first component that is entered in a call starts the ring, so that its copies hide behind it."""
        if stream.idle and stream.arena is not None:
            with torch.inference_mode(False), torch.no_grad():
                stream.prime()

    def end_call(self) -> None:
        """The pipeline's call is over: what takes turns leaves the device.

        Raises:
            RanksError: weights that the call was computed with did not arrive from the other ranks.
        """
        with self.occupancy.lock:
            if self.occupancy.busy() or self.asleep:
                return
            for part in self.parts:
                if part.share.hold == "phase":
                    self._take_out(part)
                self._drop_additions(part)
                part.noticed = False
            self._in_call = self._looked = False
            if self.sharing is not None:
                self.sharing.elsewhere()
            for stream in self.streams:
                stream.end_call()
            if self.keeper is not None:
                self.keeper.call_ended(self)
            if self.sharing is not None:
                self.sharing.require_gathered()


def _fixed_layout(
    plan: ResolvedPlan,
    parts: Sequence[Part],
    residents: Callable[[Component], Sequence[int]],
    arena_bytes: int | None,
    gathers: Callable[[Part], bool],
) -> Layout:
    """The layout that the placements of `plan` ask for."""
    shares = {}
    widest = 0
    for component, part in zip(plan.components, parts, strict=True):
        every = frozenset(range(len(part.blocks)))
        if component.placement == STREAM:
            stay = frozenset(residents(component))
            shares[part.name] = Share("always", stay)
            if not gathers(part):
                widest = max([widest, *(b.unit.nbytes for b in part.blocks if b.index not in stay)])
        else:
            shares[part.name] = Share("always" if component.placement == RESIDENT else "phase", every)
    return Layout(shares, (arena_bytes or 2 * widest) if widest else 0)


def reference_to(pipeline: Any) -> Callable[[], Any]:
    """A weak reference; to an object that has none, such as a SimpleNamespace, a strong one."""
    try:
        return weakref.ref(pipeline)
    except TypeError:
        return lambda: pipeline


def _reference_to_parts(pipeline: Any) -> Callable[[], Any]:
    """As `reference_to`, for those whom the pipeline's modules keep alive: a SimpleNamespace is made anew, of what it
    held, for as long as its modules live."""
    if type(pipeline) is not SimpleNamespace:
        return reference_to(pipeline)
    held = {n: weakref.ref(v) if isinstance(v, nn.Module) else (lambda v=v: v) for n, v in vars(pipeline).items()}

    def made_anew() -> Any:
        found = {name: reference() for name, reference in held.items()}
        lost = any(value is None and isinstance(held[name], weakref.ref) for name, value in found.items())
        return None if lost else SimpleNamespace(**found)

    return made_anew


def _undo_all(stack: list[Callable[[], object]]) -> None:
    """Does what is on `stack`, the latest first; what fails stays on it, and the rest is done all the same.

    Raises:
        Exception: the first of the failures.
    """
    failed: list[Callable[[], object]] = []
    first: Exception | None = None
    try:
        while stack:
            try:
                stack[-1]()
            except Exception as error:
                first = first or error
                failed.append(stack[-1])
            stack.pop()
    finally:
        stack += reversed(failed)
    if first is not None:
        raise first


def _rounded(nbytes: int) -> int:
    return -(-nbytes // 512) * 512


def _origin_device(module: nn.Module) -> torch.device:
    """Where the component was, for tensors that come to be while it is offloaded."""
    return next((t.device for t in module_tensors(module)), torch.device("cpu"))


def _sweep(reference: weakref.ref[nn.Module], origin: torch.device, device: torch.device) -> None:
    """Moves tensors that came to be on the device while the component was offloaded to where the rest is."""
    module = reference()
    if module is None or origin == device:
        return
    for tensor in module_tensors(module):
        if tensor.device == device and movable(tensor):
            with torch.inference_mode(False), torch.no_grad():
                tensor.data = tensor.detach().to(origin)
