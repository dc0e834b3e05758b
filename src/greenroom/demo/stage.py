"""The device the demo plays on, and how one drawing is measured there: peak, traffic, time, memory over time."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from greenroom.errors import ConfigError

# The emulated device is scaled down with the pipeline, and its parts against each other so that one denoising step
# takes about as long to compute as its weights take to cross the bus, as with a large model on a large card.
FLOPS = 100e9  # FLOP/s
MEMORY_BANDWIDTH = 20e9  # bytes/s
BUS_BANDWIDTH = 2.5e9  # bytes/s, each direction
LAUNCH = 2e-6  # seconds of host time per kernel
ROOMY = 1 << 34  # bytes: more than anything here needs


@dataclass(frozen=True)
class Measurement:
    """One drawing. ``samples`` are (seconds since placement began, bytes allocated on the device)."""

    pixels: np.ndarray
    peak: int  # bytes allocated on the device at once
    moved: int | None  # bytes host -> device, placement included; None where the device does not count them
    seconds: float  # of the drawing alone, placement excluded
    samples: list[tuple[float, int]] = field(repr=False)


class Stage:
    """An accelerator that is really there."""

    clock = "time"
    emulated = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def name(self) -> str:
        module: Any = torch.get_device_module(self.device)
        describe = getattr(module, "get_device_name", None)
        return str(describe(self.device)) if describe else str(self.device)

    def measure(self, place: Callable[[], None], draw: Callable[[], np.ndarray]) -> Measurement:
        """Runs ``place`` then ``draw`` and measures both. Raises what they raise, torch.OutOfMemoryError included."""
        gc.collect()
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(self.device)
        with self._recording() as record:
            place()
            torch.accelerator.synchronize(self.device)
            began = self._now()
            pixels = draw()
            torch.accelerator.synchronize(self.device)
            seconds = self._now() - began
        peak = int(torch.accelerator.max_memory_allocated(self.device))
        return Measurement(pixels, peak, record.get("moved"), seconds, record["samples"])

    def _now(self) -> float:
        return time.perf_counter()

    @contextmanager
    def _recording(self) -> Iterator[dict[str, Any]]:
        """Samples the allocated bytes every millisecond: a real device keeps no history of them that is cheap."""
        record: dict[str, Any] = {"samples": []}
        stop = threading.Event()
        began = time.perf_counter()

        def sample() -> None:
            while not stop.is_set():
                allocated = int(torch.accelerator.memory_allocated(self.device))
                record["samples"].append((time.perf_counter() - began, allocated))
                stop.wait(0.001)

        sampler = threading.Thread(target=sample, name="greenroom-demo-memory", daemon=True)
        sampler.start()
        try:
            yield record
        finally:
            stop.set()
            sampler.join()

    def close(self) -> None:
        """Gives up what was set on the device."""


class EmulatedStage(Stage):
    """The emulated accelerator on its virtual clock, with a memory as small as asked for."""

    clock = "virtual time"
    emulated = True

    def __init__(self) -> None:
        import greenroom.emulator  # noqa: F401 - registers the device

        super().__init__(torch.device("emu", 0))
        self._emu: Any = torch.get_device_module("emu")
        self._capacity_before = int(self._emu.mem_get_info(0)[1])
        self.limit(ROOMY)
        self._emu.set_bandwidth(BUS_BANDWIDTH, BUS_BANDWIDTH)
        self._emu.set_virtual_time(True, flops=FLOPS, membw=MEMORY_BANDWIDTH, launch=LAUNCH)

    @property
    def name(self) -> str:
        return "the emulated accelerator"

    def limit(self, capacity: int) -> None:
        """Gives the device ``capacity`` bytes of memory."""
        self._emu.set_capacity(capacity, 0)

    def _now(self) -> float:
        return float(self._emu.virtual_time())

    @contextmanager
    def _recording(self) -> Iterator[dict[str, Any]]:
        record: dict[str, Any] = {"samples": []}
        emu = self._emu
        moved, began, allocated = emu.counters()["h2d_bytes"], self._now(), int(emu.memory_allocated(0))
        emu.set_memory_timeline(True, 0)
        try:
            yield record
        finally:
            timeline = emu.take_memory_timeline(0)
            emu.set_memory_timeline(False, 0)
            record["moved"] = int(emu.counters()["h2d_bytes"] - moved)
            record["samples"] = [(0.0, allocated), *((moment - began, now) for moment, now in timeline)]

    def close(self) -> None:
        """The capacity as it was found, the real clock, no limit on the bus."""
        self._emu.set_virtual_time(False)
        self._emu.set_bandwidth(0)
        self.limit(self._capacity_before)


def find_stage(device: str | None) -> Stage:
    """The named device, else the accelerator that is present, else the emulated one.

    Raises ConfigError for a device that is not there or is no accelerator, and
    ``greenroom.emulator.build.EmulatorUnavailableError`` (an ImportError) where the emulator cannot be built.
    """
    present = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    real = present is not None and present.type != "emu"
    accepted = "'emu'" + (f", {present.type!r}" if real and present is not None else "")
    if device is None:
        return Stage(_indexed(present)) if real and present is not None else EmulatedStage()
    kind = device.partition(":")[0]
    if kind == "emu":
        return EmulatedStage()
    if not real or present is None or kind != present.type:
        raise ConfigError("device", device, accepted)
    return Stage(_indexed(torch.device(device)))


def _indexed(device: torch.device) -> torch.device:
    if device.index is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())
