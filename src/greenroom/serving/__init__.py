"""The server: OpenAI's interface for pictures and videos, one engine behind it.

Needs `pip install "greenroom[serve]"`.
"""

from __future__ import annotations

from greenroom.serving.settings import ServerSettings

try:
    from greenroom.serving.app import create_app
except ImportError as error:
    if error.name is not None and error.name.startswith("greenroom"):
        raise
    raise ImportError(
        f"the server needs packages that are not installed ({error.name}): pip install 'greenroom[serve]'",
        name=error.name,
    ) from error

__all__ = ["ServerSettings", "create_app"]
