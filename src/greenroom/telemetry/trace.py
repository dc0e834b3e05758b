"""Timed forwards as a Chrome trace, which Perfetto reads as well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from greenroom.strategies.probe import Timing

_LANES = {"compute": 1, "copy": 2}


def chrome_trace(timings: Mapping[str, Timing]) -> dict[str, Any]:
    """One process for each component with a lane for computation, one for copies, and a counter of device bytes.

    Args:
        timings: component name -> its timed forward.

    Returns:
        A trace in the Trace Event Format (JSON object form); times in microseconds.
    """
    events: list[dict[str, Any]] = []
    for process, (name, timing) in enumerate(timings.items(), start=1):
        events.append(_named("process_name", process, 0, name))
        for lane, thread in _LANES.items():
            events.append(_named("thread_name", process, thread, lane))
        for lane, what, start, end, nbytes in timing.lanes:
            event = {
                "name": what,
                "cat": lane,
                "ph": "X",
                "pid": process,
                "tid": _LANES[lane],
                "ts": start * 1e6,
                "dur": (end - start) * 1e6,
            }
            if nbytes:
                event["args"] = {"bytes": nbytes}
            events.append(event)
        for seconds, nbytes in timing.memory:
            event = {"name": "device bytes", "ph": "C", "pid": process, "ts": seconds * 1e6}
            events.append({**event, "args": {"allocated": nbytes}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
