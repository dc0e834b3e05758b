"""Running the app: one process, one event loop, one worker."""

from __future__ import annotations

import logging
import os
import socket
import sys

import uvicorn

from greenroom.engine import Engine
from greenroom.serving.app import create_app
from greenroom.serving.settings import ServerSettings

# Seconds after which a thread that computes lets another have the interpreter. The event loop needs it several times
# for one answer; at CPython's own 5 ms those waits would add up to what a health check must not take.
_SWITCH_INTERVAL = 0.0005


def run(
    omni: Engine, settings: ServerSettings, *, host: str = "127.0.0.1", port: int = 8000, log_level: str = "info"
) -> None:
    """Serves until SIGINT or SIGTERM; running requests then get `settings.shutdown_timeout` seconds.

    Raises:
        OSError: the address is in use.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL)
    server = make_server(omni, settings, host=host, port=port, log_level=log_level)
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        server.run(sockets=[listener])
    finally:
        listener.close()
        if not omni.shutdown(timeout_s=settings.shutdown_timeout):
            # A step that outlasts the limit cannot be interrupted, and must not keep the process either.
            logging.getLogger("greenroom.serving").warning("the running step did not end in time; leaving without it")
            logging.shutdown()
            os._exit(1)


def make_server(
    omni: Engine, settings: ServerSettings, *, host: str = "127.0.0.1", port: int = 8000, log_level: str = "info"
) -> uvicorn.Server:
    """A uvicorn server around the app, for callers that run it themselves."""
    config = uvicorn.Config(
        create_app(omni, settings),
        host=host,
        port=port,
        log_level=log_level,
        access_log=log_level in ("debug", "trace"),
        timeout_graceful_shutdown=max(1, int(settings.shutdown_timeout)),
        # Parsing in C is optional and not depended upon.
        ws="none",
        server_header=False,
    )
    return uvicorn.Server(config)
