"""What can happen to a request."""

from __future__ import annotations

from greenroom.errors import GreenroomError


class RequestCancelled(GreenroomError):
    """The request was given up: by its caller, by a time limit or by a shutdown (`reason` says which)."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"the request was cancelled: {self.reason}"


class RequestRefused(GreenroomError, ValueError):
    """The pipeline does not accept the request. `field` names the parameter where it is known."""

    def __init__(self, field: str | None, message: str) -> None:
        super().__init__(field, message)
        self.field = field
        self.message = message

    def __str__(self) -> str:
        return self.message


class DoesNotFit(GreenroomError):
    """The device has too little memory for this request; the message says what has fitted so far."""


class QueueFull(GreenroomError):
    """As many requests as allowed are waiting. `retry_after`: seconds after which trying again makes sense."""

    def __init__(self, waiting: int, retry_after: int) -> None:
        super().__init__(waiting, retry_after)
        self.waiting = waiting
        self.retry_after = retry_after

    def __str__(self) -> str:
        return f"{self.waiting} requests are waiting already; try again in {self.retry_after} s"


class WorkerDied(GreenroomError, RuntimeError):
    """The worker that owns the device has ended; `Omni.restart()` starts a new one."""
