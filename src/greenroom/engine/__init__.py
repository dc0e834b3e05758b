"""The engine: a checkpoint and one worker that owns the device.

from greenroom import Omni
"""

from greenroom.engine.errors import DoesNotFit, QueueFull, RequestCancelled, RequestRefused, WorkerDied
from greenroom.engine.job import Job, OmniMetrics, OmniResult, Request
from greenroom.engine.omni import EngineStatus, Omni
from greenroom.engine.sampling import OmniDiffusionSamplingParams, pipeline_parameters

__all__ = [
    "DoesNotFit",
    "EngineStatus",
    "Job",
    "Omni",
    "OmniDiffusionSamplingParams",
    "OmniMetrics",
    "OmniResult",
    "QueueFull",
    "Request",
    "RequestCancelled",
    "RequestRefused",
    "WorkerDied",
    "pipeline_parameters",
]
