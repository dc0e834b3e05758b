"""What the server allows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerSettings:
    """Limits and identity of a server.

    Attributes:
        served_model_name: the name that clients see; None for the name that the model was loaded by.
        api_key: what clients must send as a bearer token; None for no check.
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
