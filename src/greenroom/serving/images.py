"""POST /v1/images/generations and /v1/images/edits."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response, StreamingResponse

from greenroom.engine import Job, OmniResult, RequestCancelled
from greenroom.engine.media import as_picture, read_image, write_image
from greenroom.serving.context import Context, changes, event
from greenroom.serving.errors import ApiError, as_api_error, shutting_down
from greenroom.serving.forms import Files, form_words, json_words, read_fields, read_json
from greenroom.serving.limits import accepted_fields
from greenroom.serving.schemas import ImageEdit, ImageGeneration, parse


def router(context: Context) -> APIRouter:
    """The routes for pictures."""
    routes = APIRouter(prefix="/v1/images", tags=["images"])

    @routes.post("/generations", summary="Draw pictures from a prompt.", openapi_extra=json_words(ImageGeneration))
    async def generations(http: HttpRequest) -> Response:
        words = parse(ImageGeneration, await read_json(http), accepted_fields(context.omni, ImageGeneration))
        return await _answer(context, "image", words, {}, http)

    @routes.post(
        "/edits",
        summary="Draw pictures from a prompt and a picture.",
        openapi_extra=form_words(ImageEdit, {"image": True, "mask": False}),
    )
    async def edits(http: HttpRequest) -> Response:
        fields, files = await read_fields(http, ImageEdit.files)
        using = "mask_image" if files.get("mask") else "image"
        accepted = await asyncio.to_thread(accepted_fields, context.omni, ImageEdit, using)
        words = parse(ImageEdit, fields, accepted)
        if not files.get("image"):
            raise ApiError(400, "image is missing; accepted: a picture", param="image", code="invalid_value")
        if len(files.get("mask", ())) > 1:
            raise ApiError(400, "mask is given twice", param="mask")
        inputs = await asyncio.to_thread(_read, context, files)
        if not all(map(context.omni.can_take, inputs)):
            raise ApiError(400, "image: this model draws from text and takes no picture", param="image")
        return await _answer(context, "edit", words, inputs, http)

    return routes


def _read(context: Context, files: Files) -> dict[str, Any]:
    pictures = [read_image(f, context.media_limits, "image") for f in files["image"]]
    inputs: dict[str, Any] = {"image": pictures if len(pictures) > 1 else pictures[0]}
    if files.get("mask"):
        inputs["mask_image"] = read_image(files["mask"][0], context.media_limits, "mask")
    return inputs


async def _answer(
    context: Context, kind: str, words: ImageGeneration, inputs: dict[str, Any], http: HttpRequest
) -> Response:
    # A picture of a video model is a video of one frame.
    more = {"num_frames": 1} if context.omni.facts.makes_videos else {}
    job = context.submit(kind, words, inputs, num_outputs_per_prompt=words.n, **more)
    if words.stream:
        return StreamingResponse(_stream(context, kind, words, job), media_type="text/event-stream")
    result = await context.result(kind, job, http)
    body, pictures = await asyncio.to_thread(_body, context, kind, words, result)
    pieces = [*_in_pieces(body, pictures)]
    length = {"Content-Length": str(sum(map(len, pieces)))}
    return StreamingResponse(_sent(pieces), media_type="application/json", headers=length)


def _in_pieces(body: dict[str, Any], pictures: list[bytes]) -> Iterator[bytes]:
    """The answer as JSON. A whole one may have a hundred megabytes, for which `json` would hold the interpreter."""
    yield json.dumps(body)[:-1].encode() + b', "data": ['
    for i, picture in enumerate(pictures):
        yield b', {"b64_json": "' if i else b'{"b64_json": "'
        yield picture
        yield b'"}'
    yield b"]}"


async def _sent(pieces: list[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


def _body(
    context: Context, kind: str, words: ImageGeneration, result: OmniResult
) -> tuple[dict[str, Any], list[bytes]]:
    """What is said of the pictures, and their files as base64 text."""
    pictures = [as_picture(p) for p in (result.images if len(result.images) else [v[0] for v in result.videos])]
    quality = 95 if words.output_compression is None else words.output_compression
    files = [write_image(p, words.output_format, quality) for p in pictures]
    context.metrics.finished(kind, result.metrics, sum(p.width * p.height * 3 for p in pictures))
    body = {
        "created": int(time.time()),
        "output_format": words.output_format,
        "size": f"{pictures[0].width}x{pictures[0].height}",
        "request_id": result.request_id,
        "seed": result.seed,
        "metrics": vars(result.metrics),
    }
    return body, [base64.b64encode(f) for f in files]


async def _stream(context: Context, kind: str, words: ImageGeneration, job: Job) -> AsyncIterator[bytes]:
    name = "image_edit" if kind == "edit" else "image_generation"
    told = False
    try:
        async for changed in changes(context, job):
            if not changed:
                yield b": still here\n\n"
                continue
            yield event(
                f"{name}.progress",
                {
                    "request_id": job.id,
                    "phase": job.phase,
                    "step": job.step,
                    "steps": job.steps,
                    "progress": job.progress,
                },
            )
        told = True
        try:
            if not job.future.done():
                raise shutting_down()
            result = job.future.result()
        except Exception as error:
            context.metrics.failed(kind, error)
            yield event("error", as_api_error(error).body)
            return
        body, pictures = await asyncio.to_thread(_body, context, kind, words, result)
        for picture in pictures:
            data = {**body, "b64_json": picture.decode(), "created_at": body["created"]}
            yield await asyncio.to_thread(event, f"{name}.completed", data)
    finally:
        # Also reached when the client goes away in the middle.
        context.give_up(job)
        if not told:
            context.metrics.failed(kind, RequestCancelled("the client went away"))
