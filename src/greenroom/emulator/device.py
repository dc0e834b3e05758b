"""The module ``torch.emu``: what every accelerator's device module has, then the emulator's own controls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from greenroom.emulator.build import load_extension
from greenroom.emulator.controls import (
    check_host_accesses,
    counters,
    cpu_view,
    fail_allocation,
    fail_copy,
    fail_pin,
    pinned_stats,
    race_reports,
    register_host,
    reset,
    reset_counters,
    reset_peak_pinned,
    set_bandwidth,
    set_capacity,
    set_latency,
    set_memory_timeline,
    set_pageable_factor,
    set_poison,
    set_race_check,
    set_timeline,
    set_virtual_time,
    take_memory_timeline,
    take_timeline,
    unregister_host,
    virtual_time,
)
from greenroom.emulator.index import DeviceLike, device_index

__all__ = [
    "Event",
    "Stream",
    "check_host_accesses",
    "counters",
    "cpu_view",
    "current_device",
    "current_stream",
    "default_generator",
    "default_stream",
    "device",
    "device_count",
    "empty_cache",
    "fail_allocation",
    "fail_copy",
    "fail_pin",
    "get_amp_supported_dtype",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "get_rng_state_all",
    "init",
    "initial_seed",
    "ipc_collect",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "pinned_stats",
    "race_reports",
    "register_host",
    "reset",
    "reset_counters",
    "reset_peak_memory_stats",
    "reset_peak_pinned",
    "set_bandwidth",
    "set_capacity",
    "set_device",
    "set_latency",
    "set_memory_timeline",
    "set_pageable_factor",
    "set_poison",
    "set_race_check",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "set_timeline",
    "set_virtual_time",
    "stream",
    "synchronize",
    "take_memory_timeline",
    "take_timeline",
    "unregister_host",
    "virtual_time",
]

_C = load_extension()


# ------------------------------------------------------------------ devices
def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    """Nothing to do: importing greenroom.emulator did it."""


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    """Two, or the environment variable ``EMU_DEVICE_COUNT``."""
    return _C.device_count()


def current_device() -> int:
    return _C.current_device()


def set_device(device: DeviceLike) -> None:
    _C.set_device(device_index(device))


class device:
    """Context manager that selects a device; ``None`` or a negative index selects nothing."""

    def __init__(self, device: DeviceLike) -> None:
        self.idx = None if device is None else device_index(device)

    def __enter__(self) -> None:
        self.prev = _C.current_device()
        if self.idx is not None:
            _C.set_device(self.idx)

    def __exit__(self, *exc: Any) -> None:
        _C.set_device(self.prev)


def get_device_name(device: DeviceLike = None) -> str:
    return "Emulated accelerator"


def get_device_capability(device: DeviceLike = None) -> tuple[int, int]:
    return (1, 0)


def get_device_properties(device: DeviceLike = None) -> SimpleNamespace:
    """``name``, ``total_memory`` (bytes: the set capacity), ``major`` and ``minor``."""
    major, minor = get_device_capability(device)
    total = mem_get_info(device)[1]
    return SimpleNamespace(name=get_device_name(device), total_memory=total, major=major, minor=minor)


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def synchronize(device: DeviceLike = None) -> None:
    """Waits until every stream of the device has finished."""
    _C.synchronize(device_index(device))


# ----------------------------------------------------------- streams, events
# These make plain torch.Stream and torch.Event objects: Event.elapsed_time() refuses subclasses.
class _StreamType(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Stream) and instance.device.type == "emu"


class Stream(metaclass=_StreamType):
    def __new__(cls, device: DeviceLike = None, priority: int = 0, **kwargs: Any) -> Any:
        if kwargs:  # stream_id=, device_index=, device_type=: an existing stream
            return torch.Stream(**kwargs)
        return torch.Stream(device=torch.device("emu", device_index(device)), priority=priority)


class _EventType(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Event)


class Event(metaclass=_EventType):
    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
        where = torch.device("emu", _C.current_device())
        return torch.Event(where, enable_timing=enable_timing, blocking=blocking)


def current_stream(device: DeviceLike = None) -> torch.Stream:
    return torch.accelerator.current_stream(device_index(device))


def default_stream(device: DeviceLike = None) -> torch.Stream:
    current = current_stream(device)
    return torch.Stream(stream_id=0, device_index=current.device_index, device_type=current.device_type)


def set_stream(stream: torch.Stream | None) -> None:
    if stream is not None:
        torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[torch.Stream | None]:
    """Makes a stream the current one of its device; ``None`` changes nothing."""
    if stream is None:
        yield None
        return
    outer_device = _C.current_device()
    outer = torch.accelerator.current_stream(stream.device.index)
    torch.accelerator.set_stream(stream)
    try:
        yield stream
    finally:
        torch.accelerator.set_stream(outer)
        _C.set_device(outer_device)


# ------------------------------------------------------------------- memory
def memory_allocated(device: DeviceLike = None) -> int:
    """Bytes of live tensors (each rounded up to 512)."""
    return _C.memory_figures(device_index(device))["allocated"]


def max_memory_allocated(device: DeviceLike = None) -> int:
    return _C.memory_figures(device_index(device))["allocated_peak"]


def memory_reserved(device: DeviceLike = None) -> int:
    """Bytes that count against the capacity: live tensors, and freed ones that record_stream still holds."""
    return _C.memory_figures(device_index(device))["reserved"]


def max_memory_reserved(device: DeviceLike = None) -> int:
    return _C.memory_figures(device_index(device))["reserved_peak"]


def memory_stats(device: DeviceLike = None) -> dict[str, Any]:
    return torch.accelerator.memory_stats(device_index(device))


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    _C.reset_peak(device_index(device))


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """(free, total) bytes."""
    return _C.mem_get_info(device_index(device))


def empty_cache() -> None:
    """Gives the host memory behind freed device memory back to the system; no figure changes."""
    _C.empty_cache()


def ipc_collect() -> None:
    """Nothing to do: device memory is not shared between processes."""


# ------------------------------------------------------------------- random
def default_generator(device: DeviceLike = None) -> torch.Generator:
    return _C.default_generator(device_index(device))


def manual_seed(seed: int) -> None:
    default_generator().manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for index in range(_C.device_count()):
        default_generator(index).manual_seed(int(seed))


def initial_seed() -> int:
    return default_generator().initial_seed()


def get_rng_state(device: DeviceLike = "emu") -> torch.Tensor:
    return default_generator(device).get_state()


def set_rng_state(state: torch.Tensor, device: DeviceLike = "emu") -> None:
    default_generator(device).set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(_C.device_count())]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    for index, state in enumerate(states):
        set_rng_state(state, index)
