"""offload(pipeline, config): the one call for people who hold a pipeline already."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from greenroom.accelerator import Accelerator
from greenroom.config import OffloadConfig, Strategy, parse_config
from greenroom.errors import OffloadError
from greenroom.handle import Handle, release
from greenroom.strategies import auto, layerwise, model_level
from greenroom.strategies.runtime import Runtime
from greenroom.topology import ResolvedPlan, require_single_process, resolve

# Which offload owns a module. A runtime holds no module, so this keeps nothing alive.
_OWNERS: weakref.WeakKeyDictionary[nn.Module, Runtime] = weakref.WeakKeyDictionary()


def offload(
    pipeline: Any,
    config: Mapping[str, Any] | OffloadConfig | str | None = None,
    *,
    memory: int | float | str | None = None,
    device: str | torch.device | None = None,
    **legacy: Any,
) -> Handle:
    """Offloads a pipeline to host memory; from then on it is called as before, with the same results to the bit.

    Calling it again with another configuration switches: the old offload is undone first. With the same one it does
    nothing.

    Args:
        pipeline: a diffusers pipeline, or an object whose attributes are modules.
        config: `{"mode": "module" | "layer", "components": [...], "layer_options": {...}, "pin_memory": ...}`, the
            same as JSON, or an `OffloadConfig`.
        memory: device memory to use, such as "12GiB", bytes or "80%".
        device: where to compute; None means the accelerator that is present.
        **legacy: `enable_cpu_offload`, `enable_layerwise_offload`, `enable_distributed_layerwise_offload` and their
            options.

    Returns:
        A handle with `report()` and `disable()`.

    Raises:
        ConfigError: a word of the configuration is not accepted.
        TopologyError: the pipeline does not hold what was asked for.
        NotSupportedError: the combination is not built.
        OffloadError: the device is not there, or the pipeline is in use.
        torch.OutOfMemoryError: what has to stay on the device does not fit; the pipeline is as it was.
    """
    parsed = parse_config(config, memory=memory, **legacy)
    accelerator = Accelerator.of(device)
    require_single_process(parsed)
    plan = resolve(pipeline, parsed)
    current = {id(r): r for c in plan.components if (r := _OWNERS.get(c.module)) is not None and r.enabled}
    for runtime in current.values():
        mine = getattr(pipeline, "__dict__", {}).get("_greenroom")
        same = runtime.config == parsed and runtime.accelerator.device == accelerator.device
        if same and mine is not None and mine() is runtime:
            return Handle(pipeline, runtime, parsed)
        with runtime.occupancy.lock:
            if runtime.occupancy.busy():
                raise OffloadError("offload() was called from inside a component; call it between two calls")
            release(pipeline, runtime)
    if current:
        plan = resolve(pipeline, parsed)
    runtime = _enable(accelerator, parsed, plan)
    for component in plan.components:
        _OWNERS[component.module] = runtime
    _watch_calls(pipeline, runtime)
    return Handle(pipeline, runtime, parsed)


def _enable(accelerator: Accelerator, config: OffloadConfig, plan: ResolvedPlan) -> Runtime:
    if config.memory_budget is not None or config.strategy is Strategy.AUTO:
        return auto.enable(accelerator, config, plan)
    if config.strategy is Strategy.MODEL_LEVEL:
        return model_level.enable(accelerator, config, plan)
    # In a group of one rank the distributed strategy has nothing to gather and is the layerwise one.
    return layerwise.enable(accelerator, config, plan)


def _watch_calls(pipeline: Any, runtime: Runtime) -> None:
    """Learns where a call of a diffusers pipeline ends: there it gives its components back."""
    if not hasattr(pipeline, "__dict__"):
        return
    pipeline.__dict__["_greenroom"] = weakref.ref(runtime)
    original = getattr(type(pipeline), "maybe_free_model_hooks", None)
    if original is None:
        return
    this = weakref.ref(pipeline)

    @functools.wraps(original)
    def maybe_free_model_hooks() -> Any:
        owner = this()
        result = original(owner) if owner is not None else None
        runtime.end_call()
        return result

    maybe_free_model_hooks.greenroom = True  # type: ignore[attr-defined]
    pipeline.__dict__["maybe_free_model_hooks"] = maybe_free_model_hooks
