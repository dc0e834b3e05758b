"""resolve(pipeline, config) -> ResolvedPlan: what is where in the pipeline, and what will happen to it.

Note [Validate, then touch]
    Resolving is pure: it reads the pipeline and changes nothing. Everything that Greenroom can refuse is refused
    here, in `config`, or of a draft (`strategies/draft.py`), before a tensor moves, a hook is set or an earlier
    offload is undone.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from greenroom import catalog, discovery
from greenroom.config import OffloadConfig, Strategy
from greenroom.declare import OffloadPlan, block_paths, blocks_attrs_of, component_lists_of, plan_of
from greenroom.errors import TopologyError
from greenroom.host import extent, module_tensors, movable, unique_bytes
from greenroom.memory import format_bytes

RESIDENT = "resident"
SWAP = "swap"
STREAM = "stream"

_WARNED: set[str] = set()


@dataclass(frozen=True)
class Block:
    """One streamed block: its dotted path from the component, the module, and its bytes."""

    path: str
    module: nn.Module
    nbytes: int


@dataclass(frozen=True)
class Component:
    """One module of the pipeline.

    Attributes:
        name: its dotted path from the pipeline.
        role: "dit", "text_encoder", "image_encoder", "vae", "companion" or "other".
        placement: "resident", "swap" (whole, in turns with others) or "stream" (block by block).
        group: components of one group may be on the device together when others are not.
        blocks: its blocks in execution order; empty where none are known.
        nbytes: bytes of all its parameters and buffers, shared ones once.
        hold: entry points, beside forward, for whose whole duration the component stays on the device.
        declared_by: where role and blocks come from: "plan", "lists", "class", "catalog" or "discovery".
        wrapper: what the pipeline holds instead of the module, where that is what `torch.compile(module)` returned.
    """

    name: str
    module: nn.Module
    role: str
    placement: str
    group: str
    blocks: tuple[Block, ...]
    nbytes: int
    hold: tuple[str, ...]
    declared_by: str
    wrapper: Any = None


@dataclass(frozen=True)
class ResolvedPlan:
    """The pipeline as Greenroom sees it, with a placement for every component.

    Attributes:
        strategy: the strategy that the configuration selects.
        components: every module of the pipeline once, in the order of the pipeline.
        shared: tensors that more than one component holds; they stay on the device.
    """

    strategy: Strategy
    components: tuple[Component, ...]
    shared: tuple[torch.Tensor, ...]


def resolve(pipeline: Any, config: OffloadConfig) -> ResolvedPlan:
    """Finds the components and blocks of `pipeline` and decides where each belongs.

    Raises:
        TopologyError: something asked for or declared is not there, a block has two owners, a tensor is on the meta
            device, or another library's offloading is active.
        NotSupportedError: the combination is understood and not built.
    """
    if config.chunk_size is not None:
        _warn_once(
            f"chunk_size (dlo_chunk_size_mb) = {config.chunk_size} bytes is accepted and changes nothing: a rank's "
            "share of a block is copied while another is gathered"
        )
    plan = plan_of(pipeline)
    modules = _modules(pipeline, plan)
    if not modules:
        raise TopologyError(
            f"pipeline: {type(pipeline).__name__} holds no torch.nn.Module; accepted: a diffusers pipeline, or an "
            "object whose attributes are modules"
        )
    for name, module in modules.items():
        _check_module(name, module)
    roles = _roles(pipeline, modules, plan)
    on_demand = set(plan.on_demand_component_paths) if plan else set()
    _check_selection(config, modules, roles)
    components = []
    owners: dict[int, str] = {}
    for name, module in modules.items():
        role, declared_by = roles[name]
        placement = RESIDENT if name in on_demand else _placement(role, config)
        blocks: tuple[Block, ...] = ()
        if role in (discovery.DIT, discovery.TEXT_ENCODER):
            paths, found_by = _blocks(name, module, role, plan)
            declared_by = found_by or declared_by
            blocks = _make_blocks(name, module, paths, owners)
        if placement == STREAM and not blocks:
            if config.components_explicit and role == discovery.DIT:
                raise TopologyError(
                    f"components: {role!r} was asked for and no blocks were found in {name} "
                    f"({type(module).__name__}); accepted: a model with {blocks_words()}"
                )
            _warn_once(
                f"{type(module).__name__}: no blocks were found in {name}, so it stays on the device; "
                f"declare them with {blocks_words()}"
            )
            placement = RESIDENT
        nbytes = unique_bytes(module_tensors(module))
        declaration = catalog.lookup(module)
        components.append(
            Component(
                name=name,
                module=module,
                role=role,
                placement=placement,
                group=_group(name, role),
                blocks=blocks,
                nbytes=nbytes,
                hold=tuple(declaration.hold) if declaration else (),
                declared_by=declared_by,
                wrapper=None if (held := _held(pipeline, name)) is module else held,
            )
        )
    return ResolvedPlan(config.strategy, tuple(components), tuple(_shared(components)))


def merged(plan: ResolvedPlan, components: list[Component]) -> ResolvedPlan:
    """The plan with other components, those of several pipelines."""
    return ResolvedPlan(plan.strategy, tuple(components), tuple(_shared(components)))


def blocks_words() -> str:
    return "`_layerwise_offload_blocks_attrs` on its class, or `block_attrs` in the pipeline's OffloadPlan"


# ---------------------------------------------------------------------- modules


def _modules(pipeline: Any, plan: OffloadPlan | None) -> dict[str, nn.Module]:
    """Name -> module, each module once, under the first name that it has."""
    candidates: list[tuple[str, Any]] = []
    lists = component_lists_of(pipeline)
    declared: list[str] = []
    if lists:
        declared += [*lists.dit, *lists.encoder, *lists.vae, *lists.resident]
    if plan:
        declared += [*plan.block_attrs, *plan.encoder_component_types, *plan.encoder_block_attrs]
        declared += [*plan.on_demand_component_paths]
    for path in dict.fromkeys(declared):
        found = _follow(pipeline, path)
        if found is None and path in _optional(pipeline):
            continue
        if not isinstance(found, nn.Module):
            raise TopologyError(
                f"{type(pipeline).__name__} declares {path!r}, which is {type(found).__name__}; accepted: the path "
                "of a torch.nn.Module"
            )
        candidates.append((path, found))
    components = getattr(pipeline, "components", None)
    if isinstance(components, dict):
        candidates += components.items()
    elif isinstance(pipeline, nn.Module):
        candidates += pipeline.named_children()
    else:
        candidates += [(k, v) for k, v in getattr(pipeline, "__dict__", {}).items() if not k.startswith("__")]
    modules: dict[str, nn.Module] = {}
    seen: dict[int, str] = {}
    for name, candidate in candidates:
        module = discovery.uncompiled(candidate)
        if not isinstance(module, nn.Module) and not isinstance(candidate, type):
            if callable(getattr(candidate, "parameters", None)):
                _warn_once(
                    f"{name} ({type(candidate).__name__}) has parameters and is not a torch.nn.Module, so it stays "
                    "where it is; hand over the module inside it"
                )
            continue
        if not isinstance(module, nn.Module) or id(module) in seen:
            continue
        inside = _ancestor(module, modules)
        if inside is not None:
            raise TopologyError(f"{name} lies inside {inside}, or holds it: a module has one owner")
        seen[id(module)] = name
        modules[name] = module
    return modules


def _ancestor(module: nn.Module, known: dict[str, nn.Module]) -> str | None:
    inner = {id(m) for m in module.modules()}
    for name, other in known.items():
        if id(other) in inner or any(m is module for m in other.modules()):
            return name
    return None


def _optional(pipeline: Any) -> set[str]:
    return set(getattr(pipeline, "_optional_components", ()))


def _held(pipeline: Any, name: str) -> Any:
    """What the pipeline holds under the name of a component."""
    parent, _, leaf = name.rpartition(".")
    return getattr(_follow(pipeline, parent) if parent else pipeline, leaf, None)


def _follow(root: Any, path: str) -> Any:
    for part in path.split("."):
        root = getattr(root, part, None)
    return discovery.uncompiled(root)


def _check_module(name: str, module: nn.Module) -> None:
    for tensor_name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.device.type == "meta":
            raise TopologyError(
                f"{name}.{tensor_name} is on the meta device and holds no values; accepted: a loaded pipeline"
            )
    hook = module.__dict__.get("_hf_hook")
    if hook is not None and getattr(hook, "greenroom", None) is None and _offloads(hook):
        raise TopologyError(
            f"{name} carries an offload hook of accelerate ({type(hook).__name__}), and one strategy owns a pipeline; "
            "call pipe.remove_all_hooks() first"
        )
    for child in module.modules():
        registry = child.__dict__.get("_diffusers_hook")
        if registry is not None and any("group_offloading" in key for key in getattr(registry, "hooks", {})):
            raise TopologyError(
                f"{name} is group-offloaded by diffusers, and one strategy owns a pipeline; load it without"
            )


def _offloads(hook: Any) -> bool:
    from accelerate.hooks import AlignDevicesHook, CpuOffload, SequentialHook

    if isinstance(hook, SequentialHook):
        return any(_offloads(h) for h in hook.hooks)
    return isinstance(hook, CpuOffload) or (isinstance(hook, AlignDevicesHook) and hook.offload)


# ---------------------------------------------------------------------- roles and placements


def _roles(pipeline: Any, modules: dict[str, nn.Module], plan: OffloadPlan | None) -> dict[str, tuple[str, str]]:
    roles: dict[str, tuple[str, str]] = {}
    lists = component_lists_of(pipeline)
    by_identity = {id(m): n for n, m in modules.items()}

    def declare(paths: Iterable[str], role: str | None, source: str) -> None:
        for path in paths:
            module = _follow(pipeline, path)
            name = by_identity.get(id(module))
            if name is not None and name not in roles:
                found = role
                if found is None:
                    known = discovery.role_of(module)
                    encoders = (discovery.TEXT_ENCODER, discovery.IMAGE_ENCODER)
                    found = known if known in encoders else discovery.TEXT_ENCODER
                roles[name] = (found, source)

    if plan:
        declare(plan.block_attrs, discovery.DIT, "plan")
        declare(plan.encoder_component_types, discovery.TEXT_ENCODER, "plan")
        declare(plan.encoder_block_attrs, discovery.TEXT_ENCODER, "plan")
    if lists:
        declare(lists.dit, discovery.DIT, "lists")
        declare(lists.encoder, None, "lists")
        declare(lists.vae, discovery.VAE, "lists")
        declare(lists.resident, discovery.OTHER, "lists")
    for name, module in modules.items():
        if name in roles:
            continue
        declaration = catalog.lookup(module)
        if declaration is not None and declaration.role != "resident":
            roles[name] = (declaration.role, "catalog")
        elif declaration is not None:
            # What stays on the device by blocks may still take turns as a whole: an image encoder does.
            roles[name] = (discovery.role_of(module), "catalog")
        elif blocks_attrs_of(module) is not None:
            roles[name] = (discovery.DIT, "class")
        else:
            role = discovery.role_of(module)
            roles[name] = (role, "discovery")
            if role == discovery.OTHER and unique_bytes(module_tensors(module)) > 0:
                _warn_once(
                    f"{type(module).__name__}: nothing is known about component {name} "
                    f"({format_bytes(unique_bytes(module_tensors(module)))}), so it stays on the device; name it in "
                    "_dit_modules, _encoder_modules, _vae_modules or _resident_modules of the pipeline"
                )
    return roles


def _check_selection(config: OffloadConfig, modules: dict[str, nn.Module], roles: dict[str, tuple[str, str]]) -> None:
    if not config.components_explicit:
        return
    present = {role for role, _ in roles.values()}
    for wanted in config.components:
        accepted = {wanted, discovery.IMAGE_ENCODER} if wanted == discovery.TEXT_ENCODER else {wanted}
        if config.mode == "layer":
            accepted = {wanted}
        if not accepted & present:
            raise TopologyError(
                f"components: {wanted!r} was asked for and the pipeline has none; it has "
                + ", ".join(f"{name} ({roles[name][0]})" for name in modules)
            )


def _placement(role: str, config: OffloadConfig) -> str:
    layer = config.strategy in (Strategy.LAYERWISE, Strategy.DISTRIBUTED_LAYERWISE)
    if role == discovery.IMAGE_ENCODER:
        return SWAP if not layer and discovery.TEXT_ENCODER in config.components else RESIDENT
    if role == discovery.COMPANION:
        return SWAP if not layer and discovery.DIT in config.components else RESIDENT
    if role not in config.components:
        return RESIDENT
    return STREAM if layer else SWAP


def _group(name: str, role: str) -> str:
    if role in (discovery.TEXT_ENCODER, discovery.IMAGE_ENCODER):
        return "encoders"
    if role == discovery.COMPANION:
        return discovery.COMPANION
    return "vae" if role == discovery.VAE else name


# ---------------------------------------------------------------------- blocks


def _blocks(name: str, module: nn.Module, role: str, plan: OffloadPlan | None) -> tuple[tuple[str, ...], str | None]:
    """Block paths and where they come from; nothing for a module without any."""
    if plan:
        containers = plan.block_attrs.get(name) or plan.encoder_block_attrs.get(name)
        nested = [
            f"{path[len(name) + 1 :]}.{container}" if path.startswith(f"{name}.") else f"{path}.{container}"
            for path, inner in plan.offload_submodules.items()
            for container in inner
            if path.startswith(f"{name}.") or (role == discovery.DIT and _follow(module, path) is not None)
        ]
        if containers or nested:
            own = containers or (blocks_attrs_of(module) if role == discovery.DIT else None) or ()
            return block_paths(module, (*own, *nested)), "plan"
    declared = blocks_attrs_of(module)
    if declared is not None:
        return block_paths(module, declared), "class"
    declaration = catalog.lookup(module)
    if declaration is not None and declaration.blocks:
        return block_paths(module, declaration.blocks), "catalog"
    return discovery.find_blocks(module), None


def _make_blocks(name: str, module: nn.Module, paths: tuple[str, ...], owners: dict[int, str]) -> tuple[Block, ...]:
    blocks = []
    for path in paths:
        block = module.get_submodule(path)
        full = f"{name}.{path}"
        for inner in block.modules():
            other = owners.setdefault(id(inner), full)
            if other != full and _has_tensors(inner):
                raise TopologyError(f"{full} and {other} share a module: a block has one owner")
        nbytes = unique_bytes(module_tensors(block))
        if nbytes:
            blocks.append(Block(path, block, nbytes))
    return tuple(blocks)


def _has_tensors(module: nn.Module) -> bool:
    return next(module_tensors(module), None) is not None


def _shared(components: list[Component]) -> Iterator[torch.Tensor]:
    """Tensors whose bytes more than one component holds."""
    first: dict[tuple[str, int], str] = {}
    for component in components:
        for tensor in module_tensors(component.module):
            if tensor.numel() == 0 or not movable(tensor):
                continue
            key = (str(tensor.device), tensor.untyped_storage().data_ptr() + extent(tensor)[0])
            if first.setdefault(key, component.name) != component.name:
                yield tensor


def _warn_once(message: str) -> None:
    if message not in _WARNED:
        _WARNED.add(message)
        warnings.warn(message, stacklevel=2)
