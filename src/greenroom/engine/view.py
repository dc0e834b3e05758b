"""What lies on the device right now, for people who watch: blocks, components, and the order of the work.

Note [Looking without touching]
    A snapshot is taken from another thread while the worker runs. It only reads attributes, takes no lock of the
    offload and keeps no tensor, so a watcher can neither delay a request nor hold memory. It may catch a block in
    the middle of its move; that is what live means.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from greenroom.accelerator import Accelerator
from greenroom.handle import Handle
from greenroom.host import HostUnit
from greenroom.strategies.parts import Part
from greenroom.streaming import StreamedBlock

# Events kept for a watcher, and seconds after the last look until recording stops.
_KEPT = 4096
_ATTENTION_S = 15.0


class LiveView:
    """Snapshots of residency, and the lanes of work while somebody watches.

    Lane times are those at which the host issues the work, in seconds of a monotonic clock: on a device with streams
    the work itself happens a little later.
    """

    def __init__(self, pipeline: Any, handle: Handle | None, accelerator: Accelerator) -> None:
        self._pipeline = pipeline
        self._handle = handle
        self._accelerator = accelerator
        self._events: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        self._numbers = itertools.count(1)
        self._seen_at = 0.0
        self._there: set[str] = set()
        self._lock = threading.Lock()
        self._hooks = contextlib.ExitStack()

    @property
    def watched(self) -> bool:
        return time.monotonic() - self._seen_at < _ATTENTION_S

    def install(self) -> None:
        """Puts listeners on the blocks; they do nothing while nobody watches."""
        for name, module, path in _block_modules(self._pipeline, self._parts()):
            block = f"{name}.{path}"
            for handle in self._listen(module, block):
                self._hooks.callback(handle.remove)

    def remove(self) -> None:
        self._hooks.close()

    def _listen(self, module: nn.Module, block: str) -> Iterator[Any]:
        begun: list[float] = []

        def before(module: nn.Module, args: Any) -> None:
            if self.watched:
                begun.append(time.monotonic())
                self._note_copies()

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if begun:
                self._add("compute", block, begun.pop(), time.monotonic())
                self._note_copies()
                begun.clear()

        yield module.register_forward_pre_hook(before)
        yield module.register_forward_hook(after, always_call=True)

    def _note_copies(self) -> None:
        now = time.monotonic()
        there = {b.unit.name for p in self._parts() for b in p.blocks if b.stay is not None}
        for block in there - self._there:
            self._add("copy", block, now, now)
        self._there = there

    def _add(self, lane: str, block: str, begin: float, end: float) -> None:
        event = {"n": next(self._numbers), "lane": lane, "block": block, "begin": begin, "end": end}
        with self._lock:
            self._events.append(event)

    def _parts(self) -> tuple[Part, ...]:
        return self._handle.parts if self._handle is not None else ()

    def snapshot(self, since: int = 0) -> dict[str, Any]:
        """What is where, as plain JSON types; sizes in bytes, times in seconds.

        Args:
            since: the number of the last event that the caller has seen.
        """
        self._seen_at = time.monotonic()
        with self._lock:
            events = [e for e in self._events if e["n"] > since]
        free, total = self._accelerator.free_and_total()
        known = total < 2**62
        return {
            "now": time.monotonic(),
            "device": str(self._accelerator.device),
            "allocated": self._accelerator.allocated(),
            "free": free if known else None,
            "total": total if known else None,
            "budget": self._handle.budget if self._handle is not None else None,
            "components": [_part_snapshot(p) for p in self._parts()],
            "events": events,
            "last_event": events[-1]["n"] if events else since,
        }


def _part_snapshot(part: Part) -> dict[str, Any]:
    """One component: its placement, and for each block "device", "fixed" (it stays) or "host"."""
    blocks = [_block(b.unit, _where(b, part)) for b in list(part.blocks) if b.unit.nbytes]
    outside = "host" if not (part.copies or part.kept) else "fixed" if part.placement != "swap" else "device"
    others = [_block(u, outside) for u in (part.rest,) if u.nbytes]
    return {
        "name": part.name,
        "role": part.role,
        "placement": part.placement,
        "bytes": part.nbytes,
        "blocks": blocks,
        "others": others,
    }


def _block(unit: HostUnit, at: str) -> dict[str, Any]:
    return {"name": unit.name, "bytes": unit.nbytes, "at": at}


def _where(block: StreamedBlock, part: Part) -> str:
    if block.fixed is not None:
        return "fixed" if part.placement != "swap" else "device"
    return "device" if block.stay is not None else "host"


def _block_modules(pipeline: Any, parts: Iterable[Part]) -> Iterator[tuple[str, nn.Module, str]]:
    for part in parts:
        component: Any = pipeline
        for step in part.name.split("."):
            component = getattr(component, step, None)
        if not isinstance(component, nn.Module):
            continue
        for block in part.blocks:
            path = block.unit.name.removeprefix(f"{part.name}.")
            with contextlib.suppress(AttributeError):
                yield part.name, component.get_submodule(path), path
