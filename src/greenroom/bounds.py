"""What the numbers of a generation may be: the same for the command line, `Omni` and the server."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

from greenroom.errors import ConfigError

MAX_SEED = 2**63 - 1
MAX_PIXELS = 2**16
MAX_SCALE = 1000.0
# Beyond what anybody waits for. Schedulers make tables of as many rows as steps before the first of them.
MAX_STEPS = 100_000
MAX_COUNT = 100_000

# Name -> least and most.
WHOLE: Mapping[str, tuple[int, int]] = {
    "height": (1, MAX_PIXELS),
    "width": (1, MAX_PIXELS),
    "num_frames": (1, MAX_COUNT),
    "num_inference_steps": (1, MAX_STEPS),
    "max_sequence_length": (1, MAX_COUNT),
    "num_outputs_per_prompt": (1, MAX_COUNT),
    "seed": (0, MAX_SEED),
}
REAL: Mapping[str, tuple[float, float]] = {
    "guidance_scale": (0.0, MAX_SCALE),
    "guidance_scale_2": (0.0, MAX_SCALE),
    "true_cfg_scale": (0.0, MAX_SCALE),
    "strength": (0.0, 1.0),
}


def check_numbers(words: Mapping[str, Any], grain: int | None = None, frame_grain: int = 1) -> None:
    """Refuses numbers that no pipeline makes sense of.

    Args:
        words: parameters by the names of a pipeline's call; None and names that are not known here pass.
        grain: height and width must be multiples of this many pixels; None where the pipeline is not known yet.
        frame_grain: `num_frames` must be one more than a multiple of this.

    Raises:
        ConfigError: naming the field, the value and what is accepted.
    """
    for name, value in words.items():
        if value is None:
            continue
        if name in WHOLE:
            _whole(name, value, *WHOLE[name])
            if grain is not None and name in ("height", "width") and value % grain:
                below = value - value % grain
                near = f"{below} or {below + grain}" if below else str(grain)
                raise ConfigError(name, value, f"multiples of {grain} for this model, such as {near}")
            if name == "num_frames" and (value - 1) % frame_grain:
                below = value - (value - 1) % frame_grain
                accepted = f"1 more than a multiple of {frame_grain} for this model"
                raise ConfigError(name, value, f"{accepted}, such as {below} or {below + frame_grain}")
        elif name in REAL:
            _real(name, value, *REAL[name])


def _whole(name: str, value: Any, least: int, most: int) -> None:
    # A truth value is a number to Python and a mistake here. NumPy's numbers are numbers.
    good = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not good or not least <= value <= most:
        shown = "2**63 - 1" if most == MAX_SEED else most
        raise ConfigError(name, value, f"a whole number from {least} to {shown}")


def _real(name: str, value: Any, least: float, most: float) -> None:
    good = isinstance(value, numbers.Real) and not isinstance(value, bool)
    # No comparison with NaN holds, so it is refused here too.
    if not good or not least <= value <= most:
        raise ConfigError(name, value, f"a number from {least:g} to {most:g}")
