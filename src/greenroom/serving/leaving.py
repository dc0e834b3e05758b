"""How a server ends: nothing new is taken, everybody is answered, and the process is gone within a limit.

Note [The engine goes first]
    uvicorn ends when the answers under way have been sent, and only then tells the app. Those answers wait for the
    engine, which would compute them to their end. So the engine is shut down before, while the server still listens:
    what runs is given up at its next step, each client is told so, and whoever comes meanwhile gets a 503.

Note [Ending after all]
    A step, an encoder or a driver may hang where no thread can be interrupted. `run` therefore has the process ended
    from outside of all that when `shutdown_timeout` is over, and at once when a second signal comes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from types import FrameType
from typing import Any

import uvicorn

from greenroom.serving.context import Context

SIGNALS = (signal.SIGINT, signal.SIGTERM)

log = logging.getLogger("greenroom.serving")


class Server(uvicorn.Server):
    """uvicorn's server, which shuts the engine down before it waits for answers.

    Args:
        config: of an app that `create_app` made.
        alone: the process is this server's, and ends with it whatever hangs.
    """

    def __init__(self, config: uvicorn.Config, *, alone: bool = False) -> None:
        super().__init__(config)
        self._app: Any = config.app
        self._alone = alone

    @property
    def context(self) -> Context:
        found: Context = self._app.state.context
        return found

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal; uvicorn's own would raise it once more in the end, and so end the process too early."""
        if self.should_exit:
            self.end_at_once(sig)
        self.context.close_doors()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Gives up all requests, has them answered, and ends; see Note [The engine goes first]."""
        self.context.close_doors()
        if self._alone:
            watchdog = threading.Timer(self.context.time_left, self.end_late)
            watchdog.daemon = True
            watchdog.start()
        await self.context.leave()
        self.config.timeout_graceful_shutdown = max(1, int(self.context.time_left) - 1)
        await super().shutdown(sockets)

    def end_at_once(self, sig: int, frame: FrameType | None = None) -> None:
        """Ends the process without waiting for anybody; only what lies on the disk is cleaned up."""
        self._end(128 + sig)

    def end_late(self) -> None:
        """Ends the process where the running step did not: it cannot be interrupted."""
        log.warning("the running step did not end in time; leaving without it")
        self._end(1)

    def _end(self, status: int) -> None:
        self._app.state.store.delete_files()
        with contextlib.suppress(RuntimeError):  # the signal came in the middle of a line
            sys.stdout.flush()
        os._exit(status)
