"""How an engine does, at a glance."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankStatus:
    """How one rank does: `running` is the request it serves, `cause` what ended it."""

    rank: int
    alive: bool
    running: str | None
    cause: str | None


@dataclass(frozen=True)
class EngineStatus:
    """How the engine does. `cause` says what ended the worker; `ranks` is empty for an engine of one process."""

    alive: bool
    asleep: bool
    waiting: int
    running: str | None
    cause: str | None
    ranks: tuple[RankStatus, ...] = ()
