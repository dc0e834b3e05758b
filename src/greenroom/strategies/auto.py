"""Auto: the coarsest strategy that meets a memory budget, and the blocks that stay within it."""

from __future__ import annotations

from greenroom.accelerator import Accelerator
from greenroom.config import OffloadConfig, Strategy
from greenroom.errors import ConfigError
from greenroom.strategies.budget import MemoryKeeper, resolve_budget
from greenroom.strategies.draft import Draft
from greenroom.strategies.in_common import CommonKeeper
from greenroom.strategies.runtime import Runtime
from greenroom.strategies.sharing import Sharing
from greenroom.topology import ResolvedPlan


def require_possible(draft: Draft) -> None:
    """Raises ConfigError where `draft` cannot be enabled, as far as that is known beforehand; touches nothing."""
    _refuse_residents(draft.config)
    if draft.ranks_share:  # what has to stay beside gathered blocks is theirs to settle
        resolve_budget(draft.config.memory_budget, draft.accelerator, draft.held)
    else:
        MemoryKeeper(draft.accelerator, draft.config, draft.held).require_fit(draft)


def enable(
    accelerator: Accelerator, config: OffloadConfig, plan: ResolvedPlan, sharing: Sharing | None = None
) -> Runtime:
    """Installs the strategy; nothing is changed when it raises.

    Args:
        sharing: of the weights with other ranks, where there are any.

    Raises:
        ConfigError: nothing fits into the budget, or the residents were chosen by hand as well.
    """
    _refuse_residents(config)
    if sharing is not None:
        sharing.settle(accelerator, plan)
        if sharing.may_gather:
            runtime = Runtime(accelerator, config, plan, keeper=CommonKeeper(accelerator, config), sharing=sharing)
            runtime.strategy = Strategy.DISTRIBUTED_LAYERWISE
            return runtime
    return Runtime(accelerator, config, plan, keeper=MemoryKeeper(accelerator, config), sharing=sharing)


def _refuse_residents(config: OffloadConfig) -> None:
    for role, options in config.layer_options.items():
        if options.resident_layers:
            raise ConfigError(
                f"layer_options.{role}.resident_layers",
                options.resident_layers,
                "0 beside a memory budget, which chooses the residents",
            )
