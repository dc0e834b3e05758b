"""Messages between the front and a rank, and the thread that sends them.

Note [Nobody waits for a rank that does not read]
    A stopped process leaves its pipe full. Messages are therefore sent by a thread of their own, and whoever has
    something to say only puts it into a queue. Values are pickled as bytes; torch's own way of passing tensors
    between processes would leave files in /dev/shm.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from greenroom.engine.errors import RequestRefused
from greenroom.engine.facts import ModelFacts
from greenroom.engine.figures import Figures
from greenroom.engine.job import OmniResult, Request
from greenroom.loading import LoadReport

BEAT = 1.0
"""Seconds between two signs of life of a rank."""

# ---------------------------------------------------------------------- from the front


@dataclass(frozen=True)
class Begin:
    """The first message: what to load, and with which words. `words` are those of `Omni`."""

    model: Any
    words: Mapping[str, Any]


@dataclass(frozen=True)
class Submit:
    """A request, pickled by itself; of ranks that compute it together, one is asked for the result.

    Note [What cannot be sent concerns one request]
        Whatever a caller puts into a request may be of a kind that cannot be pickled here, or not be read there. It is
        therefore packed and unpacked apart from the messages, which always can.
    """

    request_id: str
    request: bytes
    with_result: bool


@dataclass(frozen=True)
class Cancel:
    request_id: str
    reason: str


@dataclass(frozen=True)
class Ask:
    """Has a method of the engine called; the answer carries the same number."""

    number: int
    what: str
    words: Mapping[str, Any]


@dataclass(frozen=True)
class Stop:
    """Ends the rank, which gives up what it runs; the time is that of `Omni.shutdown`."""

    timeout_s: float | None


# ---------------------------------------------------------------------- from a rank


@dataclass(frozen=True)
class Ready:
    """The model is loaded and in place."""

    model: str
    facts: ModelFacts
    inputs: Mapping[str | None, tuple[str, ...] | None]
    device: str
    load_report: LoadReport | None
    gathers: bool
    figures: Figures


@dataclass(frozen=True)
class NotStarted:
    error: BaseException


@dataclass(frozen=True)
class Progress:
    request_id: str
    changes: Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    request_id: str
    result: OmniResult | None
    error: BaseException | None


@dataclass(frozen=True)
class Answer:
    number: int
    value: Any
    error: BaseException | None


@dataclass(frozen=True)
class Beat:
    """A sign of life, told once a second whatever the rank does."""


@dataclass(frozen=True)
class Dying:
    """The worker of the rank has ended; its process follows."""

    cause: str


class Wire:
    """One end of a connection. `send` returns at once; `receive` waits."""

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection = connection
        self._out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, name=f"{name}-sender", daemon=True)
        self._sender.start()

    def send(self, message: Any) -> None:
        """Queues a message. One that cannot be delivered is dropped: whoever reads learns that the peer is gone."""
        self._out.put(pickle.dumps(message, protocol=5))

    def receive(self) -> Any:
        """The next message.

        Raises:
            EOFError: the peer is gone.
        """
        try:
            return pickle.loads(self._connection.recv_bytes())
        except OSError as error:
            raise EOFError(str(error)) from None

    def flush(self, timeout_s: float) -> None:
        """Waits until what was queued is on its way; nothing can be sent afterwards."""
        self._out.put(None)
        self._sender.join(timeout_s)

    def cut(self) -> None:
        """Ends the connection for both sides; whoever waits in `receive` gets EOFError."""
        self._out.put(None)
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as ours:
            ours.shutdown(socket.SHUT_RDWR)

    def _send_all(self) -> None:
        # Closing is left to the garbage collector: the reader may be in the middle of a call.
        with contextlib.suppress(OSError, ValueError):
            while (data := self._out.get()) is not None:
                self._connection.send_bytes(data)


def packed(request: Request) -> bytes:
    """A request as bytes.

    Raises:
        RequestRefused: something in it exists in this process only.
    """
    try:
        return pickle.dumps(request, protocol=5)
    except Exception as error:  # whatever its parts say
        raise RequestRefused(None, f"the request holds something that cannot be sent to a rank: {error}") from None


def unpacked(data: bytes) -> Request:
    """The request again.

    Raises:
        RequestRefused: something in it is of a kind that this process does not know.
    """
    try:
        request: Request = pickle.loads(data)
    except Exception as error:  # whatever its parts say
        raise RequestRefused(None, f"the request holds something that a rank cannot read: {error}") from None
    return request


def portable(error: BaseException) -> BaseException:
    """The error where it survives being pickled, else one that says the same."""
    with contextlib.suppress(Exception):
        copy = pickle.loads(pickle.dumps(error, protocol=5))
        if type(copy) is type(error) and str(copy) == str(error):
            return error
    return RuntimeError(f"{type(error).__name__}: {error}")
