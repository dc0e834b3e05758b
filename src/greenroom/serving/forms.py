"""Bodies of requests: JSON, or a form with files; in JSON, base64 text stands for a file."""

from __future__ import annotations

import json
from typing import Any

from fastapi import Request as HttpRequest
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException

from greenroom.serving.errors import ApiError


async def read_fields(http: HttpRequest, files: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, list[bytes]]]:
    """Fields and files of a JSON or multipart body.

    Args:
        http: the request.
        files: names of fields that may hold files; in JSON, the same names may hold base64 text.

    Raises:
        ApiError: 400, not a body of either kind, or a field that is given twice.
    """
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    fields: dict[str, Any] = {}
    found: dict[str, list[bytes]] = {}
    if kind in ("multipart/form-data", "application/x-www-form-urlencoded"):
        try:
            form = await http.form(max_files=16, max_fields=100)
        except HTTPException as error:
            raise ApiError(400, f"the form is not readable: {error.detail}") from None
        try:
            await _sort(form, files, fields, found)
        finally:
            await form.close()  # large files lie on disk
        return fields, found
    try:
        body = json.loads(await http.body(), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not JSON; accepted: application/json or multipart/form-data") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body is not a JSON object")
    for name in files:
        value = body.pop(name, None)
        for item in value if isinstance(value, list) else [value]:
            if item is not None and not isinstance(item, str):
                raise ApiError(400, f"{name} is not a file; accepted: a file, base64 text or a data URL", param=name)
            if item is not None:
                found.setdefault(name, []).append(item.encode("utf-8", "replace"))
    return body, found


async def _sort(form: FormData, files: tuple[str, ...], fields: dict[str, Any], found: dict[str, list[bytes]]) -> None:
    for name, value in form.multi_items():
        plain = name.removesuffix("[]")
        if isinstance(value, UploadFile):
            if plain not in files:
                raise ApiError(400, f"{plain} is not a field for files", param=plain)
            found.setdefault(plain, []).append(await value.read())
        elif plain in files:
            found.setdefault(plain, []).append(value.encode())
        elif name in fields:
            raise ApiError(400, f"{name} is given twice", param=name)
        else:
            fields[name] = value


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def bytes_or_text(data: bytes) -> bytes | str:
    """The bytes of a file, or text that stands for one."""
    if data[:5] in (b"data:", b"http:", b"https", b"file:"):
        return data.decode("utf-8", "replace")
    magic = (b"\x89PNG", b"\xff\xd8", b"RIFF", b"BM", b"GIF8")
    if data.startswith(magic) or not data.isascii():
        return data
    return data.decode("ascii")


def form_words(kind: Any, files: dict[str, bool]) -> dict[str, Any]:
    """The OpenAPI words for a route that takes a form with files, or JSON with base64 text in their place."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    properties = {**schema["properties"], **{f: {"type": "string", "format": "binary"} for f in files}}
    required = [*schema.get("required", []), *(f for f, needed in files.items() if needed)]
    body = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": body}}}}
