"""Who the ranks are, and how they come to agree before anything collective happens.

Note [No collective before everybody is known to come]
    What one rank may not reach is never a collective, which would hang the others. The ranks meet at the store of
    their process group instead: each leaves its answer there, a failure included, and waits for those of the others
    for a set time. Only when all have answered the same are groups made and gathers begun.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import itertools
import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from greenroom.distributed.errors import RanksError
from greenroom.errors import ConfigError

HEARTBEAT = 0.1
"""Seconds between two signs of life of ranks that have nothing to do."""

_TIMEOUT = 300.0
_VARIABLE = "GREENROOM_RANKS_TIMEOUT"
_meetings = itertools.count()


def timeout() -> float:
    """Seconds that a rank waits for the others, from the environment variable GREENROOM_RANKS_TIMEOUT (default 300).

    It has to be longer than a forward of the slowest component on the slowest rank.

    Raises:
        ConfigError: the variable is not a positive number.
    """
    text = os.environ.get(_VARIABLE)
    if text is None:
        return _TIMEOUT
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(_VARIABLE, text, "a positive number of seconds")
    return seconds


class Meeting:
    """One attempt of the ranks to enable an offload: a row of questions that each of them answers in turn.

    Args:
        store: of the process group.
        rank, size: in it.
        seconds: how long to wait for the others.
    """

    def __init__(self, store: Any, rank: int, size: int, seconds: float) -> None:
        self._store = store
        self.rank = rank
        self.size = size
        self.seconds = seconds
        self._prefix = f"greenroom/{next(_meetings)}"
        self._asked = 0
        self._over = False

    def answer(self, topic: str, answer: Any) -> list[Any]:
        """Leaves `answer` for the others and returns those of all ranks, in order; plain JSON types only.

        Raises:
            RanksError: a rank failed (see `fail`), answers another question, or did not answer in time.
        """
        self._leave({"topic": topic, "answer": answer})
        answers = []
        for rank in range(self.size):
            found = self._take(rank, topic)
            if "failure" in found:
                self._over = True
                raise RanksError(f"rank {rank} failed: {found['failure']}")
            if found["topic"] != topic:
                self._over = True
                raise RanksError(
                    f"the ranks do different things: rank {self.rank} is at {topic!r}, rank {rank} at "
                    f"{found['topic']!r}; accepted: the same calls of greenroom.offload on every rank"
                )
            answers.append(found["answer"])
        self._asked += 1
        return answers

    def fail(self, error: BaseException) -> None:
        """Tells the ranks that wait for this one that it will not come, and why."""
        if not self._over:
            self._over = True
            with contextlib.suppress(RuntimeError):
                self._leave({"failure": f"{type(error).__name__}: {error}"})

    def _leave(self, word: dict[str, Any]) -> None:
        try:
            self._store.set(f"{self._prefix}/{self._asked}/{self.rank}", json.dumps(word))
        except RuntimeError as error:
            self._over = True
            raise RanksError(f"the store of the process group is gone: {error}") from error

    def _take(self, rank: int, topic: str) -> dict[str, Any]:
        key = f"{self._prefix}/{self._asked}/{rank}"
        try:
            self._store.wait([key], datetime.timedelta(seconds=self.seconds))
            found: dict[str, Any] = json.loads(self._store.get(key))
        except dist.DistNetworkError as error:
            self._over = True
            raise RanksError(f"the store of the process group is gone, and with it a rank: {error}") from error
        except RuntimeError as error:
            self._over = True
            raise RanksError(
                f"rank {rank} did not come to {topic!r} within {self.seconds:g} s ({_VARIABLE} sets how long to wait)"
            ) from error
        return found


@dataclass(frozen=True)
class Ranks:
    """The ranks that share weights, as one of them sees it.

    Attributes:
        group: their process group.
        rank: this one's place in it, 0 to size - 1.
        size: how many there are.
        device: where this one computes.
        timeout: seconds that it waits for the others before it gives up.
        local: the ranks that run on this host, this one included, in order.
        meeting: where they come to agree.
    """

    group: Any
    rank: int
    size: int
    device: torch.device
    timeout: float
    meeting: Meeting = field(repr=False, compare=False)
    local: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Standing:
    """How the ranks of an offload stand.

    Attributes:
        rank, size: as in `Ranks`.
        transfers: component -> "allgather" or "rank-local", for what is streamed.
        passes: gathering passes so far; the same on every rank at the end of a pass.
        joined: how many of them this rank took part in without computing.
        broken: why gathered components do not run any more, or None.
    """

    rank: int
    size: int
    transfers: dict[str, str]
    passes: int
    joined: int
    broken: str | None


def is_distributed() -> bool:
    """Whether this process is one of several in an initialised torch.distributed group."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def gather_ranks(device: torch.device, group: Any = None) -> Ranks | None:
    """The ranks of `group`, by default all that torch.distributed has; None for a process on its own.

    Every rank of the group has to call it: they find out who shares a host, and whether all of them are there.

    Raises:
        RanksError: a rank did not come in time, or failed on the way.
    """
    if not is_distributed():
        return None
    group = dist.group.WORLD if group is None else group
    size = dist.get_world_size(group)
    if size < 2:
        return None
    meeting = Meeting(_store_of(group), dist.get_rank(group), size, timeout())
    hosts = meeting.answer("greenroom.offload", _host())
    local = tuple(r for r in range(size) if hosts[r] == hosts[meeting.rank])
    return Ranks(group, meeting.rank, size, device, meeting.seconds, meeting, local)


