"""A memory budget for ranks that gather blocks: which blocks stay has to be the same on all of them.

A block that one rank keeps and another does not would have to be gathered all the same, so the ranks keep the same
ones. How much room there is, each vote says anew: the need of the rank that needs most and the limit of the rank that
has least decide, on every rank alike. Blocks begin to stay when a first call was measured, and fewer stay before a
forward begins that needs more room than any before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from greenroom import discovery
from greenroom.accelerator import Accelerator
from greenroom.config import OffloadConfig
from greenroom.distributed.gather import Gatherer
from greenroom.errors import ConfigError
from greenroom.memory import Memory, format_bytes
from greenroom.residency import spread
from greenroom.strategies.budget import MARGIN, STEP_DOWN, resolve_budget
from greenroom.strategies.layout import Layout, Share
from greenroom.strategies.parts import Part
from greenroom.strategies.peaks import Peaks
from greenroom.strategies.runtime import Runtime

Signature = tuple[str, str, int]


class CommonKeeper:
    """Keeps every rank within its budget, with the same blocks on all.

    Args:
        accelerator: the device.
        config: the user's words.

    Raises:
        ConfigError: the budget is more than the device has.
    """

    def __init__(self, accelerator: Accelerator, config: OffloadConfig) -> None:
        self.accelerator = accelerator
        self.config = config
        self.budget = resolve_budget(config.memory_budget, accelerator)
        self.peaks = Peaks(accelerator)
        self.out_of_memory = 0
        self._needs: dict[Signature, int] = {}
        self._assumed = 0
        self._now: Signature | None = None
        self._common: InCommon | None = None
        self._calling = False

    # ------------------------------------------------------------------ what the ranks are told

    @property
    def need(self) -> int:
        """Bytes beside weights and slots that the largest forward needs; 0 before any was measured."""
        return max([self._assumed, *self._needs.values()])

    def base(self, runtime: Runtime, layout: Layout) -> int:
        """Device bytes of everything but blocks that stay."""
        slots = runtime.sharing.device_bytes if runtime.sharing is not None else 0
        held = slots + layout.arena_bytes + runtime.shared_bytes
        for part in runtime.parts:
            share = layout.shares[part.name]
            held += part.other_bytes + part.pinned_down.nbytes
            gathered = runtime.sharing is not None and runtime.sharing.gathers(part)
            held += 0 if gathered else sum(b.unit.nbytes for b in part.blocks if b.index in share.resident)
        return held

    # ------------------------------------------------------------------ layouts

    def first_layout(self, runtime: Runtime) -> Layout:
        """Blocks of what may leave the device are streamed; all else stays.

        Raises:
            ConfigError: not even that fits.
        """
        sharing = runtime.sharing
        assert sharing is not None
        shares: dict[str, Share] = {}
        widest = 0
        for part in runtime.parts:
            streams = part.name in sharing.transfers and any(b.unit.tensors for b in part.blocks)
            shares[part.name] = Share("always", frozenset() if streams else frozenset(b.index for b in part.blocks))
            if streams and not sharing.gathers(part):
                widest = max([widest, *(b.unit.nbytes for b in part.blocks)])
        layout = Layout(shares, 2 * widest)
        least = self.base(runtime, layout) + sharing.slots_for(runtime.parts)
        if least > self.budget:
            raise ConfigError(
                "memory_budget",
                self.budget,
                f"at least {least} bytes ({format_bytes(least)}) and room for activations",
                "weights outside the blocks and the slots take as much",
            )
        return layout

    def set_budget(self, runtime: Runtime, memory: Memory | None) -> None:
        """Another budget for this rank; what stays is settled anew by all ranks before the next pass.

        Raises:
            ConfigError: nothing fits into it; the old one stays.
        """
        budget = resolve_budget(memory, self.accelerator, runtime.device_bytes())
        least = self.base(runtime, runtime.layout)
        if least > budget:
            raise ConfigError(
                "memory_budget", budget, f"at least {least} bytes ({format_bytes(least)}) and room for activations"
            )
        self.budget = budget
        self.peaks.forget()

    def least_layout(self, runtime: Runtime) -> Layout:
        return runtime.layout

    def room(self, runtime: Runtime, part: Part) -> int:
        return max(0, self.budget - runtime.device_bytes() - self.need)

    # ------------------------------------------------------------------ watching

    def entering(self, runtime: Runtime, part: Part, door: str, inputs: Any) -> None:
        if door == "child" or len(runtime.occupancy.inside) > 1:
            return
        if not self._calling:
            self._calling = True
            self.peaks.begin_call()
        signature = self._now = (part.name, door, _elements(inputs))
        if signature not in self._needs:
            alike = [(s, n) for s, n in self._needs.items() if s[:2] == signature[:2]]
            likely = max((int(n * max(1.0, signature[2] / max(1, s[2]))) for s, n in alike), default=0)
            self._assumed = max(self._assumed, likely)

    def entered(self, runtime: Runtime, part: Part, door: str) -> None:
        if self._now is not None and self._now not in self._needs:
            self.peaks.restart()

    def left(self, runtime: Runtime, part: Part, door: str, failed: bool) -> None:
        if runtime.occupancy.inside or self._now is None:
            return
        signature, self._now = self._now, None
        if not failed and signature not in self._needs:
            self._needs[signature] = max(0, self.accelerator.peak() - runtime.device_bytes())
            self._assumed = 0 if not self.out_of_memory else self._assumed
        self.peaks.note()

    def shrink(self, runtime: Runtime, part: Part, error: torch.OutOfMemoryError) -> None:
        """Asks all ranks for more room; what stays leaves before the component runs again.

        Raises:
            torch.OutOfMemoryError: nothing that stays is left to leave.
        """
        self.out_of_memory += 1
        self.accelerator.empty_cache()
        held = [b for p in runtime.parts if runtime.gathers(p) for b in p.blocks if b.fixed is not None]
        if not held:
            raise error
        room = self.budget - runtime.device_bytes()
        self._assumed = int(max(room, self.need) * STEP_DOWN) + max(b.unit.nbytes for b in held)

    def call_ended(self, runtime: Runtime) -> None:
        self._calling = False
        self.peaks.end_call()

    def changed(self, runtime: Runtime) -> None: ...

    # ------------------------------------------------------------------ what the ranks agree on

    def in_common(self, runtime: Runtime) -> InCommon:
        """This rank's side of what all ranks settle before each pass."""
        assert runtime.sharing is not None and runtime.sharing.gatherer is not None
        self._common = InCommon(self, runtime.sharing.gatherer, self.base(runtime, runtime.layout), runtime.parts)
        return self._common

    def stays(self, part: Part) -> frozenset[int]:
        return self._common.residents.get(part.name, frozenset()) if self._common is not None else frozenset()


