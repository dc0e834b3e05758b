"""What goes wrong between ranks."""

from __future__ import annotations

from greenroom.errors import OffloadError


class RanksError(OffloadError):
    """The ranks of an offload do not agree, or one of them failed, is gone or did not answer in time.

    Raised on every rank that notices, within `Ranks.timeout` seconds.
    """
