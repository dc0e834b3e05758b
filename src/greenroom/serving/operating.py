"""What operators ask: health, metrics, the report, the budget, sleep."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import APIRouter, Query
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from greenroom.engine.errors import DoesNotFit
from greenroom.errors import GreenroomError
from greenroom.serving.context import Context
from greenroom.serving.errors import ApiError
from greenroom.serving.forms import json_words, read_json
from greenroom.serving.schemas import MemoryChange, parse


def router(context: Context) -> APIRouter:
    """The routes for operators."""
    routes = APIRouter()
    omni = context.omni
    started = int(time.time())

    @routes.get("/health", tags=["operating"], summary="200 while requests are served; 503 when the worker is dead.")
    async def health() -> Response:
        status = omni.status
        word = "dead" if not status.alive else "asleep" if status.asleep else "ok"
        if status.ranks and not status.alive and any(r.alive for r in status.ranks):
            word = "degraded"
        body: dict[str, Any] = {
            "status": word, "waiting": status.waiting, "running": status.running, "cause": status.cause
        }  # fmt: skip
        if status.ranks:
            body["ranks"] = [vars(r) for r in status.ranks]
        return JSONResponse(body, 200 if status.alive else 503)

    @routes.head("/health", include_in_schema=False)
    async def health_for_probes() -> Response:
        return Response(status_code=200 if omni.status.alive else 503)

    @routes.get("/metrics", tags=["operating"], summary="Prometheus.")
    async def metrics() -> Response:
        page = await asyncio.to_thread(context.metrics.page)
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    @routes.get("/v1/models", tags=["models"])
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model()]}

    @routes.get("/v1/models/{model:path}", tags=["models"])
    async def model(model: str) -> dict[str, Any]:
        if model not in (context.model_name, omni.model):
            raise ApiError(404, f"model {model[:200]!r} is not served here", param="model", code="model_not_found")
        return _model()

    def _model() -> dict[str, Any]:
        return {"id": context.model_name, "object": "model", "created": started, "owned_by": "greenroom"}

    @routes.get("/v1/offload", tags=["operating"], summary="What lies where.")
    async def offload() -> dict[str, Any]:
        figures = await asyncio.to_thread(omni.figures)
        report = next((f.report for f in figures if f.report is not None), None)
        ranks = [
            {"rank": f.rank, "device": f.device, "alive": f.alive, "report": f.report.to_dict() if f.report else None}
            for f in figures
            if f.rank is not None
        ]
        return {
            "model": context.model_name,
            "pipeline": omni.facts.pipeline,
            "device": str(omni.device),
            "offloaded": omni.config is not None,
            "makes_videos": omni.facts.makes_videos,
            "asleep": omni.status.asleep,
            "report": report.to_dict() if report is not None else None,
            "text": str(report) if report is not None else None,
            "loading": omni.load_report.to_dict() if omni.load_report is not None else None,
            **({"ranks": ranks} if ranks else {}),
        }

    @routes.get("/v1/offload/live", tags=["operating"], summary="What lies on the device at this moment.")
    async def live(since: int = Query(0, ge=0), rank: int = Query(0, ge=0)) -> dict[str, Any]:
        if rank >= max(1, len(omni.status.ranks)):
            raise ApiError(404, f"there is no rank {rank}", param="rank", code="not_found")
        snapshot = await asyncio.to_thread(omni.live, since, *([rank] if omni.status.ranks else []))
        status = omni.status
        snapshot["waiting"], snapshot["running"] = status.waiting, status.running
        return snapshot

    @routes.post(
        "/v1/offload/memory",
        tags=["operating"],
        summary="Change the memory budget between two requests.",
        openapi_extra=json_words(MemoryChange),
    )
    async def memory(http: HttpRequest) -> dict[str, Any]:
        change = parse(MemoryChange, await read_json(http))
        try:
            report = await context.operate(omni.set_memory, change.memory_budget)
        except GreenroomError:
            raise
        except ValueError as error:  # a budget that is too small says what would do
            raise ApiError(400, str(error), param="memory_budget", code="does_not_fit") from None
        return {"report": report.to_dict() if report is not None else None}

    @routes.post("/v1/sleep", tags=["operating"], summary="Free the device after the running request.")
    async def sleep() -> dict[str, Any]:
        await context.operate(omni.sleep)
        return {"status": "asleep"}

    @routes.post("/v1/wake", tags=["operating"], summary="Take the device again.")
    async def wake() -> dict[str, Any]:
        try:
            await context.operate(omni.wake)
        except DoesNotFit as error:
            raise ApiError(503, str(error), code="does_not_fit") from None
        return {"status": "ok"}

    @routes.post("/v1/restart", tags=["operating"], summary="Start a new worker in place of a dead one.")
    async def restart() -> dict[str, Any]:
        try:
            await context.operate(omni.restart)
        except Exception as error:  # whatever a device or a driver says; the engine is as dead as before
            raise ApiError(503, f"no new worker could be started: {error}", code="worker_dead") from None
        return {"status": "ok" if omni.status.alive else "dead"}

    return routes
