"""Measuring on the emulated accelerator: a cost model, and forwards in their steady state."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch

import greenroom.emulator
from bench.offloaders import Offloader, Running, resident
from bench.subjects import Subject

emu: Any = greenroom.emulator and torch.emu  # type: ignore[attr-defined]
DEVICE = torch.device("emu", 0)


@dataclass(frozen=True)
class CostModel:
    """The modelled accelerator (see `torch.emu.set_virtual_time`).

    Attributes:
        flops: per second; membw: bytes per second of the device's memory.
        launch: host seconds for an operation; kernel_latency: device seconds on top of each.
        copy_latency: seconds on top of each copy over the link.
    """

    flops: float
    membw: float
    launch: float
    kernel_latency: float
    copy_latency: float

    def __str__(self) -> str:
        return (
            f"{self.flops / 1e9:g} GFLOP/s, device memory {self.membw / 1e9:g} GB/s, {self.launch * 1e6:g} us of host "
            f"time to launch an operation, {self.kernel_latency * 1e6:g} us of device time on top of each, "
            f"{self.copy_latency * 1e6:g} us on top of each copy"
        )


@dataclass(frozen=True)
class Sample:
    """Forwards of one offloader in the steady state.

    Attributes:
        seconds: a forward.
        copied: bytes to the device a forward; copies: number of them; returned: bytes back to the host.
        peak: the most bytes of device memory that were taken.
        latent: the last latent, on the CPU.
        races: what the race checker reported.
    """

    seconds: float
    copied: float
    copies: float
    returned: float
    peak: int
    latent: torch.Tensor
    races: int

    def bound(self, compute: float, bandwidth: float) -> float:
        """Seconds that no schedule of these copies beats: the longer of all compute and all copies."""
        return max(compute, self.copied / bandwidth)


def start(*, races: bool = False, poison: bool = False) -> None:
    """Puts the emulator in its first state, with the checks that are asked for."""
    emu.reset()
    emu.set_race_check("collect" if races else "off")
    emu.set_poison(poison)


def virtual(cost: CostModel, bandwidth: float = 0.0) -> None:
    """Switches to the virtual clock, with a link of `bandwidth` bytes a second (0: unlimited)."""
    emu.set_virtual_time(
        True, flops=cost.flops, membw=cost.membw, launch=cost.launch, kernel_latency=cost.kernel_latency
    )
    emu.set_latency(cost.copy_latency)
    emu.set_bandwidth(bandwidth)


def seconds() -> float:
    emu.synchronize()
    return float(emu.virtual_time())


class Bench:
    """One offloader on one subject: forwards on the virtual clock, at one bandwidth after another."""

    def __init__(self, subject: Subject, running: Running) -> None:
        self.subject = subject
        self.running = running
        self.extras = {k: v.to(DEVICE) for k, v in subject.extras.items()}

    def call(self, forwards: int, latent: torch.Tensor) -> torch.Tensor:
        for _ in range(forwards):
            latent = self.subject.step(self.running.model, latent, self.extras)
        return latent

    def steady(self, cost: CostModel, bandwidth: float, *, warm: int = 2, forwards: int = 4) -> Sample:
        """Forwards after `warm` others, from event to event on the compute stream, so that nothing drains between."""
        virtual(cost, bandwidth)
        with torch.no_grad():
            latent = self.call(warm, self.subject.latent.to(DEVICE))
            began, ended = (torch.Event(DEVICE, enable_timing=True) for _ in range(2))
            began.record()
            self._start()
            latent = self.call(forwards, latent)
            ended.record()
            emu.synchronize()
        return self._sample(began.elapsed_time(ended) / 1e3, forwards, latent)

    def whole_call(self, cost: CostModel, bandwidth: float, *, warm: int = 2, forwards: int = 4) -> Sample:
        """Two whole calls, of `warm` and of `forwards` forwards; the second is measured, its end included."""
        virtual(cost, bandwidth)
        with torch.no_grad():
            latent = self.call(warm, self.subject.latent.to(DEVICE))
            self.running.end_call()
            began = seconds()
            self._start()
            latent = self.call(forwards, latent)
            self.running.end_call()
            return self._sample(seconds() - began, forwards, latent)

    def _start(self) -> None:
        emu.race_reports()
        emu.reset_counters()
        emu.reset_peak_memory_stats()

    def _sample(self, taken: float, forwards: int, latent: torch.Tensor) -> Sample:
        counts, peak = emu.counters(), emu.max_memory_reserved()
        races = len(emu.race_reports())
        return Sample(
            seconds=taken / forwards,
            copied=counts["h2d_bytes"] / forwards,
            copies=counts["h2d_count"] / forwards,
            returned=counts["d2h_bytes"] / forwards,
            peak=peak,
            latent=latent.cpu(),
            races=races,
        )


def measure(
    subject: Subject,
    offloader: Offloader,
    cost: CostModel,
    bandwidths: list[float],
    *,
    whole_call: bool = False,
    warm: int = 2,
    forwards: int = 4,
) -> list[Sample]:
    """One sample for each bandwidth, bytes per second."""
    virtual(cost)
    samples = []
    with offloader(subject, DEVICE) as running:
        bench = Bench(subject, running)
        for bandwidth in bandwidths:
            if whole_call:
                samples.append(bench.whole_call(cost, bandwidth, warm=warm, forwards=forwards))
            else:
                samples.append(bench.steady(cost, bandwidth, warm=warm, forwards=forwards))
        del bench, running
    gc.collect()
    emu.empty_cache()
    return samples


@dataclass(frozen=True)
class Profile:
    """A resident model on the virtual clock: seconds of a forward, of each block, and outside the blocks."""

    compute: float
    blocks: tuple[float, ...]
    gap: float
    reference: torch.Tensor
    peak: int


def profile(subject: Subject, cost: CostModel, *, warm: int = 2, forwards: int = 4) -> Profile:
    """Runs the resident model; its last latent is what every offloader has to produce."""
    virtual(cost)
    with resident(subject, DEVICE) as running:
        bench = Bench(subject, running)
        sample = bench.steady(cost, 0.0, warm=warm, forwards=forwards)
        marks: list[float] = []
        blocks = subject.blocks(running.model)
        hooks = []
        for block in blocks:
            hooks.append(block.register_forward_pre_hook(lambda *_: marks.append(seconds())))
            hooks.append(block.register_forward_hook(lambda *_: marks.append(seconds())))
        with torch.no_grad():
            bench.call(1, subject.latent.to(DEVICE))
        for hook in hooks:
            hook.remove()
        times = tuple(marks[2 * i + 1] - marks[2 * i] for i in range(len(blocks)))
        del bench, running
    gc.collect()
    emu.empty_cache()
    return Profile(sample.seconds, times, max(0.0, sample.seconds - sum(times)), sample.latent, sample.peak)
