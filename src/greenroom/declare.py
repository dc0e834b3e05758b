"""What a model says about itself: plans, component lists and block containers, read and validated.

Notation of a block container
    A dotted path from a module. A path that ends at a ModuleList, Sequential or ModuleDict stands for its
    children, in order; one that ends at any other module stands for that one module as a block. Two
    extensions reach lists that lie deeper:

    ``*``
        every child of the container named so far, in order: ``down_blocks.*.resnets``;
    ``{a,b}``
        as the last part, several lists that forward walks in turns, one of each at a time:
        ``mid_block.{resnets,attentions}`` is resnets.0, attentions.0, resnets.1. A list that a child does not
        have is passed over.

    Containers are listed in execution order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Protocol, cast, runtime_checkable

from torch import nn

from greenroom.errors import ConfigError, TopologyError
from greenroom.frozen import FrozenDict

BLOCKS_ATTRS = "_layerwise_offload_blocks_attrs"
OLD_BLOCKS_ATTR = "_layerwise_offload_blocks_attr"
PLAN_ATTR = "_offload_plan"
ENCODER_TYPES = ("text_encoder",)

_PATH = re.compile(r"\w+(?:\.\w+)*")
_CONTAINER = re.compile(r"\w+(?:\.(?:\w+|\*))*(?:\.\{\w+(?:,\w+)+\})?")
_ACCEPTED_PATH = 'a dotted attribute path such as "transformer" or "model.language_model"'
_ACCEPTED_CONTAINER = 'a block container such as "transformer_blocks" or "down_blocks.*.{resnets,attentions}"'


@runtime_checkable
class SupportsComponentDiscovery(Protocol):
    """A pipeline that names its own components: lists of attribute names, dotted paths allowed."""

    _dit_modules: Sequence[str]
    _encoder_modules: Sequence[str]
    _vae_modules: Sequence[str]
    _resident_modules: Sequence[str]


@dataclass(frozen=True)
class ComponentLists:
    """The component lists of a pipeline, read and validated. Empty where the pipeline says nothing."""

    dit: tuple[str, ...] = ()
    encoder: tuple[str, ...] = ()
    vae: tuple[str, ...] = ()
    resident: tuple[str, ...] = ()


@dataclass(frozen=True)
class OffloadPlan:
    """What a pipeline declares in ``_offload_plan``. Immutable, hashable, picklable.

    All fields are optional; paths are dotted and start at the pipeline.

    Attributes:
        block_attrs: DiT path -> its block containers, in execution order; wins over the class attribute.
        encoder_component_types: encoder path -> "text_encoder". Asked before any name is guessed.
        encoder_block_attrs: encoder path -> its block containers:
            ``{"prompt_model": ("encoder.layers",)}``.
        offload_submodules: path of a child of a DiT -> the child's own block containers.
        resident_dit_paths: the DiTs that ``resident_layers`` applies to; None for all of them.
        encoder_dlo_weight_replication: encoders whose weights are the same on all ranks; only these may
            gather over several.
        on_demand_component_paths: components whose residency the pipeline manages itself (``load_to_device``,
            ``offload_to_cpu``).

    Raises:
        ConfigError: naming the field, the value given and what is accepted.
    """

    block_attrs: Mapping[str, Sequence[str]] = field(default_factory=FrozenDict)
    encoder_component_types: Mapping[str, str] = field(default_factory=FrozenDict)
    encoder_block_attrs: Mapping[str, Sequence[str]] = field(default_factory=FrozenDict)
    offload_submodules: Mapping[str, str | Sequence[str]] = field(default_factory=FrozenDict)
    resident_dit_paths: Sequence[str] | None = None
    encoder_dlo_weight_replication: Sequence[str] = ()
    on_demand_component_paths: Sequence[str] = ()

    def __post_init__(self) -> None:
        put = object.__setattr__
        for name in ("block_attrs", "encoder_block_attrs", "offload_submodules"):
            one_string = name == "offload_submodules"
            put(self, name, _container_mapping(f"OffloadPlan.{name}", getattr(self, name), one_string))
        types = _path_keys("OffloadPlan.encoder_component_types", self.encoder_component_types)
        for path, kind in types.items():
            if kind not in ENCODER_TYPES:
                raise ConfigError(f"OffloadPlan.encoder_component_types[{path!r}]", kind, '"text_encoder"')
        put(self, "encoder_component_types", FrozenDict(types))
        if self.resident_dit_paths is not None:
            put(self, "resident_dit_paths", _paths("OffloadPlan.resident_dit_paths", self.resident_dit_paths))
        for name in ("encoder_dlo_weight_replication", "on_demand_component_paths"):
            put(self, name, _paths(f"OffloadPlan.{name}", getattr(self, name)))
        both = set(self.block_attrs) & {*self.encoder_block_attrs, *self.encoder_component_types}
        if both:
            raise ConfigError(
                "OffloadPlan.block_attrs", sorted(both), "paths that are not declared as encoders as well"
            )


def plan_of(pipeline: object) -> OffloadPlan | None:
    """The pipeline's ``_offload_plan``, or None. Raises ConfigError if it is anything but an OffloadPlan."""
    plan = getattr(pipeline, PLAN_ATTR, None)
    if plan is not None and not isinstance(plan, OffloadPlan):
        raise ConfigError(f"{type(pipeline).__name__}.{PLAN_ATTR}", plan, "an OffloadPlan")
    return plan


