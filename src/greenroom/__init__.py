"""Greenroom: CPU offloading for diffusion models. One call, exact to the bit, as fast as the bus allows.

In a theatre the green room is where performers wait until their cue; here host memory is where weights wait.

    handle = greenroom.offload(pipe, {"mode": "layer", "components": ["dit", "text_encoder"]})
"""

from typing import TYPE_CHECKING, Any

from greenroom.api import offload
from greenroom.config import LayerOptions, OffloadConfig
from greenroom.declare import OffloadPlan, SupportsComponentDiscovery
from greenroom.errors import ConfigError, GreenroomError, NotSupportedError, OffloadError, TopologyError
from greenroom.handle import ComponentReport, Handle, Report

if TYPE_CHECKING:
    from greenroom.engine import Omni, OmniDiffusionSamplingParams, OmniRanks

__version__ = "0.1.0"

__all__ = [
    "ComponentReport",
    "ConfigError",
    "GreenroomError",
    "Handle",
    "LayerOptions",
    "NotSupportedError",
    "OffloadConfig",
    "OffloadError",
    "OffloadPlan",
    "Omni",
    "OmniDiffusionSamplingParams",
    "OmniRanks",
    "Report",
    "SupportsComponentDiscovery",
    "TopologyError",
    "offload",
]

# For those who hold a pipeline already, `import greenroom` stays as light as the offload itself.
_ON_DEMAND = {
    "Omni": "greenroom.engine",
    "OmniDiffusionSamplingParams": "greenroom.engine",
    "OmniRanks": "greenroom.engine",
}


def __getattr__(name: str) -> Any:
    if name in _ON_DEMAND:
        import importlib

        return getattr(importlib.import_module(_ON_DEMAND[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
