"""Greenroom: CPU offloading for diffusion models. One call, exact to the bit, as fast as the bus allows.

In a theatre the green room is where performers wait until their cue; here host memory is where weights wait.

    handle = greenroom.offload(pipe, {"mode": "layer", "components": ["dit", "text_encoder"]})
"""

from greenroom.api import offload
from greenroom.config import LayerOptions, OffloadConfig
from greenroom.declare import OffloadPlan, SupportsComponentDiscovery
from greenroom.errors import ConfigError, GreenroomError, NotSupportedError, OffloadError, TopologyError
from greenroom.handle import ComponentReport, Handle, Report

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
    "Report",
    "SupportsComponentDiscovery",
    "TopologyError",
    "offload",
]
