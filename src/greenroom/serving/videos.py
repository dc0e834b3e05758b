"""/v1/videos: jobs that are created, followed, fetched and deleted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Literal

from fastapi import APIRouter, Query
from fastapi import Request as HttpRequest
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse

from greenroom.engine.media import read_image
from greenroom.serving.context import Context, changes, event
from greenroom.serving.errors import ApiError, shutting_down
from greenroom.serving.forms import form_words, read_fields
from greenroom.serving.limits import accepted_fields
from greenroom.serving.schemas import VideoCreation, parse
from greenroom.serving.store import StoredVideo, VideoStore

_TYPES = {"video": "video/mp4", "thumbnail": "image/png", "frames": "application/zip"}


def router(context: Context, store: VideoStore) -> APIRouter:
    """The routes for videos."""
    routes = APIRouter(prefix="/v1/videos", tags=["videos"])

    @routes.post("", summary="Start a video.", openapi_extra=form_words(VideoCreation, {"input_reference": False}))
    async def create(http: HttpRequest) -> Response:
        fields, files = await read_fields(http, VideoCreation.files)
        references = files.get("input_reference", [])
        using = "image" if references else None
        accepted = await asyncio.to_thread(accepted_fields, context.omni, VideoCreation, using)
        words = parse(VideoCreation, fields, accepted)
        if not context.omni.facts.makes_videos:
            raise ApiError(400, f"{context.model_name} draws pictures; POST /v1/images/generations", param="model")
        if len(references) > 1:
            raise ApiError(400, "input_reference is given twice", param="input_reference")
        inputs: dict[str, Any] = {}
        if references:
            inputs["image"] = await asyncio.to_thread(
                read_image, references[0], context.media_limits, "input_reference"
            )
            if not context.omni.can_take("image"):
                raise ApiError(400, "input_reference: this model takes no picture", param="input_reference")
        frames = words.num_frames
        if frames is None and words.seconds is not None:
            # The number next to it that the model makes.
            grain = context.omni.facts.frame_grain
            frames = 1 + grain * max(0, round((words.seconds * words.fps - 1) / grain))
        video = store.add(lambda: context.submit("video", words, inputs, num_frames=frames), words)
        return JSONResponse(video.to_dict(context.model_name))

    @routes.get("", summary="List videos, the newest first.")
    async def listing(
        limit: int = Query(20, ge=1, le=100),
        after: str | None = Query(None, max_length=100),
        order: Literal["asc", "desc"] = "desc",
    ) -> dict[str, Any]:
        videos = store.all(newest_first=order == "desc")
        if after is not None:
            ids = [v.id for v in videos]
            if after not in ids:
                raise ApiError(404, f"there is no video {after!r}", param="after")
            videos = videos[ids.index(after) + 1 :]
        page = videos[:limit]
        return {
            "object": "list",
            "data": [v.to_dict(context.model_name) for v in page],
            "first_id": page[0].id if page else None,
            "last_id": page[-1].id if page else None,
            "has_more": len(videos) > limit,
        }

    @routes.get("/{video_id}", summary="How far a video is.")
    async def retrieve(video_id: str) -> dict[str, Any]:
        return store.get(video_id).to_dict(context.model_name)

    @routes.get("/{video_id}/events", summary="Progress as server-sent events.")
    async def events(video_id: str) -> Response:
        return StreamingResponse(_events(context, store.get(video_id)), media_type="text/event-stream")

    @routes.get("/{video_id}/content", summary="The finished video; variant=frames is a zip of PNG files.")
    async def content(video_id: str, variant: Literal["video", "thumbnail", "frames"] = "video") -> Response:
        video = store.get(video_id)
        if video.status == "failed":
            raise ApiError(400, f"video {video_id} failed: {video.error_message}", code="video_failed")
        file = video.files.get(variant)
        if video.status != "completed" or file is None:
            raise ApiError(409, f"video {video_id} is not finished yet ({video.status})", code="not_ready")
        return FileResponse(file, media_type=_TYPES[variant], filename=file.name)

    @routes.delete("/{video_id}", summary="Delete a video; a running one is cancelled at its next step.")
    async def delete(video_id: str) -> dict[str, Any]:
        video = store.get(video_id)
        video.job.cancel("it was deleted")
        context.omni.cancel_swept()
        store.remove(video)
        return {"id": video.id, "object": "video.deleted", "deleted": True}

    return routes


async def _events(context: Context, video: StoredVideo) -> AsyncIterator[bytes]:
    # Listening costs nothing and owns nothing: a client that goes away leaves its video alone.
    async for changed in changes(context, video.job):
        yield event("video.progress", video.to_dict(context.model_name)) if changed else b": still here\n\n"
    while video.status in ("queued", "in_progress"):
        if context.late:
            yield event("error", shutting_down().body)
            return
        await asyncio.sleep(0.05)
    yield event(f"video.{video.status}", video.to_dict(context.model_name))
