"""Sibling pipelines: the same weights behind another task, such as image-to-image beside text-to-image."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from greenroom.engine.errors import RequestRefused
from greenroom.engine.sampling import pipeline_parameters


class Siblings:
    """Finds the pipeline that takes given inputs. Siblings hold the very same modules, so they are offloaded too."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._made: dict[str, Any] = {}

    def taking(self, inputs: Iterable[str]) -> Any:
        """The pipeline itself where it takes these inputs, else its sibling that does.

        Raises:
            RequestRefused: there is none.
        """
        wanted = [name for name in ("image", "mask_image", "video") if name in inputs]
        if all(takes(self._pipeline, name) for name in wanted):
            return self._pipeline
        task = "inpainting" if "mask_image" in wanted else "image-to-image"
        if task not in self._made:
            self._made[task] = self._make(task)
        sibling = self._made[task]
        missing = next((n for n in wanted if sibling is None or not takes(sibling, n)), None)
        if missing is not None:
            field = "mask" if missing == "mask_image" else missing
            raise RequestRefused(
                field, f"{field}: {type(self._pipeline).__name__} draws from text and takes no {field}"
            )
        return sibling

    def parameters(self, name: str | None) -> tuple[str, ...] | None:
        """Parameters of the pipeline or sibling that takes an input of this name; None where there is none."""
        try:
            found = self.taking(() if name is None else (name,) if name != "mask_image" else ("image", name))
        except RequestRefused:
            return None
        return pipeline_parameters(found)

    def _make(self, task: str) -> Any:
        from diffusers import AutoPipelineForImage2Image, AutoPipelineForInpainting

        auto: Any = AutoPipelineForInpainting if task == "inpainting" else AutoPipelineForImage2Image
        try:
            return auto.from_pipe(self._pipeline)
        except (ValueError, TypeError):
            return None


def takes(pipeline: Any, name: str) -> bool:
    """Whether a pipeline's call has a parameter of this name."""
    return name in inspect.signature(type(pipeline).__call__).parameters
