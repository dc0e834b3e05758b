"""What is kept of an offload that is undone for another, so that it can be enabled again."""

from __future__ import annotations

from typing import Any

from greenroom.errors import OffloadError
from greenroom.memory import Memory
from greenroom.strategies.budget import MemoryKeeper
from greenroom.strategies.runtime import Runtime
from greenroom.strategies.sleep import fall_asleep


class Earlier:
    """The words of an offload that is enabled, and what was said to it since. Holds its pipelines.

    Args:
        runtime: the offload.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.config = runtime.config
        self.accelerator = runtime.accelerator
        self.pipelines: list[Any] = [p for reference in runtime.pipelines if (p := reference()) is not None]
        self._asleep = runtime.asleep
        self._memory_since = runtime.memory_since
        keeper = runtime.keeper
        self._budget = keeper.budget if isinstance(keeper, MemoryKeeper) else 0
        self._refuses = isinstance(keeper, MemoryKeeper) and keeper.refuses

    @property
    def undone(self) -> bool:
        """Whether it is, or has begun to be."""
        return self._runtime.leaving or not self._runtime.enabled

    def finish(self) -> None:
        """Undoes what was left where undoing it has failed."""
        if self._runtime.leaving:
            self._runtime.disable()

    def require_own(self) -> None:
        """Raises OffloadError for an offload that one process cannot enable again on its own."""
        if self._runtime.sharing is not None:
            raise OffloadError("ranks share its weights, and all of them have to enable it")
        if not self.pipelines:
            raise OffloadError("its pipeline is gone")

    def take_up(self, runtime: Runtime) -> None:
        """Says to `runtime`, enabled with the same words, what was said to the earlier one since."""
        keeper = runtime.keeper
        runtime.memory_since = self._memory_since
        if isinstance(keeper, MemoryKeeper):
            if keeper.budget != self._budget:
                keeper.set_budget(runtime, Memory(bytes=self._budget))
            keeper.refuses = self._refuses
        if self._asleep:
            fall_asleep(runtime)
