"""Errors as OpenAI's clients know them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from greenroom.distributed import RanksError
from greenroom.engine.errors import DoesNotFit, QueueFull, RequestCancelled, RequestRefused, WorkerDied
from greenroom.errors import ConfigError, GreenroomError

log = logging.getLogger("greenroom.serving")

# Nobody reads the answer to a request that was given up; the number is nginx's for that.
CLIENT_CLOSED_REQUEST = 499


# What pydantic appends to a field's name for each of the types that it may have.
_BRANCHES = ("int", "str", "float")
_SHOWN = 100


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: HTTP status.
        message: for people.
        param: the field at fault, or None.
        code: for programs, or None.
        headers: further headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        return {
            "error": {"message": self.message, "type": _type_of(self.status), "param": self.param, "code": self.code}
        }

    def response(self) -> Response:
        # In ASCII: a message may quote half a character, which has no other form on the wire.
        return Response(json.dumps(self.body), self.status, self.headers, "application/json")


def _type_of(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def shutting_down(message: str = "the server is shutting down") -> ApiError:
    """A 503 that has a client try elsewhere, or later."""
    return ApiError(503, message, code="shutting_down", headers={"Retry-After": "5", "Connection": "close"})


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told about an error; what is not the client's doing says no more than it has to."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestRefused):
        return ApiError(400, error.message, param=error.field, code="invalid_value")
    if isinstance(error, DoesNotFit):
        return ApiError(400, str(error), param="size", code="does_not_fit")
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": str(error.retry_after)})
    if isinstance(error, RequestCancelled):
        if "longer than" in error.reason:
            return ApiError(408, str(error), code="timeout")
        if "shutting down" in error.reason:
            return shutting_down(str(error))
        return ApiError(CLIENT_CLOSED_REQUEST, str(error), code="cancelled")
    if isinstance(error, WorkerDied | RanksError):
        return ApiError(503, f"{error}; POST /v1/restart starts a new one", code="worker_dead")
    if isinstance(error, ConfigError):
        return ApiError(400, str(error), param=error.field, code="invalid_value")
    if isinstance(error, GreenroomError):
        return ApiError(400, str(error), code="refused")
    return ApiError(500, f"the request failed: {type(error).__name__}: {error}", code="internal_error")


def install(app: FastAPI) -> None:
    """Makes every error that is meant leave in OpenAI's shape; `Guards` sees to the others."""

    @app.exception_handler(ApiError)
    async def _api(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(GreenroomError)
    async def _ours(request: Request, error: GreenroomError) -> Response:
        return as_api_error(error).response()

    @app.exception_handler(RequestValidationError)
    async def _validation(request: Request, error: RequestValidationError) -> Response:
        return from_validation(list(error.errors())).response()

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        return ApiError(error.status_code, str(error.detail), headers=dict(error.headers or {})).response()


def from_validation(problems: list[Any], accepted: Sequence[str] = ()) -> ApiError:
    """A 400 that names the first field at fault, from pydantic's list of problems.

    Args:
        problems: as pydantic tells them.
        accepted: fields that are known, for those that are not.
    """
    first = problems[0] if problems else {}
    where = [str(p) for p in first.get("loc", ()) if p not in ("body", "query", "path", *_BRANCHES)]
    field = ".".join(where) or None
    if field is None and where:
        field = "''"
    kind, told = first.get("type"), str(first.get("msg", "not accepted")).removeprefix("Value error, ")
    if field is None:
        message = "the request is not understood"
    elif kind == "extra_forbidden":
        near = difflib.get_close_matches(field, accepted, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        message = f"{field[:_SHOWN]} is not a known field{hint}; accepted: {', '.join(accepted)}"
    elif kind == "missing":
        message = f"{field} is missing"
    else:
        message = f"{field} = {shown(first.get('input'))} is not accepted: {told}"
    return ApiError(400, message, param=field, code="invalid_value")


def shown(value: object) -> str:
    """A value as it was sent, or its beginning."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
