"""Layerwise: one block on the device, the next on its way while it computes.

`resident_layers` blocks of a DiT stay, spread evenly among the streamed ones: the bus would idle during a run of
residents and the chip during a run of streamed blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from greenroom.accelerator import Accelerator
from greenroom.config import OffloadConfig, Strategy
from greenroom.errors import ConfigError
from greenroom.residency import spread
from greenroom.strategies.draft import Draft
from greenroom.strategies.runtime import Runtime
from greenroom.strategies.sharing import Sharing
from greenroom.topology import STREAM, Component, ResolvedPlan


def require_possible(draft: Draft) -> None:
    """Raises ConfigError where `draft` cannot be enabled, as far as that is known beforehand; touches nothing."""
    for component in draft.plan.components:
        _residents(draft.config, component)


def enable(
    accelerator: Accelerator, config: OffloadConfig, plan: ResolvedPlan, sharing: Sharing | None = None
) -> Runtime:
    """Installs the strategy; nothing is changed when it raises.

    Args:
        sharing: of the weights with other ranks, where there are any.

    Raises:
        ConfigError: `resident_layers` is more than a component has blocks.
    """
    for component in plan.components:
        _residents(config, component)

    def residents(component: Component) -> Sequence[int]:
        return _residents(config, component)

    if sharing is not None:
        sharing.settle(accelerator, plan)
    runtime = Runtime(accelerator, config, plan, residents=residents, sharing=sharing)
    if sharing is not None:
        runtime.strategy = Strategy.DISTRIBUTED_LAYERWISE
    elif not config.distributed:
        runtime.strategy = Strategy.LAYERWISE  # resident blocks alone need no group
    return runtime


def _residents(config: OffloadConfig, component: Component) -> Sequence[int]:
    if component.placement != STREAM:
        return ()
    wanted = config.options_of(component.role).resident_layers
    count = len(component.blocks)
    if wanted > count:
        raise ConfigError(
            f"layer_options.{component.role}.resident_layers",
            wanted,
            f"0 to {count}, the number of blocks in {component.name}",
        )
    return spread(count, wanted)
