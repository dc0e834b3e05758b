"""The words with which an engine is made, `Omni` and `OmniRanks` alike."""

from __future__ import annotations

import difflib
import inspect
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
        ConfigError: a word for offloading is not accepted, or more than one rank is to share each matrix.
        TypeError: a word is neither for offloading nor for loading.
    """
    config, budget = words.get("diffusion_offload_config"), words.get("memory_budget")
    flags = {k: v for k, v in words.items() if k not in (*_NO_FLAGS, *LOADING)}
    for name in flags:
        if name not in _FLAGS:
            raise _unknown(name)
    ranks = words.get("tensor_parallel_size", 1)
    if type(ranks) is not int or ranks != 1:
        raise ConfigError(
            "tensor_parallel_size",
            ranks,
            "1",
            "matrices are not split over ranks; usp has several ranks compute each request together, and "
            "data_parallel_size has them share one copy of the weights",
        )
    if budget is not None:
        Memory.parse(budget, "memory_budget")  # which calls it `memory`
    parsed = parse_config(config, memory=budget, **flags)
    said = config is not None or budget is not None
    return parsed if said or any(v for k, v in flags.items() if k.startswith("enable_")) else None


_FLAGS = tuple(n for n in inspect.signature(parse_config).parameters if n not in ("config", "memory"))
_NO_FLAGS = ("diffusion_offload_config", "memory_budget", "tensor_parallel_size")
_PLACES = ("model", "device", "dtype", "max_queue", "data_parallel_size", "usp")


def _unknown(name: str) -> TypeError:
    accepted = (*_PLACES, *_NO_FLAGS, *LOADING, *_FLAGS)
    near = difflib.get_close_matches(name, accepted, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return TypeError(f"unexpected keyword argument {name!r}{hint}; accepted: {', '.join(accepted)}")


def with_budget(config: OffloadConfig | None, memory_budget: int | float | str) -> OffloadConfig:
    """The configuration of an engine with another budget.

    Raises:
        ConfigError: not an amount of memory, or there is nothing that is offloaded.
    """
    budget = Memory.parse(memory_budget, "memory_budget")
    if config is None:
        raise ConfigError("memory_budget", memory_budget, "nothing: this pipeline is not offloaded")
    return config.with_budget(budget)
