"""The emulator's own controls, reached as ``torch.emu.<name>``.

All of them act on the whole process. Sizes are bytes, times seconds, rates per second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from greenroom.emulator.build import load_extension
from greenroom.emulator.index import DeviceLike, device_index

_C = load_extension()

DEFAULT_CAPACITY = 16 << 30
_PRIVATE_USE_1 = 20  # c10::DeviceType of the out-of-tree device, as torch.Stream wants it
_RACE_MODES = {"off": 0, "collect": 1, "raise": 2}


def _not_negative(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{name}={value!r}: must not be negative")


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name}={value!r}: must be positive")


def _each(device: DeviceLike) -> list[int]:
    return list(range(_C.device_count())) if device is None else [device_index(device)]


# ------------------------------------------------------------- the hardware
def set_capacity(nbytes: int, device: DeviceLike = None) -> None:
    """Memory of the device (``None``: of every device). May be less than is in use: then nothing more fits."""
    _not_negative(nbytes=nbytes)
    for index in _each(device):
        _C.set_capacity(index, int(nbytes))


def set_bandwidth(h2d: float, d2h: float | None = None, p2p: float | None = None) -> None:
    """Bytes per second of the link, 0 for unlimited; ``d2h`` and ``p2p`` default to ``h2d``.

    One copy engine per device and direction: copies of one direction queue, opposite ones do not disturb each
    other. Collectives use ``p2p``.
    """
    d2h = h2d if d2h is None else d2h
    p2p = h2d if p2p is None else p2p
    _not_negative(h2d=h2d, d2h=d2h, p2p=p2p)
    _C.set_bandwidth(float(h2d), float(d2h), float(p2p))


def set_pageable_factor(factor: float) -> None:
    """Share of the bandwidth that copies from or to memory that is not pinned reach (default 1)."""
    _positive(factor=factor)
    _C.set_pageable_factor(float(factor))


def set_latency(seconds: float) -> None:
    """Seconds that each copy takes on top of its bytes (default 0)."""
    _not_negative(seconds=seconds)
    _C.set_latency(float(seconds))


# --------------------------------------------------------------------- time
def set_virtual_time(
    on: bool = True,
    flops: float = 1e12,
    membw: float = 100e9,
    launch: float = 5e-6,
    kernel_latency: float = 2e-6,
) -> None:
    """Switches between the real and the virtual clock; waits for all devices, then puts all clocks at zero.

    On the virtual clock nothing sleeps. An operation takes ``max(flops / flops, bytes / membw) +
    kernel_latency`` seconds of its stream and ``launch`` seconds of the host (the roofline model of Williams,
    Waterman and Patterson, 2009); a copy takes latency + bytes / bandwidth. Modelled, not measured: exact and
    repeatable.
    """
    _positive(flops=flops, membw=membw)
    _not_negative(launch=launch, kernel_latency=kernel_latency)
    _C.set_virtual_time(bool(on), float(flops), float(membw), float(launch), float(kernel_latency))


def virtual_time() -> float:
    """The host's virtual clock, in seconds. Call ``synchronize()`` first to include the devices' work."""
    return _C.virtual_time()


# --------------------------------------------------------------- bug finders
def set_poison(on: bool) -> None:
    """Fills device and pinned memory with 0xFF (NaN in every float type) when it is handed out and given back."""
    _C.set_poison(bool(on))


def set_race_check(mode: str) -> None:
    """``"off"``, ``"collect"`` (see :func:`race_reports`) or ``"raise"`` (RuntimeError where the race is).

    A block freed too early is only ever reported, since it is seen in a destructor.
    """
    if mode not in _RACE_MODES:
        raise ValueError(f"mode={mode!r}: accepted are {', '.join(map(repr, _RACE_MODES))}")
    _C.set_race_mode(_RACE_MODES[mode])


def race_reports() -> list[str]:
    """The races found since the last call, oldest first."""
    return _C.race_reports()


class _HostAccesses(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        is_view = not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        # Operations with a device tensor are copies: launched on a stream, and checked there.
        if not is_view and all(t.device.type == "cpu" for t in tensors):
            written: set[int] = set()
            for argument, value in [*zip(schema.arguments, args, strict=False)] + [
                (a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs
            ]:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    written.update(id(t) for t in tree_leaves(value) if isinstance(t, torch.Tensor))
            for tensor in tensors:
                _C.host_touches(tensor, id(tensor) in written, str(func))
        return func(*args, **kwargs)


@contextlib.contextmanager
def check_host_accesses() -> Iterator[None]:
    """Lets the race checker see the host's own reads and writes of pinned memory while the context is open.

    Finds a pinned source overwritten, or a pinned destination read, before its copy has ended, on either clock.
    Slow (every operation passes through Python); needs ``set_race_check("collect")`` or ``"raise"``.
    """
    with _HostAccesses():
        yield


# ----------------------------------------------------------- fault injection
def fail_allocation(k: int | None, device: DeviceLike = None) -> None:
    """The ``k``-th device allocation from now (1 is the next; ``device=None``: on any device) raises
    torch.OutOfMemoryError, once. ``None`` cancels. Outputs and workspaces of operations are allocations too.
    """
    _C.fail_allocation(_countdown(k), -1 if device is None else device_index(device))


def fail_pin(k: int | None) -> None:
    """The ``k``-th pinned allocation from now raises RuntimeError, once. ``None`` cancels."""
    _C.fail_pin(_countdown(k))


def fail_copy(k: int | None) -> None:
    """The ``k``-th copy over the link from now (host to device, back, or peer to peer) raises RuntimeError when
    it is issued, once. ``None`` cancels.
    """
    _C.fail_copy(_countdown(k))


def _countdown(k: int | None) -> int:
    if k is None:
        return 0
    if not isinstance(k, int) or k < 1:
        raise ValueError(f"k={k!r}: must be None or an integer from 1")
    return k


# -------------------------------------------------------------- what happened
def counters() -> dict[str, Any]:
    """Counts since the last reset.

    - ``{h2d,d2h,p2p}_{bytes,count,async,sync}``: copies by direction; async ones did not make the host wait
    - ``pins``, ``pinned_bytes``, ``unpins``: pinned allocations made, their bytes, releases
    - ``allocations``: device allocations
    - ``stall_s``: {"host" or stream: seconds it waited for another stream with nothing else to do};
      ``wait_s`` is the host's
    - ``fallback_calls``, ``copied_outputs``: operations, and outputs that could not be had without a copy
    """
    return _C.counters()


def reset_counters() -> None:
    _C.reset_counters()


def pinned_stats() -> dict[str, int]:
    """``current`` and ``peak`` bytes of pinned memory, to the byte, and the ``count`` of allocations alive."""
    return _C.pinned_stats()


def register_host(address: int, nbytes: int) -> None:
    """Pins memory that somebody else allocated, shared memory for one, as cudaHostRegister does.

    Raises:
        RuntimeError: part of it is pinned already, or `fail_pin` says so.
    """
    _C.register_host(address, nbytes)


def unregister_host(address: int) -> None:
    """Unpins what `register_host` pinned, after the copies that use it.

    Raises:
        RuntimeError: nothing was registered at this address.
    """
    _C.unregister_host(address)


def reset_peak_pinned() -> None:
    _C.reset_peak_pinned()


def set_timeline(on: bool) -> None:
    """Records what each stream does, for :func:`take_timeline`."""
    _C.set_timeline(bool(on))


def take_timeline() -> list[tuple[str, str, float, float, int]]:
    """``(name, stream, t0, t1, bytes)`` of every operation, copy and wait since the last call, in the order of
    issue (virtual clock) or of completion (real clock). Names: an operator, ``h2d``, ``d2h``, ``p2p``,
    ``collective`` or ``wait``. Seconds on the clock in use, the real one being monotonic time.
    """
    return _C.take_timeline()


def set_memory_timeline(on: bool, device: DeviceLike = None) -> None:
    """Records allocations and releases of the device (``None``: of every device). Starts empty."""
    for index in _each(device):
        _C.set_memory_timeline(index, bool(on))


def take_memory_timeline(device: DeviceLike = None) -> list[tuple[float, int]]:
    """``(seconds, bytes allocated after)`` of each allocation and release since the last call, in order.

    On the virtual clock the host issues work ahead of the device, so an event is stamped not with the host's
    time but with the time at which the stream that the memory was allocated on gets to that point, and never
    earlier than the event before it. The highest figure is what max_memory_allocated() says.
    """
    return _C.take_memory_timeline(device_index(device))


def cpu_view(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the same bytes, without waiting, copying or being seen by the race checker."""
    return _C.cpu_view(tensor)


def reset() -> None:
    """Everything as after import: defaults, real clock, checks off, nothing recorded. Waits for all devices."""
    set_virtual_time(False)
    set_capacity(DEFAULT_CAPACITY)
    set_bandwidth(0)
    set_pageable_factor(1.0)
    set_latency(0.0)
    set_poison(False)
    set_race_check("off")
    race_reports()
    fail_allocation(None)
    fail_pin(None)
    fail_copy(None)
    set_timeline(False)
    take_timeline()
    set_memory_timeline(False)
    reset_counters()
    reset_peak_pinned()
    for index in reversed(range(_C.device_count())):
        _C.reset_peak(index)
        default = torch.Stream(stream_id=0, device_index=index, device_type=_PRIVATE_USE_1)
        torch.accelerator.set_stream(default)
    _C.set_device(0)
