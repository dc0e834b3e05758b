"""The HTTP face: puts the routes together around one engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse, Response

from greenroom.engine import Engine
from greenroom.serving import errors, images, operating, videos
from greenroom.serving.context import Context
from greenroom.serving.guards import Guards
from greenroom.serving.metrics import Metrics
from greenroom.serving.settings import ServerSettings
from greenroom.serving.store import VideoStore

_STATIC = Path(__file__).parent / "static"
# Seconds between two looks for requests that were given up while they wait, and videos that are too old.
_TIDY = 0.25
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; media-src 'self' blob:",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def create_app(omni: Engine, settings: ServerSettings | None = None) -> FastAPI:
    """An ASGI app that serves an engine, and shuts it down when it ends itself.

    The event loop never computes: requests wait for the engine's worker, files are read and written on threads.
    """
    settings = settings or ServerSettings()
    context = Context(omni, settings, Metrics(omni))
    store = VideoStore(settings, context.metrics)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tidying = asyncio.create_task(_tidy(omni, store))
        try:
            yield
        finally:
            tidying.cancel()
            try:
                await asyncio.to_thread(omni.shutdown, context.time_left)
            finally:
                context.operators.shutdown(wait=False, cancel_futures=True)
                await asyncio.to_thread(store.close, context.time_left)

    app = FastAPI(
        title="Greenroom",
        summary="Diffusion models, offloaded, behind OpenAI's interface.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    errors.install(app)
    app.include_router(images.router(context))
    app.include_router(videos.router(context, store))
    app.include_router(operating.router(context))

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(_STATIC / "index.html", headers=_PAGE_HEADERS)

    @app.get("/static/{name}", include_in_schema=False)
    async def static(name: str) -> Response:
        if name not in ("page.js", "page.css"):
            raise errors.ApiError(404, "there is no such file")
        return FileResponse(_STATIC / name, headers=_PAGE_HEADERS)

    app.add_middleware(Guards, context=context)
    app.state.context, app.state.store = context, store
    return app


async def _tidy(omni: Engine, store: VideoStore) -> None:
    while True:
        await asyncio.sleep(_TIDY)
        omni.cancel_swept()
        store.clean_up()
