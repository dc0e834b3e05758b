"""One engine or several ranks, as the words and the environment say."""

from __future__ import annotations

from typing import Any

from greenroom.engine import group
from greenroom.engine.omni import Omni
from greenroom.engine.ranks.front import OmniRanks
from greenroom.engine.ranks.torchrun import Torchrun
from greenroom.engine.together import check_ranks


def start_engine(
    model: Any, *, data_parallel_size: int = 1, usp: int = 1, rank_timeout: float = 30.0, **words: Any
) -> Omni | OmniRanks:
    """`Omni` for one rank, else `OmniRanks`: over the ranks of a torchrun job inside one, else over new processes.

    Raises:
        ConfigError: the number of ranks is not that of the torchrun job.
        Exception: as `Omni` and `OmniRanks`.
    """
    world = group.world_size()
    if world > 1:
        check_ranks(data_parallel_size, usp)
        data_parallel_size = world // usp
        words = {**words, "launcher": Torchrun()}
    if data_parallel_size * usp > 1:
        return OmniRanks(model, data_parallel_size=data_parallel_size, usp=usp, rank_timeout=rank_timeout, **words)
    return Omni(model, **words)
