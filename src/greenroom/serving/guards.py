"""What stands before every route: the name, the key, the origin, the size of a body.

Plain ASGI, so that streams stay streams.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from greenroom.serving.context import Context
from greenroom.serving.errors import ApiError, as_api_error, log, shutting_down

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
_READING = ("GET", "HEAD", "OPTIONS")


LOOPBACK = ("localhost", "127.0.0.1", "::1")


def host_name(host: str) -> str:
    """The name or address of a `Host`, without its port and brackets, in small letters."""
    if host.count(":") > 1 and not host.startswith("["):
        host = f"[{host}]"
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


class _TooLarge(HTTPException):
    """Raised while a body is read; an HTTPException, since the readers of bodies let only these through."""


class Guards:
    """Refuses requests to another's name, without the key, from another site's pages, or with too large a body.

    Note [A page of another site]
        A browser on this machine can be made to post to 127.0.0.1 by any page that it visits. It says so in `Origin`,
        which must be this server's own for anything that is not mere reading.

    Note [A name that leads here]
        A page may also have its own name resolve to 127.0.0.1: then its origin is this server's, and it may read as
        well. What it cannot do is send another name than its own in `Host`, so where everybody on this machine is let
        in without a key, only names of this machine are answered.
    """

    def __init__(self, app: Any, context: Context) -> None:
        self.app = app
        self.context = context
        self.settings = context.settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
        error = (
            self._leaving()
            or self._host(scope, headers)
            or self._key(scope, headers)
            or self._origin(scope, headers)
            or self._length(headers)
        )
        if error is not None:
            await error.response()(scope, receive, send)  # type: ignore[arg-type]
            return
        seen = 0

        async def counted() -> dict[str, Any]:
            nonlocal seen
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > self.settings.max_body:
                    raise _TooLarge(413, self._too_large().message)
            return message

        started = False

        async def noted(message: dict[str, Any]) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, counted, noted)
        except ClientDisconnect:
            return  # in the middle of its body: nobody is there to be answered
        except asyncio.CancelledError:
            # A body that did not come, or an answer that was not read, for as long as a shutdown may take.
            if not self.context.leaving:
                raise
            if not started:
                await shutting_down().response()(scope, receive, send)  # type: ignore[arg-type]
        except Exception as error:
            # Not left to the server, which would close the connection behind its answer.
            log.error("unexpected error in %s %s", scope["method"], scope["path"], exc_info=error)
            if started:
                raise
            await as_api_error(error).response()(scope, receive, send)  # type: ignore[arg-type]

    def _leaving(self) -> ApiError | None:
        return shutting_down() if self.context.leaving else None

    def _host(self, scope: Scope, headers: dict[str, str]) -> ApiError | None:
        allowed, given = self.settings.allowed_hosts, headers.get("host")
        if allowed is None or given is None:  # every browser says it
            return None
        name = host_name(given)
        here = (scope.get("server") or ("",))[0]
        if name in map(host_name, (*allowed, here)):
            return None
        return ApiError(
            403,
            f"Host = {given[:100]!r} is not accepted; accepted: {', '.join(allowed)}, and what --allowed-host names",
            code="foreign_host",
        )

    def _key(self, scope: Scope, headers: dict[str, str]) -> ApiError | None:
        key = self.settings.api_key
        if key is None or not (scope["path"].startswith("/v1/") or scope["path"] == "/metrics"):
            return None
        given = headers.get("authorization", "")
        scheme, _, token = given.partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), key.encode()):
            return None
        return ApiError(
            401,
            "the key is missing or wrong; send it as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _origin(self, scope: Scope, headers: dict[str, str]) -> ApiError | None:
        origin = headers.get("origin")
        if origin is None or scope["method"] in _READING:
            return None
        if urlsplit(origin).netloc == headers.get("host"):
            return None
        return ApiError(403, "requests from pages of another site are not accepted", code="foreign_origin")

    def _length(self, headers: dict[str, str]) -> ApiError | None:
        length = headers.get("content-length", "0")
        return self._too_large() if length.isdecimal() and int(length) > self.settings.max_body else None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is too large; accepted: at most {self.settings.max_body} bytes")
