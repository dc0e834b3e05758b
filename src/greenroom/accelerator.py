"""The one room that speaks to a device.

Everything goes through `torch.accelerator` and the generic `torch.Stream` and `torch.Event`, so that CUDA, XPU, NPU
and the emulated accelerator take the same path. The CPU is accepted as a device as well: streams and events become
no-ops and every copy is finished when the call returns, which lets the rest of Greenroom run where there is no
accelerator at all.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from greenroom.errors import OffloadError

_PAGE = mmap.PAGESIZE


class _NoEvent:
    """An event on a device that has no streams: always reached."""

    def __init__(self) -> None:
        self.recorded = 0.0

    def record(self, stream: Any = None) -> None:
        self.recorded = time.perf_counter()

    def elapsed_time(self, end: _NoEvent) -> float:
        """Milliseconds, as other events give them."""
        return (end.recorded - self.recorded) * 1e3

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class _NoStream:
    """The only stream of a device that has none."""

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...


class Accelerator:
    """Streams, events, memory and copies of one device.

    Args:
        device: a device with an index, or the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cpu = device.type == "cpu"
        self._no_stream = _NoStream()

    @classmethod
    def of(cls, device: str | torch.device | int | None = None) -> Accelerator:
        """The accelerator for `device`; None means the current device of the accelerator that is present.

        Raises:
            OffloadError: there is no accelerator and none was named, or the named one is not usable here.
        """
        if device is None:
            # Asked through the runtime, which answers on a machine without the driver too.
            if not torch.accelerator.is_available():
                raise OffloadError(
                    "device: None was given and no accelerator is present; accepted: a device such as 'cuda', "
                    "'xpu', 'npu', or 'emu' after `import greenroom.emulator`"
                )
            device = torch.accelerator.current_accelerator()
        resolved = _known(device)
        if resolved.type == "cpu":
            return cls(torch.device("cpu"))
        present = torch.accelerator.current_accelerator(check_available=True)
        if present is None or present.type != resolved.type:
            raise OffloadError(
                f"device: {str(device)!r} is not available here; accepted: "
                + ("'cpu'" if present is None else f"{present.type!r} or 'cpu'")
            )
        count = torch.accelerator.device_count()
        index = torch.accelerator.current_device_index() if resolved.index is None else resolved.index
        if index >= count:
            raise OffloadError(f"device: {str(device)!r} does not exist; accepted: indices 0 to {count - 1}")
        return cls(torch.device(resolved.type, index))

    # ------------------------------------------------------------------ streams and events

    def current_stream(self) -> Any:
        return self._no_stream if self.is_cpu else torch.accelerator.current_stream(self.device)

    def new_stream(self) -> Any:
        return self._no_stream if self.is_cpu else torch.Stream(device=self.device)

    def new_event(self, *, timing: bool = False) -> Any:
        return _NoEvent() if self.is_cpu else torch.Event(device=self.device, enable_timing=timing)

    def make_current(self) -> None:
        """Makes this the device that is meant where none is named, for the calling thread."""
        if not self.is_cpu:
            torch.accelerator.set_device_index(self.device.index)

    def synchronize(self) -> None:
        if not self.is_cpu:
            torch.accelerator.synchronize(self.device)

    # ------------------------------------------------------------------ memory

    def empty(self, nbytes: int) -> torch.Tensor:
        """`nbytes` uninitialised bytes on the device, as uint8, owned by the current stream."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def allocated(self) -> int:
        """Bytes that live tensors hold on the device; 0 on the CPU."""
        return 0 if self.is_cpu else int(torch.accelerator.memory_allocated(self.device))

    def peak(self) -> int:
        """The most bytes that live tensors held on the device since `reset_peak`; 0 on the CPU."""
        return 0 if self.is_cpu else int(torch.accelerator.max_memory_allocated(self.device))

    def reset_peak(self) -> None:
        if not self.is_cpu:
            torch.accelerator.reset_peak_memory_stats(self.device)

    def free_and_total(self) -> tuple[int, int]:
        """Free and total bytes of the device, what torch's allocator holds unused counted as free."""
        if self.is_cpu:
            return sys.maxsize, sys.maxsize
        module = torch.get_device_module(self.device)
        free, total = module.mem_get_info(self.device)
        unused = torch.accelerator.memory_reserved(self.device) - torch.accelerator.memory_allocated(self.device)
        return int(free) + max(0, int(unused)), int(total)

    def empty_cache(self) -> None:
        if not self.is_cpu:
            torch.accelerator.empty_cache()

    # ------------------------------------------------------------------ host memory and copies

    def host_buffer(self, nbytes: int, *, pin: bool) -> torch.Tensor:
        """`nbytes` of host memory as uint8, page-locked for this device where asked.

        Exactly `nbytes` are locked. torch's own pinned allocator rounds each request up to a power of two on CUDA,
        which would cost up to twice the weights; there, ordinary memory is registered instead.

        Raises:
            RuntimeError: the system refused to lock so much memory.
        """
        if not pin or self.is_cpu:
            return torch.empty(nbytes, dtype=torch.uint8)
        if self._registers_with_cuda:
            raw = torch.empty(nbytes + _PAGE, dtype=torch.uint8)
            start = -raw.data_ptr() % _PAGE
            buffer = raw[start : start + nbytes]
            self._register_with_cuda(buffer)
            return buffer
        with self.guard():
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def register(self, memory: torch.Tensor) -> Callable[[], object]:
        """Page-locks host memory that was allocated elsewhere, such as memory that processes share.

        Args:
            memory: uint8, starting and ending at a page.

        Returns:
            What unlocks it; that happens anyway when its storage goes.

        Raises:
            RuntimeError: the system refused.
            NotImplementedError: this device has no way to lock foreign memory.
        """
        if self._registers_with_cuda:
            return self._register_with_cuda(memory)
        module: Any = None if self.is_cpu else torch.get_device_module(self.device)
        if not hasattr(module, "register_host"):
            raise NotImplementedError(f"memory that others allocated cannot be pinned for {self.device}")
        address = memory.data_ptr()
        with self.guard():
            module.register_host(address, memory.nbytes)
        return self._when_storage_goes(memory, module.unregister_host)

    @property
    def _registers_with_cuda(self) -> bool:
        return self.device.type == "cuda" and torch.version.hip is None

    def _register_with_cuda(self, memory: torch.Tensor) -> Callable[[], object]:
        cudart = torch.cuda.cudart()
        with self.guard():
            code = int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
            if code != 0:
                self._forget_last_error(cudart)
                raise RuntimeError(f"cudaHostRegister refused {memory.nbytes} bytes (error {code})")
        return self._when_storage_goes(memory, cudart.cudaHostUnregister)

    def _forget_last_error(self, cudart: Any) -> None:
        """Takes back an error that was told by its return code.

        CUDA keeps it for the thread until somebody asks, and torch asks after the next kernel that it launches: a
        computation that has nothing to do with it would raise.
        """
        if hasattr(cudart, "cudaGetLastError"):
            cudart.cudaGetLastError()
            return
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self.device)  # a kernel of ours, whose check takes the error

    def _when_storage_goes(self, memory: torch.Tensor, unlock: Callable[[int], object]) -> Callable[[], object]:
        """Unlocks memory with its storage, which views keep alive, and not with the tensor object, which they do not.

        Nothing may be copied from it any more by then.
        """
        unlock = functools.partial(self._guarded, unlock)
        finalizer = weakref.finalize(memory.untyped_storage(), unlock, memory.data_ptr())
        finalizer.atexit = False  # the driver may be gone by then, and the process's memory goes anyway
        return finalizer

    def _guarded(self, function: Callable[[int], object], address: int) -> None:
        with self.guard():
            function(address)

    def guard(self) -> contextlib.AbstractContextManager[None]:
        """Makes this the current device inside the block, for the calling thread.

        What names no device would take place on another one otherwise, and open a context there that costs hundreds
        of MiB.
        """
        return contextlib.nullcontext() if self.is_cpu else torch.accelerator.device_index(self.device.index)

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Makes `stream` and its device the current ones inside the block, for the calling thread.

        A `torch.Stream` used as a context manager keeps in itself what was current before: two threads that enter one
        at the same time leave with each other's.
        """
        if self.is_cpu:
            yield
            return
        with self.guard():
            before = torch.accelerator.current_stream(self.device)
            torch.accelerator.set_stream(stream)
            try:
                yield
            finally:
                torch.accelerator.set_stream(before)


def find_device(device: str | torch.device | None) -> str | torch.device:
    """The device to compute on: the one given, else the accelerator that is present, else the CPU.

    Raises:
        OffloadError: not the name of a device.
    """
    if device is None:
        present = torch.accelerator.current_accelerator(check_available=True)
        return "cpu" if present is None else present.type
    if str(device).split(":")[0] == "emu":
        import greenroom.emulator  # noqa: F401 - registers the device
    _known(device, numbers=False)
    return device


def _known(device: object, *, numbers: bool = True) -> torch.device:
    """The device that a word stands for, whether it is there or not.

    Args:
        device: the word.
        numbers: whether a number may stand for a device of the accelerator that is present.
    """
    named = isinstance(device, str | torch.device) or (numbers and type(device) is int)
    try:
        if named:
            return torch.device(device)  # type: ignore[call-overload]
    except RuntimeError:
        pass
    raise OffloadError(
        f"device: {device!r} is not a device that this torch knows; accepted: a torch.device or a string such as "
        "'cuda:0' ('emu' needs `import greenroom.emulator` first)"
    )


def rank_devices(device: str | torch.device, ranks: int) -> list[str]:
    """The device of each rank on this host: the one with its index; the CPU for all.

    No device is touched: a context would take memory on one that belongs to a rank.

    Raises:
        OffloadError: there are fewer devices than ranks, or the device has an index already.
    """
    wanted = torch.device(device)
    if wanted.index is not None and ranks > 1:
        raise OffloadError(f"device: {str(device)!r} names one device for {ranks} ranks; accepted: {wanted.type!r}")
    if wanted.type == "cpu" or ranks == 1:
        return [str(wanted)] * ranks
    present = torch.accelerator.current_accelerator(check_available=True)
    if present is None or present.type != wanted.type:
        there = "'cpu'" if present is None else f"{present.type!r} or 'cpu'"
        raise OffloadError(f"device: {str(device)!r} is not available here; accepted: {there}")
    count = torch.accelerator.device_count()
    # Each process has an emulator of its own, with as many devices as it is told.
    if ranks > count and wanted.type != "emu":
        raise OffloadError(f"device: {ranks} ranks need {ranks} devices; accepted: at most {count} ranks here")
    return [f"{wanted.type}:{rank}" for rank in range(ranks)]


def default_generators(device: torch.device) -> list[torch.Generator]:
    """The generator that calls on `device` use when they are given none; nothing for a device without one."""
    if device.type == "cpu":
        return []
    try:
        module = torch.get_device_module(device)
        found = getattr(module, "default_generators", None)
        return [found[device.index] if found else module.default_generator(device)]
    except (AttributeError, IndexError, RuntimeError):
        return []
