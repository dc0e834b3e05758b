"""What a runtime asks of whoever keeps a memory budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from greenroom.distributed.step import Budget
from greenroom.strategies.layout import Layout
from greenroom.strategies.parts import Part

if TYPE_CHECKING:
    from greenroom.strategies.runtime import Runtime


class Keeper(Protocol):
    """Who keeps a memory budget: chooses the layout, and watches what the calls need."""

    def first_layout(self, runtime: Runtime) -> Layout: ...

    def least_layout(self, runtime: Runtime) -> Layout: ...

    def room(self, runtime: Runtime, part: Part) -> int:
        """Bytes that are left beside what is on the device and what `part` needs to compute."""

    def entering(self, runtime: Runtime, part: Part, door: str, inputs: Any) -> None:
        """Before a part is brought in."""

    def entered(self, runtime: Runtime, part: Part, door: str) -> None:
        """After it was, before it computes."""

    def left(self, runtime: Runtime, part: Part, door: str, failed: bool) -> None:
        """After it has computed."""

    def shrink(self, runtime: Runtime, part: Part, error: torch.OutOfMemoryError) -> None:
        """After it ran out of memory: frees some, or raises when nothing is left to give."""

    def call_ended(self, runtime: Runtime) -> None: ...

    def changed(self, runtime: Runtime) -> None:
        """After parts were cut again or added to."""


@runtime_checkable
class SharedKeeper(Keeper, Protocol):
    """A keeper whose choice of what stays is that of all ranks."""

    def in_common(self, runtime: Runtime) -> Budget: ...

    def stays(self, part: Part) -> frozenset[int]:
        """The blocks of `part` that are to stay from now on."""
