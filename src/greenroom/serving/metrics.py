"""What Prometheus sees. Times in seconds, sizes in bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from greenroom.engine import Engine, Figures, OmniMetrics
from greenroom.handle import Report
from greenroom.serving.errors import CLIENT_CLOSED_REQUEST, as_api_error

# HTTP status -> outcome, where it is not "refused" (4xx) or "failed" (5xx).
_OUTCOMES = {408: "timeout", 429: "refused_busy", CLIENT_CLOSED_REQUEST: "cancelled", 503: "unavailable"}
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class Metrics:
    """Counters of one server, and gauges that are read when they are asked for."""

    def __init__(self, omni: Engine) -> None:
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

    def failed(self, kind: str, error: BaseException) -> None:
        """Counts a request that gave no result, by what its client is told."""
        status = as_api_error(error).status if isinstance(error, Exception) else CLIENT_CLOSED_REQUEST
        outcome = _OUTCOMES.get(status)
        if outcome is None:
            outcome = "refused" if status < 500 else "failed"
        self.requests.labels(kind, outcome).inc()

    def page(self) -> bytes:
        return generate_latest(self.registry)


class _Gauges(Collector):
    def __init__(self, omni: Engine) -> None:
        self._omni = omni

    def collect(self) -> Iterator[Metric]:
        status = self._omni.status
        yield _gauge("greenroom_worker_alive", "Whether all workers live.", status.alive)
        yield _gauge("greenroom_asleep", "Whether the engine sleeps.", status.asleep)
        yield _gauge("greenroom_queue_waiting", "Requests that wait.", status.waiting)
        running = sum(r.running is not None for r in status.ranks) if status.ranks else status.running is not None
        yield _gauge("greenroom_running", "Requests that run.", running)
        yield from _of_ranks(self._omni.figures())


def _of_ranks(figures: list[Figures]) -> Iterator[Metric]:
    """What each rank has, with a label for its number where there are several."""
    labels = ["rank"] if any(f.rank is not None for f in figures) else []

    def family(name: str, text: str, values: Sequence[float | None], kind: Any = GaugeMetricFamily) -> Iterator[Metric]:
        metric = kind(name, text, labels=labels)
        for each, value in zip(figures, values, strict=True):
            if value is not None:
                metric.add_metric([str(each.rank)] if labels else [], float(value))
        if metric.samples:
            yield metric

    reports = [f.report for f in figures]
    if labels:
        yield from family("greenroom_rank_alive", "Whether the rank serves.", [float(f.alive) for f in figures])
        for name, text, totals in (
            ("greenroom_rank_requests", "Requests that the rank has finished.", [f.served for f in figures]),
            ("greenroom_rank_copied_bytes", "Weights copied to the rank's device.", [f.copied for f in figures]),
            ("greenroom_rank_steps", "Denoising steps of the rank.", [f.steps for f in figures]),
        ):
            yield from family(name, text, [float(t) for t in totals], CounterMetricFamily)
    yield from family(
        "greenroom_device_allocated_bytes", "Device memory in use.", [float(f.allocated) for f in figures]
    )
    resident = [_resident(r) if r is not None else None for r in reports]
    yield from family("greenroom_resident_bytes", "Device memory that weights hold all the time.", resident)
    pinned = [r.pinned if r is not None else None for r in reports]
    yield from family("greenroom_pinned_bytes", "Page-locked host memory.", pinned)
    pageable = [r.pageable if r is not None else None for r in reports]
    yield from family("greenroom_pageable_bytes", "Host memory of weights that is not locked.", pageable)
    budgets = [r.budget if r is not None else None for r in reports]
    yield from family("greenroom_memory_budget_bytes", "The memory budget.", budgets)


def _resident(report: Report) -> int:
    """Of one that sleeps, the components say what they hold when it is awake."""
    return 0 if report.asleep else sum(c.resident for c in report.components) + report.arena


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=float(value))
