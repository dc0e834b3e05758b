"""offload(pipeline, config): the one call for people who hold a pipeline already."""

from __future__ import annotations

import contextlib
import inspect
import re
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from greenroom.accelerator import Accelerator
from greenroom.config import OffloadConfig, Strategy, parse_config
from greenroom.distributed.errors import RanksError
from greenroom.distributed.ranks import Ranks, gather_ranks, tell_failure
from greenroom.errors import GreenroomError, OffloadError
from greenroom.handle import Handle, memory_as_given, release, require_between_calls
from greenroom.strategies import auto, layerwise, model_level, sharing
from greenroom.strategies.draft import Draft
from greenroom.strategies.earlier import Earlier
from greenroom.strategies.runtime import Runtime
from greenroom.topology import ResolvedPlan, merged, resolve

# Words that ask for ranks to share; looked for in what was refused.
_SHARES = re.compile("allgather|layer_options|distributed")
# Which offload owns a module. A runtime holds no module, so this keeps nothing alive.
_OWNERS: weakref.WeakKeyDictionary[nn.Module, Runtime] = weakref.WeakKeyDictionary()


def offload(
    pipeline: Any,
    config: Mapping[str, Any] | OffloadConfig | str | None = None,
    *,
    memory: int | float | str | None = None,
    device: str | torch.device | None = None,
    group: Any = None,
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
        group: the process group whose ranks share the weights, where layer options ask for that; None means all
            ranks that torch.distributed has. Every rank of it has to make this call.
        **legacy: `enable_cpu_offload`, `enable_layerwise_offload`, `enable_distributed_layerwise_offload` and their
            options.

    Returns:
        A handle with `report()` and `disable()`.

    Raises:
        ConfigError: a word of the configuration is not accepted.
        TopologyError: the pipeline does not hold what was asked for.
        NotSupportedError: the combination is not built.
        OffloadError: the device is not there, or a call of the pipeline is running.
        RanksError: the ranks do not agree, or one of them failed or did not come; raised on all of them.
        torch.OutOfMemoryError: what has to stay on the device does not fit.

    After any of these the pipeline is as it was. Where it was offloaded already, what is refused leaves that offload
    alone; where enabling itself failed, the earlier offload is enabled anew, and its handles go on. If that fails as
    well, or ranks share its weights, OffloadError (RanksError) says so: the pipeline is whole and not offloaded.
    """
    unknown = set(legacy) - set(inspect.signature(parse_config).parameters)
    if unknown:
        raise TypeError(f"offload() got an unexpected keyword argument {min(unknown)!r}")
    try:
        parsed = parse_config(config, memory=memory, **legacy)
        accelerator = Accelerator.of(device)
    except GreenroomError as error:
        if _SHARES.search(f"{config} {legacy}"):
            tell_failure(error, group)  # to ranks whose words were accepted
        raise
    ranks = gather_ranks(accelerator.device, group) if sharing.wanted(parsed) else None
    with _in_unison(ranks):
        plan = resolve(pipeline, parsed)
        current = _owners(plan)
        same = len(current) == 1 and current[0].config == parsed and current[0].accelerator.device == accelerator.device
        same = same and all(_OWNERS.get(c.module) is current[0] for c in plan.components)
        same = same and not current[0].leaving and (current[0].sharing is None or current[0].sharing.whole)
        if ranks is not None:
            same = all(ranks.meeting.answer("offloaded like this already", same))
        if same:
            current[0].serve(pipeline)
            return Handle(pipeline, current[0], parsed, renew)
        return _offload(pipeline, parsed, accelerator, current, ranks, call="offload()")


@contextlib.contextmanager
def _in_unison(ranks: Ranks | None) -> Iterator[None]:
    """Lets an error on this rank be one on the others too, which would wait for it."""
    try:
        yield
    except BaseException as error:
        if ranks is not None:
            ranks.meeting.fail(error)
        raise


def renew(pipeline: Any, runtime: Runtime) -> Handle:
    """Offloads anew, with the same words, what `runtime` offloads, as `pipeline` and those beside it are now.

    Raises:
        OffloadError: a call is running, or neither this nor the offload as it was can be enabled.
        RanksError: the ranks that share the weights do not all call it.
    """
    old = runtime.sharing
    ranks = None if old is None else gather_ranks(runtime.accelerator.device, old.ranks.group)
    with _in_unison(ranks):
        handle = _offload(pipeline, runtime.config, runtime.accelerator, [runtime], ranks, call="rescan()")
        if runtime.memory_since is not None:
            handle.set_memory(*runtime.memory_since)
        return handle


def _offload(
    pipeline: Any,
    config: OffloadConfig,
    accelerator: Accelerator,
    current: list[Runtime],
    ranks: Ranks | None,
    *,
    call: str,
) -> Handle:
    pipelines = _with_sharing(pipeline, current)
    plan = _resolve_all(pipelines, config)
    with memory_as_given(config.memory_budget):
        _require_possible(accelerator, config, plan, current, ranks)
    for runtime in current:  # all of them, before the first is undone
        with runtime.occupancy.lock:
            require_between_calls(runtime, call)
            runtime.require_room()
    if ranks is not None:
        ranks.meeting.answer("nothing is refused", True)
    earlier = [Earlier(runtime) for runtime in current]
    try:
        for runtime in current:
            with runtime.occupancy.lock:
                require_between_calls(runtime, call)
                release(pipeline, runtime)
        # What an earlier offload gave back may be elsewhere, or be other tensors, by now.
        runtime = _install(pipelines, config, accelerator, ranks, None if current else plan)
    except BaseException as error:
        if ranks is not None:
            ranks.meeting.fail(error)  # first: they wait for this rank
        for each in earlier:
            _enable_again(each, error, call)
        raise
    return Handle(pipeline, runtime, config, renew)


def _install(
    pipelines: list[Any],
    config: OffloadConfig,
    accelerator: Accelerator,
    ranks: Ranks | None = None,
    plan: ResolvedPlan | None = None,
) -> Runtime:
    """Enables one offload for pipelines that share components and have none; `plan` is theirs, where it is known."""
    plan = plan or _resolve_all(pipelines, config)
    with memory_as_given(config.memory_budget):
        runtime = _enable(accelerator, config, plan, ranks)
    for component in plan.components:
        _OWNERS[component.module] = runtime
    for each in pipelines:
        runtime.serve(each)
    return runtime


def _enable_again(earlier: Earlier, error: BaseException, call: str) -> None:
    """Enables an offload anew that was undone for one which then could not be enabled, for `error`.

    Raises:
        OffloadError: it cannot be enabled either; the pipeline is whole, and not offloaded.
    """
    if not earlier.undone:
        return
    try:
        earlier.finish()
        earlier.require_own()
        earlier.take_up(_install(earlier.pipelines, earlier.config, earlier.accelerator))
    except Exception as again:
        kind = RanksError if isinstance(error, RanksError) else OffloadError
        raise kind(
            f"{call} failed ({error}), and the earlier offload could not be enabled again ({again}): the pipeline "
            "is whole and not offloaded; call greenroom.offload again"
        ) from error


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


def _require_possible(
    accelerator: Accelerator, config: OffloadConfig, plan: ResolvedPlan, current: list[Runtime], ranks: Ranks | None
) -> None:
    """Refuses what is known beforehand to fail: while nothing was touched, nothing has to be put back.

    Raises:
        ConfigError: the budget or the residents.
        NotSupportedError: tensors that cannot be moved.
    """
    held = sum(r.device_bytes() for r in current if r.accelerator.device == accelerator.device)
    draft = Draft.of(accelerator, config, plan, held=held, ranks_share=ranks is not None)
    try:
        if config.keeps_budget:
            auto.require_possible(draft)
        elif config.strategy is not Strategy.MODEL_LEVEL:
            layerwise.require_possible(draft)
    finally:
        draft.discard()


def _enable(accelerator: Accelerator, config: OffloadConfig, plan: ResolvedPlan, ranks: Ranks | None) -> Runtime:
    # In a group of one rank there is nobody to share with, and the distributed strategy is the layerwise one.
    shared = None if ranks is None else sharing.Sharing(ranks, config, plan)
    if config.keeps_budget:
        return auto.enable(accelerator, config, plan, shared)
    if config.strategy is Strategy.MODEL_LEVEL:
        return model_level.enable(accelerator, config, plan)
    return layerwise.enable(accelerator, config, plan, shared)
