"""What ranks that share weights add to a runtime: one plan, masters in shared memory, blocks that are gathered.

Without ranks none of this is there; with them, a runtime is what it is anyway, except that its masters lie in memory
that the ranks of a host share, and that the blocks of some components come from a `GatherStream`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from greenroom.accelerator import Accelerator
from greenroom.config import OffloadConfig, Strategy
from greenroom.distributed.errors import RanksError
from greenroom.distributed.gather import SLOTS, Gatherer, GatherStream
from greenroom.distributed.ranks import Ranks, Standing, agree
from greenroom.distributed.shared import SharedMasters, share_of
from greenroom.distributed.step import Budget, Conductor, Groups
from greenroom.distributed.transfer import Speeds, faster, measure
from greenroom.errors import ConfigError, NotSupportedError
from greenroom.host import HostUnit
from greenroom.strategies.layout import Layout
from greenroom.strategies.masters import host_memory, pins
from greenroom.strategies.parts import Part
from greenroom.streaming import Copier, StreamedBlock, Track
from greenroom.topology import STREAM, ResolvedPlan

ALLGATHER, RANK_LOCAL, AUTO = "allgather", "rank-local", "auto"
# Seconds that disable() waits for the other ranks, before it leaves the rest to the background.
_PATIENCE = 2.0
# Places at which the values of each tensor are compared between ranks: reading them reads their pages of a checkpoint.
_SAMPLES = 2


def wanted(config: OffloadConfig) -> bool:
    """Whether these words ask for ranks that share: a layer option was given, or the legacy flag."""
    return config.distributed or bool(config.layer_options)


class Sharing:
    """The ranks' side of one runtime.

    Args:
        ranks: who shares.
        config: the user's words.
        plan: the resolved pipeline; not kept.

    Raises:
        NotSupportedError: the weights of a component are sharded already.
    """

    def __init__(self, ranks: Ranks, config: OffloadConfig, plan: ResolvedPlan) -> None:
        self.ranks = ranks
        self.config = config
        self.transfers: dict[str, str] = {
            c.name: config.options_of(c.role).weight_transfer
            for c in plan.components
            if c.placement == STREAM or (config.strategy is Strategy.AUTO and c.role in config.components and c.blocks)
        }
        self._sharded = {c.name for c in plan.components if _refuse_sharded(c.name, c.module, self.transfers)}
        self._together = {c.name: m for c in plan.components if (m := _computing_together(c.module, ranks))}
        self.masters: SharedMasters | None = None
        self.gatherer: Gatherer | None = None
        self.stream: GatherStream | None = None
        self.conductor: Conductor | None = None
        self._groups: Groups | None = None
        self._streamed: dict[str, list[StreamedBlock]] = {}

    # ------------------------------------------------------------------ enabling

    def settle(self, accelerator: Accelerator, plan: ResolvedPlan) -> None:
        """Chooses the transfer of components whose words leave it open; equal on all ranks.

        Raises:
            RanksError: the ranks are not there, or do not have the same components.
        """
        sizes = {c.name: [b.nbytes for b in c.blocks] for c in plan.components if self.transfers.get(c.name) == AUTO}
        if not agree(self.ranks, sizes):
            return
        total = sum(map(sum, sizes.values()))
        widest = max(map(max, sizes.values()))
        speeds = measure(self.ranks, accelerator, self._new_groups().gathers, widest, self._allocate_as(accelerator))

        def slowest(proposals: list[list[float]]) -> str:
            # The forward of the slowest rank is everybody's.
            return faster(Speeds(speeds.nbytes, *(max(p[i] for p in proposals) for i in range(3))), total)

        chosen = agree(self.ranks, [speeds.whole, speeds.share, speeds.gather], slowest)
        self.transfers.update(dict.fromkeys(sizes, chosen))

    def _allocate_as(self, accelerator: Accelerator) -> Callable[[int], torch.Tensor]:
        """Host memory that is page-locked if masters of its size will be."""
        words = self.config

        def allocate(nbytes: int) -> torch.Tensor:
            pin = pins(words, accelerator, nbytes)
            return host_memory(accelerator, nbytes, pin=pin, policy=words.pin_failure_policy)[0]

        return allocate

    def _new_groups(self) -> Groups:
        if self._groups is None:
            self._groups = Groups(self.ranks)
        return self._groups

    def agree(self, parts: Sequence[Part], layout: Layout) -> None:
        """Raises RanksError, on every rank, unless all have the same pipeline, weights, words and plan."""
        components = {}
        for part in parts:
            share = layout.shares[part.name]
            components[part.name] = {
                "role": part.role,
                "weight_transfer": self.transfers.get(part.name),
                "resident_layers": sorted(share.resident) if self.gathers(part) else None,
                "hold": share.hold if self.gathers(part) else None,
                "blocks": len(part.blocks),
                "weights": None
                if part.name in self._sharded
                else {
                    u.name: {"bytes": u.nbytes, "dtypes and shapes": _layout_of(u), "values, sampled": _sample(u)}
                    for u in part.units
                },
            }
        words = self.config.to_mapping()
        words.pop("pin_memory", None)
        agree(self.ranks, {"config": words, "torch": torch.__version__, "components": components})

    def gathers(self, part: Part) -> bool:
        return self.transfers.get(part.name) == ALLGATHER

    @property
    def may_gather(self) -> bool:
        """Whether blocks of any component are gathered."""
        return ALLGATHER in self.transfers.values()

    def slots_for(self, parts: Sequence[Part]) -> int:
        """Device bytes that the slots will take."""
        widest = max((b.unit.nbytes for p in parts if self.gathers(p) for b in p.blocks), default=0)
        return SLOTS * (self.ranks.size + 1) * share_of(widest, self.ranks.size)

    def adopt(self, accelerator: Accelerator, parts: Sequence[Part], layout: Layout) -> Iterator[HostUnit]:
        """Takes the units of all parts over, one after the other, into memory that the ranks share.

        Those of parts whose weights differ from rank to rank are left out.
        """
        units = [u for p in parts if p.name not in self._sharded for u in p.units]
        self._streamed = {
            p.name: [b for b in p.blocks if b.unit.tensors and b.index not in layout.shares[p.name].resident]
            for p in parts
            if self.gathers(p)
        }
        gathered = {id(b.unit) for blocks in self._streamed.values() for b in blocks}
        self.masters = SharedMasters(self.ranks, accelerator, units)
        for unit in self.masters.adopt():
            if id(unit) in gathered:
                # Only a share of it is page-locked, so that a copy of the whole must not take it from there.
                unit.shared = unit.master
            yield unit

    def gather(self, copier: Copier, parts: Sequence[Part], pin: Callable[[torch.Tensor], bool]) -> None:
        """Makes the slots, and the stream in which blocks come.

        Args:
            pin: page-locks memory that is to be copied; whether it did.

        Raises:
            torch.OutOfMemoryError: the slots do not fit.
        """
        assert self.masters is not None
        tracks = [(p, blocks) for p in parts if (blocks := self._streamed.get(p.name)) and p.track is not None]
        if not tracks:
            return
        gatherer = self.gatherer = Gatherer(copier, self.ranks.size)
        for part, blocks in tracks:
            assert part.track is not None
            shards = [self.masters.shard(b.unit) for b in blocks]
            gatherer.add(part.track, blocks, [(s, pin(s)) for s in shards])
        gatherer.open()
        self.stream = GatherStream(copier, gatherer, self._ask, self._end)

    def start(self, budget: Budget | None = None) -> None:
        """Everything is in place on this rank: waits until it is on all, and lets the gathering begin."""
        self.ranks.meeting.answer("enabled", True)
        if self.gatherer is None:
            self._end_groups()
            return
        names = [t.name for t in self.gatherer.tracks]
        together = {names.index(n): m for n, m in self._together.items() if n in names}
        self.conductor = Conductor(self.ranks, self._new_groups(), self.gatherer, together, budget)

    # ------------------------------------------------------------------ while it runs

    def _ask(self, track: Track) -> None:
        if self.conductor is None:
            raise RanksError("this offload shares weights with other ranks and has not been enabled on all of them")
        self.conductor.ask(track)

    def _end(self, track: Track) -> None:
        if self.conductor is not None:
            self.conductor.end(track)

    def expect(self) -> None:
        """A call begins."""
        if self.conductor is not None:
            self.conductor.expect()

    def elsewhere(self) -> None:
        """This rank is not about to run a gathered component again."""
        if self.conductor is not None:
            self.conductor.elsewhere()

    def look(self, units: Sequence[HostUnit]) -> None:
        """Notices which of the units were edited on this rank."""
        if self.masters is not None:
            self.masters.look(units)

    @property
    def whole(self) -> bool:
        """Whether all ranks are still together."""
        return self.conductor is None or self.conductor.broken is None

    @property
    def device_bytes(self) -> int:
        """Bytes of the slots."""
        return self.gatherer.slot_bytes if self.gatherer is not None else 0

    def shares(self, part: Part) -> tuple[int, int]:
        """Bytes of this rank's shares of a part's gathered blocks, and how many of them are pageable."""
        pieces = self.gatherer.pieces(part.track) if self.gatherer is not None and part.track is not None else []
        return sum(p.share for p in pieces), sum(p.share for p in pieces if not p.pinned)

    @property
    def standing(self) -> Standing:
        conductor = self.conductor
        return Standing(
            self.ranks.rank,
            self.ranks.size,
            dict(self.transfers),
            conductor.passes if conductor is not None else 0,
            conductor.joined if conductor is not None else 0,
            conductor.broken if conductor is not None else None,
        )

    # ------------------------------------------------------------------ the end

    def leave(self) -> None:
        """This rank wants no more passes."""
        if self.conductor is not None:
            self.conductor.leave(self._close)
        else:
            self._close()

    def require_gathered(self) -> None:
        """Raises RanksError where weights that a call was computed with are known not to have arrived.

        A gather may fail long after the forward that asked for it has returned: hosts run ahead of their devices. Where
        the device is idle, as it is once a picture is on the host, all of a call's gathers are known. The device is not
        waited for: a call that failed ends as well, and what it began may never end.
        """
        if self.gatherer is not None:
            self.gatherer.check()

    def wait(self) -> None:
        """Waits a little for the other ranks to leave as well; what they still need goes on in the background."""
        if self.conductor is not None:
            self.conductor.wait(_PATIENCE)

    def _close(self) -> None:
        if self.gatherer is not None:
            self.gatherer.abandon()
        if self.masters is not None:
            self.masters.close()
        self.stream = None
        if self.conductor is None:
            self._end_groups()

    def _end_groups(self) -> None:
        """For groups that no conductor ends."""
        if self._groups is not None:
            self._groups.close()
            self._groups = None


def _refuse_sharded(name: str, module: torch.nn.Module, transfers: dict[str, str]) -> bool:
    """Whether parameters of a component are sharded by somebody else already.

    Raises:
        NotSupportedError: and they would be sharded once more, or moved under somebody who moves them itself.
    """
    kinds = {type(m).__mro__ for m in module.modules()}
    if any(base.__name__ in ("FSDPModule", "FullyShardedDataParallel") for mro in kinds for base in mro):
        raise NotSupportedError(
            f"{name} is sharded by FSDP, which moves and gathers its weights itself; accepted: the same model without "
            "fully_shard, whose weights the ranks then share by layer_options"
        )
    sharded = any(type(t).__name__ == "DTensor" for t in (*module.parameters(), *module.buffers()))
    parallel = getattr(module, "_parallel_config", None)  # of diffusers, whose shards are tensors like any other
    sharded = sharded or getattr(parallel, "tensor_parallel_config", None) is not None
    if sharded and transfers.get(name) != RANK_LOCAL and name in transfers:
        raise ConfigError(
            "weight_transfer",
            transfers[name],
            f'"{RANK_LOCAL}" for {name}, whose weights are sharded over the ranks already (DTensors, tensor parallel)',
        )
    return sharded


def _computing_together(module: torch.nn.Module, ranks: Ranks) -> list[tuple[int, ...]]:
    """The sets of ranks that compute one request of this component together: context parallel, as diffusers has it."""
    parallel = getattr(module, "_parallel_config", None)
    context = getattr(parallel, "context_parallel_config", None)
    if context is None:
        return []
    mesh = getattr(context, "_mesh", None)
    if mesh is None:
        return [tuple(range(ranks.size))]
    mine = sorted(int(r) for r in mesh.mesh.flatten().tolist())
    place = {r: i for i, r in enumerate(dist.get_process_group_ranks(ranks.group))}
    sets = ranks.meeting.answer("context parallel", [place[r] for r in mine if r in place])
    return [tuple(s) for s in dict.fromkeys(tuple(s) for s in sets)]


def _layout_of(unit: HostUnit) -> str:
    words = [f"{t.dtype} {tuple(t.size())} {tuple(t.stride())}" for t in unit.tensors]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]


def _sample(unit: HostUnit) -> str:
    """A hash of some of a unit's bytes: enough to tell two models apart, or two seeds."""
    digest = hashlib.sha256()
    for tensor in unit.tensors:
        flat = tensor.detach().as_strided(
            (max(1, tensor.untyped_storage().nbytes() // tensor.element_size()),), (1,), 0
        )
        first, n = int(tensor.storage_offset()), tensor.numel()
        if n and tensor.device.type == "cpu":
            places = torch.linspace(0, min(n, flat.numel() - first) - 1, min(n, _SAMPLES)).long() + first
            digest.update(flat[places].view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


__all__ = ["ALLGATHER", "RANK_LOCAL", "Sharing", "wanted"]