def tell_failure(error: BaseException, group: Any = None) -> None:
    """For a rank that fails before it came to `gather_ranks`: lets the others fail there, with its words."""
    if is_distributed():
        group = dist.group.WORLD if group is None else group
        Meeting(_store_of(group), dist.get_rank(group), dist.get_world_size(group), timeout()).fail(error)


def agree(ranks: Ranks, plan: Any, decide: Callable[[list[Any]], Any] | None = None) -> Any:
    """One plan for all ranks.

    Args:
        ranks: who has to agree.
        plan: what this rank proposes, plain JSON types.
        decide: makes one plan of all proposals; called on the first rank only, whose result is everybody's.
            Without it the proposals have to be equal.

    Returns:
        The plan, equal on every rank (its hash is compared).

    Raises:
        RanksError: proposals differ, and it names where; or a rank did not answer.
    """
    answers = ranks.meeting.answer
    proposals = answers("plan", plan)
    if decide is None:
        for rank, other in enumerate(proposals):
            found = _difference(proposals[0], other)
            if found is not None:
                where, first, second = found
                raise RanksError(
                    f"the ranks disagree about {where or 'the plan'}: rank 0 has {first!r}, rank {rank} has "
                    f"{second!r}; accepted: the same pipeline and the same words on every rank"
                )
        return proposals[0]
    decided = answers("decision", decide(proposals) if ranks.rank == 0 else None)[0]
    hashes = answers("hash", hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest())
    if len(set(hashes)) > 1:
        raise RanksError(f"the ranks received different plans: {hashes}")
    return decided


def _difference(a: Any, b: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """Where two values of JSON types differ first, and the two values there."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys([*a, *b]):
            found = _difference(a.get(key), b.get(key), f"{path}.{key}" if path else str(key))
            if found is not None:
                return found
        return None
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            found = _difference(x, y, f"{path}[{i}]")
            if found is not None:
                return found
        return None
    return None if a == b else (path, a, b)


def _store_of(group: Any) -> Any:
    return dist.PrefixStore("greenroom", distributed_c10d._get_process_group_store(group))


def _host() -> str:
    """What tells hosts apart: memory can be shared where this is equal."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
    return socket.gethostname()
