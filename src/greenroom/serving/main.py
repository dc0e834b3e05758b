"""Running the app: one process, one event loop, one worker.

Note [Nobody holds the interpreter for long]
    The event loop and the worker share an interpreter, and /health is answered as soon as the loop gets it. Kernels
    and codecs let go of it; three things would not. A thread that computes in Python keeps it for a switch interval,
    and the loop needs it several times for one answer: the interval is made short. A full garbage collection walks
    every object there is, for half a second with the libraries of a pipeline loaded: what is there at the start is
    taken out of its sight. Large answers are put into words in pieces, on another thread (`images.py`).
"""

from __future__ import annotations

import gc
import ipaddress
import signal
import socket
import sys
from dataclasses import replace

import uvicorn

from greenroom.engine import Engine
from greenroom.serving.app import create_app
from greenroom.serving.guards import LOOPBACK
from greenroom.serving.leaving import SIGNALS, Server
from greenroom.serving.settings import ServerSettings

LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
# Seconds; CPython's own is 5 ms.
_SWITCH_INTERVAL = 0.0005


def listen(host: str, port: int) -> socket.socket:
    """Takes an address; connections are refused until `run` serves it.

    Raises:
        OSError: the address is in use, or none of this machine's.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except BaseException:
        listener.close()
        raise
    return listener


def known_hosts(settings: ServerSettings, host: str) -> ServerSettings:
    """The same settings with names that requests may be addressed to; see Note [A name that leads here].

    Args:
        settings: `allowed_hosts` are names beside those of this machine; "*" is any.
        host: what the server listens on.
    """
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = all(ipaddress.ip_address(found[4][0]).is_loopback for found in socket.getaddrinfo(host, None))
    given = settings.allowed_hosts
    if "*" in (given or ()) or (given is None and not (local and settings.api_key is None)):
        return replace(settings, allowed_hosts=None)
    names = (*LOOPBACK, host, *(given or ()))
    return replace(settings, allowed_hosts=tuple(dict.fromkeys(names)))


def run(
    omni: Engine,
    settings: ServerSettings,
    listener: socket.socket,
    *,
    host: str | None = None,
    log_level: str = "info",
) -> None:
    """Serves until SIGINT or SIGTERM. Requests are given up then; a second signal ends the process at once.

    Whatever hangs, it is over `settings.shutdown_timeout` seconds after the signal.

    Args:
        omni: the engine.
        settings: what is allowed.
        listener: where to serve, from `listen`.
        host: the name that the listener's address was given by; None for the address itself.
        log_level: one of `LOG_LEVELS`.
    """
    settings = known_hosts(settings, host or listener.getsockname()[0])
    yield_often()
    server = make_server(omni, settings, log_level=log_level, alone=True)
    # For a signal that comes when uvicorn listens to none any more.
    for number in SIGNALS:
        signal.signal(number, server.end_at_once)
    try:
        server.run(sockets=[listener])
    finally:
        listener.close()
        if not omni.shutdown(timeout_s=server.context.time_left):
            server.end_late()


def yield_often() -> None:
    """Sets this process up so that no thread keeps the interpreter for long; call it when everything is loaded."""
    sys.setswitchinterval(_SWITCH_INTERVAL)
    gc.collect()
    gc.freeze()


def make_server(omni: Engine, settings: ServerSettings, *, log_level: str = "info", alone: bool = False) -> Server:
    """A uvicorn server around the app, for callers that run it themselves.

    Args:
        omni: the engine.
        settings: what is allowed.
        log_level: one of `LOG_LEVELS`.
        alone: the process ends with this server, whatever hangs.
    """
    config = uvicorn.Config(
        create_app(omni, settings),
        log_level=log_level,
        access_log=log_level in ("debug", "trace"),
        # Parsing in C is optional and not depended upon.
        ws="none",
        server_header=False,
    )
    return Server(config, alone=alone)
