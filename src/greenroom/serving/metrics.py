"""What Prometheus sees. Times in seconds, sizes in bytes."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from greenroom.engine import Omni, OmniMetrics
from greenroom.errors import GreenroomError
from greenroom.handle import Report

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class Metrics:
    """Counters of one server, and gauges that are read when they are asked for."""

    def __init__(self, omni: Omni) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "greenroom_requests", "Requests by kind and outcome.", ["kind", "outcome"], registry=self.registry
        )
        self._phases = Histogram(
            "greenroom_phase_seconds", "Seconds in each phase.", ["phase"], buckets=_SECONDS, registry=self.registry
        )
        self._copied = Counter(
            "greenroom_copied_bytes", "Bytes moved for requests.", ["direction"], registry=self.registry
        )
        self._stalls = Counter(
            "greenroom_stalls", "Blocks that were needed before they had been fetched.", registry=self.registry
        )
        self._steps = Counter("greenroom_steps", "Denoising steps.", registry=self.registry)
        self._retries = Counter(
            "greenroom_memory_retries", "Requests that were tried again after a full device.", registry=self.registry
        )
        self.registry.register(_Gauges(omni))

    def finished(self, kind: str, metrics: OmniMetrics, output_bytes: int) -> None:
        """Counts a request that gave a result of `output_bytes` bytes."""
        self.requests.labels(kind, "completed").inc()
        for phase in ("queue", "encode", "denoise", "decode", "total"):
            self._phases.labels(phase).observe(max(0.0, getattr(metrics, f"{phase}_s")))
        self._copied.labels("to_device").inc(metrics.bytes_to_device)
        self._copied.labels("from_device").inc(output_bytes)
        self._stalls.inc(metrics.stalls)
        self._steps.inc(metrics.steps)
        self._retries.inc(metrics.retries)

    def page(self) -> bytes:
        return generate_latest(self.registry)


class _Gauges(Collector):
    def __init__(self, omni: Omni) -> None:
        self._omni = omni

    def collect(self) -> Iterator[Metric]:
        status = self._omni.status
        yield _gauge("greenroom_worker_alive", "Whether the worker lives.", status.alive)
        yield _gauge("greenroom_asleep", "Whether the engine sleeps.", status.asleep)
        yield _gauge("greenroom_queue_waiting", "Requests that wait.", status.waiting)
        yield _gauge("greenroom_running", "Requests that run.", status.running is not None)
        yield _gauge("greenroom_device_allocated_bytes", "Device memory in use.", self._omni.accelerator.allocated())
        report: Report | None = None
        try:
            report = self._omni.report()
        except GreenroomError:
            report = None
        if report is not None:
            resident = sum(c.resident for c in report.components) + report.arena
            yield _gauge("greenroom_resident_bytes", "Device memory that weights hold all the time.", resident)
            yield _gauge("greenroom_pinned_bytes", "Page-locked host memory.", report.pinned)
            yield _gauge("greenroom_pageable_bytes", "Host memory of weights that is not locked.", report.pageable)
            if report.budget is not None:
                yield _gauge("greenroom_memory_budget_bytes", "The memory budget.", report.budget)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=float(value))
