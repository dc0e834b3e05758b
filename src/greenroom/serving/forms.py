"""Bodies of requests: JSON, or a form with files; in JSON, base64 text stands for a file."""

from __future__ import annotations

import json
from typing import Any

from fastapi import Request as HttpRequest
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException

from greenroom.serving.errors import ApiError

Files = dict[str, list[bytes | str]]
"""By field: what was uploaded, as it is, and text that stands for a file."""


async def read_json(http: HttpRequest) -> dict[str, Any]:
    """The JSON object that a request holds.

    Raises:
        ApiError: 400, saying where it is none.
    """
    body = await http.body()
    try:
        found = json.loads(body.decode(), parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise _no_json(f"{error.msg} at line {error.lineno}, column {error.colno}") from None
    except UnicodeDecodeError as error:
        raise _no_json(f"byte {error.start + 1} is not UTF-8") from None
    except _Constant as error:
        raise _no_json(f"{error} is no number there") from None
    except RecursionError:
        raise _no_json("it is nested too deeply") from None
    except ValueError:  # Python's own limit for whole numbers, which it tells how to lift
        raise _no_json("a number has too many digits") from None
    if not isinstance(found, dict):
        raise _no_json("it is not an object", what="a JSON object")
    return found


async def read_fields(http: HttpRequest, files: tuple[str, ...]) -> tuple[dict[str, Any], Files]:
    """Fields and files of a JSON or multipart body.

    Args:
        http: the request.
        files: names of fields that may hold files; in JSON, the same names may hold base64 text.

    Raises:
        ApiError: 400, not a body of either kind, or a field that is given twice.
    """
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    fields: dict[str, Any] = {}
    found: Files = {}
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
    body = await read_json(http)
    for name in files:
        value = body.pop(name, None)
        for item in value if isinstance(value, list) else [value]:
            if item is not None and not isinstance(item, str):
                raise ApiError(400, f"{name} is not a file; accepted: a file, base64 text or a data URL", param=name)
            if item is not None:
                found.setdefault(name, []).append(item)
    return body, found


async def _sort(form: FormData, files: tuple[str, ...], fields: dict[str, Any], found: Files) -> None:
    for name, value in form.multi_items():
        plain = name.removesuffix("[]")
        if isinstance(value, UploadFile):
            if plain not in files:
                accepted = ", ".join(files)
                raise ApiError(400, f"{plain} is not a field for files; accepted: {accepted}", param=plain)
            found.setdefault(plain, []).append(await value.read())
        elif plain in files:
            found.setdefault(plain, []).append(value)
        elif name in fields:
            raise ApiError(400, f"{name} is given twice", param=name)
        else:
            fields[name] = value


class _Constant(ValueError):
    pass


def _no_constant(text: str) -> float:
    raise _Constant(text)


def _no_json(why: str, what: str = "valid JSON") -> ApiError:
    return ApiError(400, f"the body is not {what}: {why}", code="invalid_json")


def json_words(kind: Any) -> dict[str, Any]:
    """The OpenAPI words for a route that takes JSON."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def form_words(kind: Any, files: dict[str, bool]) -> dict[str, Any]:
    """The OpenAPI words for a route that takes a form with files, or JSON with base64 text in their place."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    properties = {**schema["properties"], **{f: {"type": "string", "format": "binary"} for f in files}}
    required = [*schema.get("required", []), *(f for f, needed in files.items() if needed)]
    body = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": body}}}}
