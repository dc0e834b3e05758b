"""Replicas of the server on one machine or many, behind Ray Serve. Needs `pip install "greenroom[serve,ray]"`.

    from ray import serve
    from greenroom.serving.ray import application

    serve.run(application("Qwen/Qwen-Image", num_replicas=2, num_gpus=1, enable_layerwise_offload=True))

Each replica is a whole server with a model of its own; Ray places it, sends it requests and replaces it when its
health is red. What one replica keeps, it keeps alone: its videos and what `/metrics` counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from greenroom.engine import start_engine
from greenroom.errors import ConfigError
from greenroom.serving.app import create_app
from greenroom.serving.settings import ServerSettings

try:
    from ray import serve
except ImportError as error:
    raise ImportError("Ray Serve is not installed: pip install 'greenroom[serve,ray]'", name=error.name) from error


class Replica:
    """One server in an actor of Ray's; its words are those of `start_engine`."""

    def __init__(self, model: str, settings: ServerSettings, words: Mapping[str, Any]) -> None:
        self._settings = settings
        self._engine = start_engine(model, **{"max_queue": settings.max_queue, **words})

    def __serve_build_asgi_app__(self) -> Any:
        return create_app(self._engine, self._settings)

    def check_health(self) -> None:
        """Raises where a worker is dead, which has Ray put another replica in the place of this one."""
        status = self._engine.status
        if not status.alive:
            raise RuntimeError(f"the engine is dead: {status.cause}")


def application(
    model: str,
    *,
    num_replicas: int = 1,
    num_gpus: float = 0,
    num_cpus: float = 1,
    settings: ServerSettings | None = None,
    deployment: Mapping[str, Any] | None = None,
    **words: Any,
) -> Any:
    """An application for `serve.run`, with the routes of `greenroom serve`.

    Args:
        model: a folder that every machine has under this name, or a hub id.
        num_replicas: servers with a model each.
        num_gpus: devices of one replica; as many as `data_parallel_size` and `usp`, where given, make ranks.
        num_cpus: processors of one replica.
        settings: limits; None for the defaults.
        deployment: further options of `serve.deployment`, such as `autoscaling_config`.
        **words: as for `start_engine`; `max_queue` is that of the settings where it is not among them.

    Raises:
        ConfigError: fewer devices than ranks.
    """
    ranks = words.get("data_parallel_size", 1) * words.get("usp", 1)
    if 0 < num_gpus < ranks:
        raise ConfigError("num_gpus", num_gpus, f"at least {ranks}, one for each rank")
    settings = settings or ServerSettings()
    options = {
        "name": "greenroom",
        "num_replicas": num_replicas,
        "ray_actor_options": {"num_cpus": num_cpus, "num_gpus": num_gpus},
        # A replica queues by itself and says 429 when its queue is full; Ray would let clients wait without a word.
        "max_ongoing_requests": settings.max_queue + ranks + 64,
        "health_check_period_s": 5,
        "graceful_shutdown_timeout_s": settings.shutdown_timeout,
        **(deployment or {}),
    }
    kind: Any = serve.ingress()(Replica)
    return serve.deployment(**options)(kind).bind(model, settings, words)


__all__ = ["Replica", "application"]
