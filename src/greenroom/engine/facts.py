"""What there is to know about a pipeline without holding it: enough to check a request before it waits."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from greenroom.frozen import FrozenDict
from greenroom.grain import frame_grain_of, grain_of


@dataclass(frozen=True)
class ModelFacts:
    """A pipeline, told.

    Attributes:
        pipeline: the name of its class.
        grain: height and width must be multiples of this many pixels, as `grain_of` tells it without arguments.
        frame_grain: numbers of frames must be one more than a multiple of this.
        makes_videos: whether it makes videos rather than pictures.
        recommended: call arguments that the checkpoint recommends.
        defaults: whole numbers that the pipeline's call assumes for what nobody says.
    """

    pipeline: str
    grain: int
    frame_grain: int
    makes_videos: bool
    recommended: Mapping[str, Any]
    defaults: Mapping[str, int]

    def default(self, name: str) -> Any:
        """What stands for a parameter that is not given; None where that is left to the pipeline."""
        value = self.recommended.get(name)
        return self.defaults.get(name) if value is None else value


def draws_videos(kind: type) -> bool:
    """Whether pipelines of a class make videos rather than pictures."""
    call: Any = kind.__call__
    return "num_frames" in inspect.signature(call).parameters


def needed_components(kind: Any) -> tuple[str, ...]:
    """Components that pipelines of a class cannot go without to draw from a prompt."""
    if not hasattr(kind, "_get_signature_keys"):
        return ()
    required, _ = kind._get_signature_keys(kind)
    return tuple(sorted(set(required) - set(kind._optional_components)))


def facts_of(pipeline: Any, recommended: Mapping[str, Any]) -> ModelFacts:
    """The facts of a diffusers pipeline."""
    parameters = inspect.signature(type(pipeline).__call__).parameters
    defaults = {n: p.default for n, p in parameters.items() if type(p.default) is int}
    return ModelFacts(
        pipeline=type(pipeline).__name__,
        grain=grain_of(pipeline),
        frame_grain=frame_grain_of(pipeline),
        makes_videos=draws_videos(type(pipeline)),
        recommended=FrozenDict(recommended),
        defaults=FrozenDict(defaults),
    )
