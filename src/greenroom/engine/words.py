"""The words with which an engine is made, `Omni` and `OmniRanks` alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from greenroom.config import OffloadConfig, parse_config
from greenroom.errors import ConfigError
from greenroom.memory import Memory

LOADING = ("variant", "revision", "local_files_only", "trust_remote_code")
"""Those that say how to load a checkpoint."""


def configuration(words: Mapping[str, Any]) -> OffloadConfig | None:
    """What the words of an engine say about offloading, checked; None where they say nothing.

    Args:
        words: all but those that say where to compute and how many requests to take; those for loading pass.

    Raises:
        ConfigError: a word for offloading is not accepted.
        TypeError: a word is neither for offloading nor for loading.
    """
    config, budget = words.get("diffusion_offload_config"), words.get("memory_budget")
    flags = {k: v for k, v in words.items() if k not in ("diffusion_offload_config", "memory_budget", *LOADING)}
    if budget is not None:
        Memory.parse(budget, "memory_budget")  # which calls it `memory`
    parsed = parse_config(config, memory=budget, **flags)
    said = config is not None or budget is not None
    return parsed if said or any(v for k, v in flags.items() if k.startswith("enable_")) else None


def with_budget(config: OffloadConfig | None, memory_budget: int | float | str) -> OffloadConfig:
    """The configuration of an engine with another budget.

    Raises:
        ConfigError: not an amount of memory, or there is nothing that is offloaded.
    """
    budget = Memory.parse(memory_budget, "memory_budget")
    if config is None:
        raise ConfigError("memory_budget", memory_budget, "nothing: this pipeline is not offloaded")
    return config.with_budget(budget)
