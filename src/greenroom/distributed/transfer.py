"""Which transfer is faster, and the bound that neither beats.

Note [The bound]
    One forward of blocks of w bytes on each of N ranks, with C seconds of computing, over a bus of B bytes/s for each
    rank and a link on which gathering a block of w bytes takes w / L seconds:

        rank-local   T >= max(C, W / B)              W: the sum of w, copied whole by every rank
        allgather    T >= max(C, W / (N B), W / L)   each rank copies its shares, then all are gathered

    Copies, gathers and computing go on at the same time, so that the slowest of them sets the pace. Where ranks sit
    behind one bus, B is what each of them gets while all copy. So gathering wins where the bus is the limit and the
    link is faster than N buses together leave it; with a bus as fast as the link, or computing slower than both, it
    wins nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from greenroom.accelerator import Accelerator
from greenroom.distributed.gather import all_gather
from greenroom.distributed.ranks import Ranks
from greenroom.distributed.shared import share_of

_SAMPLE_BYTES = 64 * 2**20
_REPEATS = 3


@dataclass(frozen=True)
class Speeds:
    """Seconds that moving one block takes on this rank.

    Attributes:
        nbytes: of the block.
        whole: copying all of it.
        share: copying one rank's share.
        gather: putting the shares of all ranks together.
    """

    nbytes: int
    whole: float
    share: float
    gather: float


def seconds(transfer: str, speeds: Speeds, nbytes: int, compute: float = 0.0) -> float:
    """What a forward takes at best that streams `nbytes` and computes for `compute` seconds; see the Note above."""
    a_block = speeds.whole if transfer == "rank-local" else max(speeds.share, speeds.gather)
    return max(compute, a_block * nbytes / speeds.nbytes)


def faster(speeds: Speeds, nbytes: int) -> str:
    """The transfer that takes less; where both take the same, the one that needs no other rank."""
    return min(("rank-local", "allgather"), key=lambda t: seconds(t, speeds, nbytes))


def measure(
    ranks: Ranks, accelerator: Accelerator, group: Any, block_bytes: int, allocate: Callable[[int], torch.Tensor]
) -> Speeds:
    """Times copies and a gather of a block's size, on all ranks at once, so that what they share is shared.

    Args:
        ranks: they all have to call it at the same time.
        accelerator: the device.
        group: to gather in.
        block_bytes: of the largest block; a part of a very large one will do.
        allocate: host memory to copy from, page-locked where masters will be.

    Raises:
        torch.OutOfMemoryError: two blocks do not fit on the device.
        RuntimeError: `allocate` failed.
    """
    nbytes = max(1, min(block_bytes, _SAMPLE_BYTES))
    share = share_of(nbytes, ranks.size)
    with torch.inference_mode(False), torch.no_grad():
        host = allocate(ranks.size * share).zero_()
        device, piece = accelerator.empty(ranks.size * share), accelerator.empty(share)

        def timed(work: Any) -> float:
            best = float("inf")
            for _ in range(_REPEATS):
                ranks.meeting.answer("measuring", True)
                start, end = accelerator.new_event(timing=True), accelerator.new_event(timing=True)
                start.record(accelerator.current_stream())
                work()
                end.record(accelerator.current_stream())
                end.synchronize()
                best = min(best, float(start.elapsed_time(end)) / 1e3)
            return best

        return Speeds(
            nbytes,
            timed(lambda: device[:nbytes].copy_(host[:nbytes], non_blocking=True)),
            timed(lambda: piece.copy_(host[:share], non_blocking=True)),
            timed(lambda: all_gather(device, piece, group=group)),
        )
