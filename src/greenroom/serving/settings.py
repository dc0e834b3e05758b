"""What the server allows."""

from __future__ import annotations

import os
from dataclasses import dataclass

from greenroom.errors import ConfigError

KEY_VARIABLE = "GREENROOM_API_KEY"


def read_key(given: str | None) -> str | None:
    """The key that clients must send: what was given, else what the environment says; None for no check.

    Raises:
        ConfigError: it cannot be sent as a bearer token. One that is empty is most often a variable that is not set,
            and must not open the server to everybody.
    """
    field = "api_key" if given is not None else KEY_VARIABLE
    key = given if given is not None else os.environ.get(KEY_VARIABLE)
    if key is not None:
        _check_key(field, key)
    return key


def _check_key(field: str, key: str) -> None:
    accepted = "printable ASCII characters, without spaces at either end; leave it out for no check"
    if not key:
        raise ConfigError(field, key, accepted)
    if not (key.isascii() and key.isprintable() and key == key.strip()):
        # Logs are no place for keys, not even for wrong ones.
        raise ConfigError(field, f"{len(key)} characters", accepted)


@dataclass(frozen=True)
class ServerSettings:
    """Limits and identity of a server.

    Attributes:
        served_model_name: the name that clients see; None for the name that the model was loaded by.
        api_key: what clients must send as a bearer token, as `read_key` accepts it; None for no check.
        allowed_hosts: names, without ports, that requests may be addressed to; None for any. `run` fills it in where
            the server listens on the loopback interface and asks for no key.
        max_queue: most requests that wait; more get 429.
        max_pixels: most pixels of one picture or frame.
        max_frames: most frames of a video.
        max_steps: most denoising steps.
        max_outputs: most outputs of one request.
        max_prompt: most characters of a prompt.
        max_body: most bytes of a request's body.
        request_timeout: seconds from arrival until a request is given up.
        video_lifetime: seconds for which a finished video can be fetched.
        max_videos: most videos kept, running ones included.
        shutdown_timeout: seconds that running requests get when the server stops.
    """

    served_model_name: str | None = None
    api_key: str | None = None
    allowed_hosts: tuple[str, ...] | None = None
    max_queue: int = 32
    max_pixels: int = 2048 * 2048
    max_frames: int = 257
    max_steps: int = 200
    max_outputs: int = 8
    max_prompt: int = 8192
    max_body: int = 64 * 2**20
    request_timeout: float = 1800.0
    video_lifetime: float = 3600.0
    max_videos: int = 64
    shutdown_timeout: float = 20.0

    def __post_init__(self) -> None:
        if self.api_key is not None:
            _check_key("api_key", self.api_key)
