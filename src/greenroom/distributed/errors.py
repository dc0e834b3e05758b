"""What goes wrong between ranks."""

from __future__ import annotations

import re

from greenroom.errors import OffloadError


class RanksError(OffloadError):
    """The ranks of an offload do not agree, or one of them failed, is gone or did not answer in time.

    Raised on every rank that notices, within `Ranks.timeout` seconds.
    """


def in_short(error: BaseException) -> str:
    """The first sentence of an error's message, without the place in the source that torch puts before it."""
    text = str(error).strip().split("\n")[0]
    return re.sub(r"^(\[[^]]*\]\s*)+", "", text).split(". ")[0] or type(error).__name__
