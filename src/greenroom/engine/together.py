"""One request on several ranks at once: the sequence of each forward is split over them, as diffusers does it.

Note [Ranks that compute together stop together]
    A rank that gave a request up by itself would leave the others waiting in the middle of a forward. Whether a
    request is given up is therefore asked of all of them, each time and at the same points of the call: one is enough.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from greenroom.accelerator import Accelerator
from greenroom.engine import group
from greenroom.errors import ConfigError, NotSupportedError


def check_ranks(data_parallel_size: Any, usp: Any) -> None:
    """Refuses numbers of ranks that are not those of this job.

    Raises:
        ConfigError: naming what is accepted.
    """
    world = group.world_size()
    if isinstance(usp, bool) or not isinstance(usp, int) or usp < 1 or world % usp:
        accepted = f"a number of ranks that divides {world}, the ranks of this job"
        raise ConfigError("usp", usp, accepted, _STARTS_RANKS)
    if isinstance(data_parallel_size, bool) or data_parallel_size not in (1, world // usp):
        accepted = "1" if world == usp else f"1, or {world // usp} for the {world} ranks of this job"
        raise ConfigError("data_parallel_size", data_parallel_size, accepted, _STARTS_RANKS)


_STARTS_RANKS = "torchrun starts several, and so does OmniRanks with the same words"


class Together:
    """The ranks with which this one computes, `usp` that follow each other; all ranks of the job make one.

    Args:
        usp: how many; 2 or more.
        accelerator: where this rank computes.
    """

    def __init__(self, usp: int, accelerator: Accelerator) -> None:
        self.usp = usp
        world = dist.get_world_size()
        kind = accelerator.device.type
        self._mesh = dist.device_mesh.init_device_mesh(
            kind, (world // usp, 1, usp), mesh_dim_names=("replica", "ring", "ulysses")
        )
        first = dist.get_rank() // usp
        groups = [dist.new_group(range(i * usp, (i + 1) * usp), backend="gloo") for i in range(world // usp)]
        self._group = groups[first]
        self.thread: threading.Thread | None = None
        """The thread that runs requests; on any other, `agree` asks nobody."""

    def spread(self, pipeline: Any) -> None:
        """Has the denoisers of a pipeline split their sequences, before it is offloaded.

        Raises:
            NotSupportedError: diffusers has no plan for any of its components.
            ConfigError: the heads of attention cannot be divided among the ranks.
        """
        from diffusers import ContextParallelConfig

        models = {n: m for n, m in pipeline.components.items() if isinstance(m, nn.Module) and _has_plan(m)}
        if not models:
            raise NotSupportedError(
                f"usp = {self.usp}: diffusers cannot split a component of {type(pipeline).__name__} over ranks; "
                "accepted: 1, or data_parallel_size instead"
            )
        for name, model in models.items():
            heads = getattr(getattr(model, "config", None), "num_attention_heads", None)
            if isinstance(heads, int) and heads % self.usp:
                raise ConfigError("usp", self.usp, f"a divisor of {heads}, the attention heads of {name}")
        for model in models.values():
            mesh = self._mesh["ring", "ulysses"]
            # Any: what type checkers see of diffusers' models are stand-ins.
            split: Any = model
            split.enable_parallelism(config=ContextParallelConfig(ulysses_degree=self.usp, mesh=mesh))

    def agree(self, given_up: bool) -> bool:
        """Whether any of the ranks has given the request up."""
        if threading.current_thread() is not self.thread:
            return given_up
        flag = torch.tensor([int(given_up)])
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return bool(flag.item())


def _has_plan(model: nn.Module) -> bool:
    return getattr(model, "_cp_plan", None) is not None and hasattr(model, "enable_parallelism")
