"""What an offload would be, before anything is touched: its parts, and whether they can be kept as asked."""

from __future__ import annotations

from dataclasses import dataclass

from greenroom.accelerator import Accelerator
from greenroom.config import OffloadConfig
from greenroom.host import HostUnit
from greenroom.strategies.parts import Part, cut_all
from greenroom.topology import ResolvedPlan


@dataclass(frozen=True, eq=False)
class Draft:
    """An offload that is not enabled.

    Attributes:
        accelerator: the device.
        config: the user's words.
        plan: the resolved pipeline.
        parts: the components, cut into units that are not adopted.
        shared_bytes: device bytes of what several components hold.
        held: device bytes of earlier offloads of the same components, which will be free by then.
        ranks_share: whether ranks share the weights, so that more is settled between them.
    """

    accelerator: Accelerator
    config: OffloadConfig
    plan: ResolvedPlan
    parts: list[Part]
    shared_bytes: int
    held: int = 0
    ranks_share: bool = False

    @classmethod
    def of(
        cls, accelerator: Accelerator, config: OffloadConfig, plan: ResolvedPlan, *, held: int, ranks_share: bool
    ) -> Draft:
        """Cuts the components, and changes nothing.

        Raises:
            NotSupportedError: a component holds tensors that cannot be moved.
        """
        parts = cut_all(plan, accelerator.device, all_may_leave=config.keeps_budget)
        shared = HostUnit("shared between components", plan.shared).nbytes
        return cls(accelerator, config, plan, parts, shared, held, ranks_share)

    def device_bytes(self) -> int:
        """Bytes on the device now that are nobody else's."""
        return self.held

    def discard(self) -> None:
        """Takes the parts apart: blocks and tracks know each other, and weights should not wait for the collector."""
        for part in self.parts:
            if part.track is not None:
                part.track.clear()