class InCommon:
    """What stays on the device, on every rank alike.

    Args:
        keeper: of this rank.
        gatherer: told what is not gathered any more.
        base: device bytes of everything but blocks that stay.
        parts: all of them.
    """

    def __init__(self, keeper: CommonKeeper, gatherer: Gatherer, base: int, parts: Sequence[Part]) -> None:
        self._keeper = keeper
        self._gatherer = gatherer
        self._base = base
        self._blocks = {
            p.name: [b.unit.nbytes for b in p.blocks] for p in parts if p.track in gatherer.tracks and may_stay(p)
        }
        self._settled: tuple[int, int] | None = None
        self.residents: dict[str, frozenset[int]] = {}

    def figures(self) -> tuple[int, int]:
        budget = self._keeper.budget
        return self._keeper.need, max(0, budget - int(budget * MARGIN) - self._base)

    def settle(self, need: int, limit: int) -> None:
        if not need or (need, limit) == self._settled:
            return
        self._settled = (need, limit)
        self.residents = residents(self._blocks, limit - need)
        for track in self._gatherer.tracks:
            if track.name in self._blocks:
                self._gatherer.keep(track, self.residents[track.name])


def residents(blocks: Mapping[str, Sequence[int]], room: int) -> dict[str, frozenset[int]]:
    """As many blocks of each component as fit into `room` bytes together, the same share of each, spread evenly.

    Args:
        blocks: for each component the bytes of its blocks.
    """
    steps = max((len(sizes) for sizes in blocks.values()), default=0)
    for kept in range(steps, 0, -1):
        chosen = {n: frozenset(spread(len(sizes), len(sizes) * kept // steps)) for n, sizes in blocks.items()}
        if sum(blocks[n][i] for n, indices in chosen.items() for i in indices) <= room:
            return chosen
    return {n: frozenset() for n in blocks}


def may_stay(part: Part) -> bool:
    return part.role == discovery.DIT


def _elements(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel()
    if isinstance(value, dict):
        return sum(map(_elements, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_elements, value))
    return 0
