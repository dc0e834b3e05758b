"""Who keeps what on the device: the shape into which a runtime puts a pipeline, and can be put anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Hold = Literal["always", "phase"]


@dataclass(frozen=True)
class Share:
    """What one part keeps on the device.

    Attributes:
        hold: "always", or "phase": only from its first use until a part that excludes it is used.
        resident: indices of the blocks that are there for that time; the others pass through a ring.
        arena_bytes: size of a ring of its own, for a part that streams in its phase; 0 for the shared ring.
    """

    hold: Hold
    resident: frozenset[int]
    arena_bytes: int = 0


@dataclass(frozen=True)
class Layout:
    """The share of every part, and the bytes of the ring that parts with hold "always" stream through."""

    shares: Mapping[str, Share]
    arena_bytes: int = 0

    def with_share(self, name: str, share: Share) -> Layout:
        return Layout({**self.shares, name: share}, self.arena_bytes)
