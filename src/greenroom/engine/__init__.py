"""The engine: a checkpoint and one worker that owns the device.

from greenroom import Omni
"""

from typing import TypeAlias

from greenroom.engine.errors import DoesNotFit, QueueFull, RequestCancelled, RequestRefused, WorkerDied
from greenroom.engine.figures import Figures
from greenroom.engine.group import rank as world_rank
from greenroom.engine.job import Job, OmniMetrics, OmniResult, Request
from greenroom.engine.omni import Omni
from greenroom.engine.ranks.front import OmniRanks
from greenroom.engine.ranks.start import start_engine
from greenroom.engine.ranks.torchrun import serve_rank
from greenroom.engine.sampling import OmniDiffusionSamplingParams, pipeline_parameters
from greenroom.engine.status import EngineStatus, RankStatus

Engine: TypeAlias = Omni | OmniRanks
"""What serves requests: one process, or several behind one queue."""

__all__ = [
    "DoesNotFit",
    "Engine",
    "EngineStatus",
    "Figures",
    "Job",
    "Omni",
    "OmniDiffusionSamplingParams",
    "OmniMetrics",
    "OmniRanks",
    "OmniResult",
    "QueueFull",
    "RankStatus",
    "Request",
    "RequestCancelled",
    "RequestRefused",
    "WorkerDied",
    "pipeline_parameters",
    "serve_rank",
    "start_engine",
    "world_rank",
]