def component_lists_of(pipeline: object) -> ComponentLists | None:
    """The pipeline's ``_dit_modules`` and so on, or None if it has none of them; the missing ones are empty.

    Raises:
        ConfigError: for a list that is not a list of dotted paths, or a path named twice.
    """
    owner = type(pipeline).__name__
    found: dict[str, tuple[str, ...]] = {}
    seen: dict[str, str] = {}
    for role in ("dit", "encoder", "vae", "resident"):
        attribute = f"_{role}_modules"
        value = getattr(pipeline, attribute, None)
        if value is None:
            continue
        found[role] = _paths(f"{owner}.{attribute}", value)
        for path in found[role]:
            if path in seen:
                raise ConfigError(f"{owner}.{attribute}", path, f"paths that {seen[path]} does not name as well")
            seen[path] = attribute
    return ComponentLists(**found) if found else None


def blocks_attrs_of(module: nn.Module | type[nn.Module]) -> tuple[str, ...] | None:
    """The block containers a transformer class declares in ``_layerwise_offload_blocks_attrs``, or None.

    The old singular ``_layerwise_offload_blocks_attr`` (one string) is read where the plural is absent.

    Raises:
        ConfigError: for an empty declaration, or one that is not a list of block containers.
    """
    owner = module.__name__ if isinstance(module, type) else type(module).__name__
    plural = getattr(module, BLOCKS_ATTRS, None)
    if plural is not None:
        return _containers(f"{owner}.{BLOCKS_ATTRS}", plural)
    singular = getattr(module, OLD_BLOCKS_ATTR, None)
    if singular is None:
        return None
    if not isinstance(singular, str):
        raise ConfigError(f"{owner}.{OLD_BLOCKS_ATTR}", singular, _ACCEPTED_CONTAINER)
    return _containers(f"{owner}.{OLD_BLOCKS_ATTR}", [singular])


def block_paths(module: nn.Module, containers: Iterable[str]) -> tuple[str, ...]:
    """The dotted names of all blocks under ``containers``, relative to ``module``, in execution order.

    Raises:
        TopologyError: if a path does not exist, a container holds no block, or a block is named twice.
    """
    result: list[str] = []
    for container in containers:
        paths = list(_expand(module, container))
        if not paths:
            raise TopologyError(f"{type(module).__name__} has no block under {container!r}")
        for path in paths:
            if path in result:
                raise TopologyError(f"{type(module).__name__}: block {path!r} is named twice, at last by {container!r}")
        result += paths
    return tuple(result)


def _expand(root: nn.Module, container: str) -> Iterator[str]:
    *parts, last = container.split(".")
    heads: list[tuple[str, nn.Module]] = [("", root)]
    for part in parts:
        heads = [step for head in heads for step in _step(root, head, part)]
    for head in heads:
        if not last.startswith("{"):
            for path, found in _step(root, head, last):
                yield from _blocks(path, found)
            continue
        # In turns, as a U-Net's forward takes a resnet, then an attention, then the next resnet.
        prefix, owner = head
        lists = [
            list(_blocks(_join(prefix, name), child))
            for name in last[1:-1].split(",")
            if isinstance(child := getattr(owner, name, None), nn.Module)
        ]
        for turn in zip_longest(*lists):
            yield from (path for path in turn if path is not None)


def _step(root: nn.Module, head: tuple[str, nn.Module], part: str) -> list[tuple[str, nn.Module]]:
    prefix, owner = head
    if part == "*":
        return [(_join(prefix, name), child) for name, child in owner.named_children()]
    child = getattr(owner, part, None)
    if not isinstance(child, nn.Module):
        raise TopologyError(f"{type(root).__name__} has no module {_join(prefix, part)!r}")
    return [(_join(prefix, part), child)]


def _blocks(path: str, module: nn.Module) -> Iterator[str]:
    if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        yield from (_join(path, name) for name, child in module.named_children())
    else:
        yield path


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _paths(name: str, value: object) -> tuple[str, ...]:
    return _strings(name, value, _PATH, _ACCEPTED_PATH)


def _containers(name: str, value: object) -> tuple[str, ...]:
    result = _strings(name, value, _CONTAINER, _ACCEPTED_CONTAINER)
    if not result:
        raise ConfigError(name, value, f"at least one of: {_ACCEPTED_CONTAINER}")
    return result


def _strings(name: str, value: object, pattern: re.Pattern[str], accepted: str) -> tuple[str, ...]:
    # A lone string is iterable, but its letters are not paths.
    if isinstance(value, str) or not isinstance(value, list | tuple | set | frozenset):
        raise ConfigError(name, value, f"a list, each item {accepted}")
    items: Iterable[Any] = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
    result: list[str] = []
    for index, item in enumerate(items):
        if not isinstance(item, str) or not pattern.fullmatch(item):
            raise ConfigError(f"{name}[{index}]", item, accepted)
        if item in result:
            raise ConfigError(f"{name}[{index}]", item, "each path once")
        result.append(item)
    return tuple(result)


def _path_keys(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(name, value, f"a mapping whose keys are each {_ACCEPTED_PATH}")
    for key in value:
        if not isinstance(key, str) or not _PATH.fullmatch(key):
            raise ConfigError(name, key, f"keys that are each {_ACCEPTED_PATH}")
    return dict(cast("Mapping[str, Any]", value))


def _container_mapping(name: str, value: object, one_string: bool) -> FrozenDict[str, tuple[str, ...]]:
    mapping = _path_keys(name, value)
    return FrozenDict(
        (key, _containers(f"{name}[{key!r}]", [item] if one_string and isinstance(item, str) else item))
        for key, item in mapping.items()
    )
