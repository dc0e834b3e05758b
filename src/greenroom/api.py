"""offload(pipeline, config): the one call for people who hold a pipeline already."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from greenroom.accelerator import Accelerator
from greenroom.config import OffloadConfig, Strategy, parse_config
from greenroom.errors import OffloadError
from greenroom.handle import Handle, release
from greenroom.strategies import auto, layerwise, model_level
from greenroom.strategies.runtime import Runtime
from greenroom.topology import ResolvedPlan, merged, require_single_process, resolve

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
    unknown = set(legacy) - set(inspect.signature(parse_config).parameters)
    if unknown:
        raise TypeError(f"offload() got an unexpected keyword argument {min(unknown)!r}")
    parsed = parse_config(config, memory=memory, **legacy)
    accelerator = Accelerator.of(device)
    require_single_process(parsed)
    plan = resolve(pipeline, parsed)
    current = _owners(plan)
    if len(current) == 1 and current[0].config == parsed and current[0].accelerator.device == accelerator.device:
        runtime = current[0]
        if all(_OWNERS.get(c.module) is runtime for c in plan.components):
            runtime.serve(pipeline)
            return Handle(pipeline, runtime, parsed, renew)
    return _offload(pipeline, parsed, accelerator, current)


def renew(pipeline: Any, runtime: Runtime) -> Handle:
    """Offloads anew, with the same words, what `runtime` offloads, as `pipeline` and those beside it are now.

    Raises:
        OffloadError: a call is running.
    """
    return _offload(pipeline, runtime.config, runtime.accelerator, [runtime])


def _offload(pipeline: Any, config: OffloadConfig, accelerator: Accelerator, current: list[Runtime]) -> Handle:
    pipelines = _with_sharing(pipeline, current)
    _resolve_all(pipelines, config)  # refuses before anything is touched
    for runtime in current:
        with runtime.occupancy.lock:
            if runtime.occupancy.busy():
                raise OffloadError("offload() was called from inside a component; call it between two calls")
            release(pipeline, runtime)
    plan = _resolve_all(pipelines, config)
    runtime = _enable(accelerator, config, plan)
    for component in plan.components:
        _OWNERS[component.module] = runtime
    for each in pipelines:
        runtime.serve(each)
    return Handle(pipeline, runtime, config, renew)


def _owners(plan: ResolvedPlan) -> list[Runtime]:
    """The offloads that hold components of `plan` now."""
    found = [_OWNERS.get(c.module) for c in plan.components]
    return list({id(r): r for r in found if r is not None and r.enabled}.values())


def _with_sharing(pipeline: Any, current: list[Runtime]) -> list[Any]:
    """The pipeline, and those that lost their offload if it alone were offloaded anew."""
    others = [reference() for runtime in current for reference in runtime.pipelines]
    return [pipeline, *(p for p in others if p is not None and p is not pipeline)]


def _resolve_all(pipelines: list[Any], config: OffloadConfig) -> ResolvedPlan:
    """One plan for pipelines that share components; a component that only one has keeps its name if it is free."""
    plan = resolve(pipelines[0], config)
    components = list(plan.components)
    for pipeline in pipelines[1:]:
        for component in resolve(pipeline, config).components:
            if any(component.module is c.module for c in components):
                continue
            names = {c.name for c in components}
            name = component.name if component.name not in names else f"{component.name} of {type(pipeline).__name__}"
            if name in names:
                name = f"{name} ({len(names)})"
            group = name if component.group == component.name else component.group
            components.append(replace(component, name=name, group=group))
    return merged(plan, components)


def _enable(accelerator: Accelerator, config: OffloadConfig, plan: ResolvedPlan) -> Runtime:
    if config.memory_budget is not None or config.strategy is Strategy.AUTO:
        return auto.enable(accelerator, config, plan)
    if config.strategy is Strategy.MODEL_LEVEL:
        return model_level.enable(accelerator, config, plan)
    # In a group of one rank the distributed strategy has nothing to gather and is the layerwise one.
    return layerwise.enable(accelerator, config, plan)
