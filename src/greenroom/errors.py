"""Every error Greenroom raises on purpose. Catch `GreenroomError` for all of them."""

from __future__ import annotations

_LONGEST_VALUE = 200


class GreenroomError(Exception):
    """Base of all errors raised by Greenroom itself."""


class ConfigError(GreenroomError, ValueError):
    """A word of the configuration, or of a model's declaration, that is not accepted.

    Attributes:
        field: the dotted name of the offending word, e.g. ``layer_options.dit.weight_transfer``.
        value: what was given.
        accepted: what would have been accepted, in words.
        hint: what was probably meant, or None.
    """

    def __init__(self, field: str, value: object, accepted: str, hint: str | None = None) -> None:
        # All four go to args, so that the error crosses process boundaries (pickle rebuilds it from args).
        super().__init__(field, value, accepted, hint)
        self.field = field
        self.value = value
        self.accepted = accepted
        self.hint = hint

    def __str__(self) -> str:
        shown = repr(self.value)
        if len(shown) > _LONGEST_VALUE:
            shown = shown[:_LONGEST_VALUE] + "..."
        message = f"{self.field} = {shown} is not accepted; accepted: {self.accepted}"
        return f"{message} ({self.hint})" if self.hint else message


class TopologyError(GreenroomError, ValueError):
    """The pipeline does not hold what was asked for, or holds it twice (a block with two owners, ...)."""


class NotSupportedError(GreenroomError, NotImplementedError):
    """A combination that is understood but not built. Raised before anything is touched."""


class BudgetExceeded(GreenroomError, MemoryError):
    """A call needs more device memory than the budget allows, with as little as possible of the weights beside it."""


class OffloadError(GreenroomError, RuntimeError):
    """Something went wrong while enabling, running or disabling an offload."""
