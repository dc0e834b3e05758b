"""The user's words -> one frozen `OffloadConfig`. Every message for bad input is written here."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Literal, cast

from greenroom.errors import ConfigError
from greenroom.frozen import FrozenDict
from greenroom.memory import ACCEPTED_BYTES, Memory, format_bytes, parse_bytes

__all__ = [
    "LayerOptions",
    "Memory",
    "OffloadConfig",
    "Strategy",
    "format_bytes",
    "parse_bytes",
    "parse_config",
]

Mode = Literal["module", "layer", "auto"]
WeightTransfer = Literal["rank-local", "allgather", "auto"]
PinFailurePolicy = Literal["fail", "whole_block_fallback"]

MODES = ("module", "layer", "auto")
COMPONENTS = ("dit", "text_encoder", "vae")
WEIGHT_TRANSFERS = ("rank-local", "allgather", "auto")
PIN_FAILURE_POLICIES = ("fail", "whole_block_fallback")

# What leaves the device when nobody says: at module level the two that never work at the same time, and by
# blocks the one that runs every step. "auto" may take either road, so it starts from the wider choice.
DEFAULT_COMPONENTS: Mapping[str, tuple[str, ...]] = FrozenDict(
    {"module": ("dit", "text_encoder"), "layer": ("dit",), "auto": ("dit", "text_encoder")}
)

# A smaller byte budget cannot hold one block of any model; 0 and 1 are more likely meant as false and true.
SMALLEST_PIN_BUDGET = 2**20


class Strategy(Enum):
    """How weights reach the device."""

    MODEL_LEVEL = "model-level"
    LAYERWISE = "layerwise"
    DISTRIBUTED_LAYERWISE = "distributed-layerwise"
    AUTO = "auto"


@dataclass(frozen=True)
class LayerOptions:
    """Tuning of one streamed component.

    Attributes:
        weight_transfer: "rank-local": each rank copies a whole block from its host. "allgather": each rank
            copies its share and the group gathers the block. "auto": the faster of the two, measured when the
            offload is enabled.
        resident_layers: blocks that stay on the device (DiT only), spread over the depth.
    """

    weight_transfer: WeightTransfer = "rank-local"
    resident_layers: int = 0

    def __post_init__(self) -> None:
        _check_layer_options("LayerOptions", self.weight_transfer, self.resident_layers)

    @property
    def distributed(self) -> bool:
        """Whether these options alone select the distributed machinery."""
        return self.weight_transfer != "rank-local" or self.resident_layers > 0


@dataclass(frozen=True, init=False)
class OffloadConfig:
    """What may leave the device, and how. Immutable, hashable, picklable; valid by construction.

    Attributes:
        mode: "module" (one component group on the device at a time), "layer" (one block, the next prefetched)
            or "auto" (the memory budget chooses).
        components: what may leave the device, of "dit", "text_encoder" and, with mode "module", "vae".
        components_explicit: whether the caller named the components. A named component that the pipeline does
            not have is an error; a default one is not.
        layer_options: component -> LayerOptions, only for selected components.
        pin_memory: True or False, or the most bytes of host memory to pin.
        memory_budget: the most device memory to use, or None for whatever is free.
        distributed: whether the distributed machinery (a fixed two-block buffer) is used even where no layer
            option asks for it.
        pin_failure_policy: when a block cannot be pinned: "fail", or leave that whole block unpinned.
        chunk_size: bytes of one piece of a copy and gather, or None. Changes nothing, which is told once: a rank's
            share of a block is the piece that is copied while another is gathered.

    Raises:
        ConfigError: naming the field, the value given and what is accepted.
    """

    mode: Mode
    components: tuple[str, ...]
    components_explicit: bool = field(init=False)
    layer_options: Mapping[str, LayerOptions]
    pin_memory: bool | int
    memory_budget: Memory | None
    distributed: bool
    pin_failure_policy: PinFailurePolicy
    chunk_size: int | None

    def __init__(
        self,
        mode: str = "auto",
        components: Iterable[str] | None = None,
        layer_options: Mapping[str, LayerOptions | Mapping[str, Any]] | None = None,
        pin_memory: bool | int | str = True,
        memory_budget: int | float | str | Memory | None = None,
        distributed: bool = False,
        pin_failure_policy: str = "fail",
        chunk_size: int | str | None = None,
    ) -> None:
        _one_of("mode", mode, MODES)
        explicit = components is not None
        chosen = _components(components, mode) if explicit else DEFAULT_COMPONENTS[mode]
        options = _layer_options(layer_options, mode, chosen)
        _boolean("distributed", distributed)
        if distributed and mode != "layer":
            raise ConfigError("distributed", distributed, f'false with mode "{mode}"; true needs mode "layer"')
        _one_of("pin_failure_policy", pin_failure_policy, PIN_FAILURE_POLICIES)
        budget = None if memory_budget is None else Memory.parse(memory_budget, "memory_budget")
        values = {
            "mode": mode,
            "components": chosen,
            "components_explicit": explicit,
            "layer_options": options,
            "pin_memory": _pin_memory(pin_memory),
            "memory_budget": budget,
            "distributed": distributed,
            "pin_failure_policy": pin_failure_policy,
            "chunk_size": None if chunk_size is None else parse_bytes(chunk_size, "chunk_size"),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        if self.chunk_size is not None and self.strategy is not Strategy.DISTRIBUTED_LAYERWISE:
            raise ConfigError(
                "chunk_size",
                chunk_size,
                'null, unless the distributed machinery is selected (mode "layer" with weight_transfer '
                '"allgather", resident_layers or distributed)',
            )

    @property
    def strategy(self) -> Strategy:
        """The strategy these words select; AUTO leaves the choice to the memory budget."""
        if self.mode == "module":
            return Strategy.MODEL_LEVEL
        if self.mode == "auto":
            return Strategy.AUTO
        if self.distributed or any(options.distributed for options in self.layer_options.values()):
            return Strategy.DISTRIBUTED_LAYERWISE
        return Strategy.LAYERWISE

    @property
    def keeps_budget(self) -> bool:
        """Whether a budget is kept: the one that was given, or with mode "auto" what is free."""
        return self.memory_budget is not None or self.mode == "auto"

    def options_of(self, component: str) -> LayerOptions:
        """The layer options of one component, the defaults where none were given."""
        return self.layer_options.get(component, LayerOptions())

    def with_budget(self, memory_budget: int | float | str | Memory | None) -> OffloadConfig:
        """The same with another memory budget.

        Raises:
            ConfigError: not an amount of memory.
        """
        return OffloadConfig(**{**self.to_mapping(), "memory_budget": memory_budget})

    def to_mapping(self) -> dict[str, Any]:
        """The compact JSON-ready mapping that parses back to an equal config; defaults are left out."""
        words: dict[str, Any] = {"mode": self.mode}
        if self.components_explicit:
            words["components"] = list(self.components)
        if self.layer_options:
            words["layer_options"] = {
                name: {"weight_transfer": item.weight_transfer, "resident_layers": item.resident_layers}
                for name, item in self.layer_options.items()
            }
        if self.pin_memory is not True:
            words["pin_memory"] = self.pin_memory
        if self.memory_budget is not None:
            words["memory_budget"] = self.memory_budget.to_word()
        if self.distributed:
            words["distributed"] = True
        if self.pin_failure_policy != "fail":
            words["pin_failure_policy"] = self.pin_failure_policy
        if self.chunk_size is not None:
            words["chunk_size"] = self.chunk_size
        return words


# What a mapping may say; `components_explicit` is derived, never given.
CONFIG_FIELDS = tuple(item.name for item in fields(OffloadConfig) if item.init)
LAYER_OPTION_FIELDS = tuple(item.name for item in fields(LayerOptions))


def parse_config(
    config: Mapping[str, Any] | OffloadConfig | str | None = None,
    *,
    memory: int | float | str | Memory | None = None,
    enable_cpu_offload: bool = False,
    enable_layerwise_offload: bool = False,
    enable_distributed_layerwise_offload: bool = False,
    dlo_use_allgather: bool = True,
    dlo_resident_layers: int = 0,
    dlo_pin_budget_gb: int | float | None = None,
    dlo_pin_failure_policy: str = "fail",
    dlo_chunk_size_mb: int | None = None,
) -> OffloadConfig:
    """Read the compact config, or the legacy flags, into one frozen `OffloadConfig`.

    Nothing given at all means mode "auto" with the free device memory as the budget. ``memory`` alone means
    mode "auto" with that budget.

    Args:
        config: the compact mapping, its JSON text, or a finished OffloadConfig.
        memory: short for ``memory_budget`` in the config: "12GiB", "12 GB", bytes, or "80%".
        enable_cpu_offload: legacy flag for the model-level strategy.
        enable_layerwise_offload: legacy flag for the layerwise strategy; it wins over the one above.
        enable_distributed_layerwise_offload: legacy flag for the distributed strategy; it wins over both.
        dlo_use_allgather: legacy distributed option; False copies whole blocks rank by rank.
        dlo_resident_layers: legacy distributed option; DiT blocks that stay on the device.
        dlo_pin_budget_gb: legacy distributed option; the most host memory to pin, in GB of 10**9 bytes.
        dlo_pin_failure_policy: legacy distributed option; "fail" or "whole_block_fallback".
        dlo_chunk_size_mb: legacy distributed option; `chunk_size` in MB of 10**6 bytes, which changes nothing.

    Raises:
        ConfigError: for any word that is not accepted, a legacy flag that contradicts the config, or a
            non-default legacy distributed option that the config, or a missing flag, leaves without effect.
    """
    flags = {
        "enable_distributed_layerwise_offload": enable_distributed_layerwise_offload,
        "enable_layerwise_offload": enable_layerwise_offload,
        "enable_cpu_offload": enable_cpu_offload,
    }
    legacy = {
        "dlo_use_allgather": dlo_use_allgather,
        "dlo_resident_layers": dlo_resident_layers,
        "dlo_pin_budget_gb": dlo_pin_budget_gb,
        "dlo_pin_failure_policy": dlo_pin_failure_policy,
        "dlo_chunk_size_mb": dlo_chunk_size_mb,
    }
    for name, value in flags.items():
        _boolean(name, value)
    _check_legacy(legacy)
    budget = None if memory is None else Memory.parse(memory, "memory")

    if config is None:
        return _from_flags(flags, legacy, budget)
    parsed = config if isinstance(config, OffloadConfig) else _from_mapping(_mapping(config))
    for name, value in flags.items():
        if value and _FLAG_STRATEGIES[name] is not parsed.strategy:
            raise ConfigError(
                name,
                value,
                f"false beside a config that selects the {parsed.strategy.value} strategy",
                "the config already chooses; drop the legacy flag",
            )
    for name, default in _LEGACY_DEFAULTS.items():
        if legacy[name] != default:
            raise ConfigError(name, legacy[name], f"{default!r} beside a config", _LEGACY_REPLACEMENTS[name])
    if budget is None or budget == parsed.memory_budget:
        return parsed
    if parsed.memory_budget is not None:
        raise ConfigError("memory", memory, f"nothing beside a config whose memory_budget is {parsed.memory_budget}")
    return parsed.with_budget(budget)


_FLAG_STRATEGIES = {
    "enable_distributed_layerwise_offload": Strategy.DISTRIBUTED_LAYERWISE,
    "enable_layerwise_offload": Strategy.LAYERWISE,
    "enable_cpu_offload": Strategy.MODEL_LEVEL,
}
_LEGACY_DEFAULTS: dict[str, object] = {
    "dlo_use_allgather": True,
    "dlo_resident_layers": 0,
    "dlo_pin_budget_gb": None,
    "dlo_pin_failure_policy": "fail",
    "dlo_chunk_size_mb": None,
}
_LEGACY_REPLACEMENTS = {
    "dlo_use_allgather": 'say weight_transfer "rank-local" or "allgather" in layer_options',
    "dlo_resident_layers": "say resident_layers in layer_options",
    "dlo_pin_budget_gb": "say pin_memory with a byte budget in the config",
    "dlo_pin_failure_policy": "say pin_failure_policy in the config",
    "dlo_chunk_size_mb": "say chunk_size in the config",
}


def _from_flags(flags: Mapping[str, bool], legacy: Mapping[str, Any], budget: Memory | None) -> OffloadConfig:
    if flags["enable_distributed_layerwise_offload"]:
        transfer = "allgather" if legacy["dlo_use_allgather"] else "rank-local"
        pin_budget, chunk = legacy["dlo_pin_budget_gb"], legacy["dlo_chunk_size_mb"]
        return OffloadConfig(
            mode="layer",
            layer_options={"dit": {"weight_transfer": transfer, "resident_layers": legacy["dlo_resident_layers"]}},
            pin_memory=True if pin_budget is None else round(pin_budget * 10**9),
            memory_budget=budget,
            distributed=True,
            pin_failure_policy=legacy["dlo_pin_failure_policy"],
            chunk_size=None if chunk is None else chunk * 10**6,
        )
    for name, default in _LEGACY_DEFAULTS.items():
        if legacy[name] != default:
            raise ConfigError(name, legacy[name], f"{default!r}, unless enable_distributed_layerwise_offload is given")
    if flags["enable_layerwise_offload"]:
        return OffloadConfig(mode="layer", memory_budget=budget)
    if flags["enable_cpu_offload"]:
        return OffloadConfig(mode="module", memory_budget=budget)
    return OffloadConfig(mode="auto", memory_budget=budget)


def _from_mapping(words: Mapping[str, Any]) -> OffloadConfig:
    _known_keys("", words, CONFIG_FIELDS)
    if "components" in words and words["components"] is None:
        # None is how the constructor says "not given"; somebody who writes the key means something by it.
        _components(None, "auto")
    return OffloadConfig(**words)


def _mapping(config: object) -> Mapping[str, Any]:
    accepted = f"a mapping with {_words(CONFIG_FIELDS)}, its JSON text, or an OffloadConfig"
    if isinstance(config, str):
        try:
            config = json.loads(config, object_pairs_hook=_no_duplicate_keys)
        except json.JSONDecodeError as error:
            raise ConfigError("diffusion_offload_config", config, accepted, f"not JSON: {error}") from None
    if not isinstance(config, Mapping):
        raise ConfigError("diffusion_offload_config", config, accepted)
    return config


def _no_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ConfigError(key, value, "each key once", f"it was already given as {result[key]!r}")
        result[key] = value
    return result


def _known_keys(prefix: str, words: Mapping[Any, Any], known: Iterable[str]) -> None:
    known = tuple(known)
    for key in words:
        if key not in known:
            near = difflib.get_close_matches(str(key).lower().replace("-", "_"), known, n=1, cutoff=0.6)
            name = f"{prefix}{key}" if isinstance(key, str) else f"{prefix}[{key!r}]"
            raise ConfigError(
                name,
                words[key],
                f"one of the fields {_words(known)}",
                f'did you mean "{near[0]}"?' if near else None,
            )


def _one_of(name: str, value: object, accepted: tuple[str, ...]) -> None:
    # The type first: a list, being unhashable, or a str subclass's odd equality must not slip through.
    if isinstance(value, str) and value in accepted:
        return
    near = difflib.get_close_matches(value.lower(), accepted, n=1) if isinstance(value, str) else ()
    raise ConfigError(name, value, _words(accepted), f'did you mean "{near[0]}"?' if near else None)


def _boolean(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(name, value, "true or false")


def _natural(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(name, value, "a whole number >= 0")


def _components(value: object, mode: str) -> tuple[str, ...]:
    accepted = f"a non-empty list of {_words(COMPONENTS)}"
    # A mapping or a set would be iterable too, but has no order that means anything.
    if not isinstance(value, list | tuple):
        hint = f'did you mean ["{value}"]?' if isinstance(value, str) and value in COMPONENTS else None
        raise ConfigError("components", value, accepted, hint)
    if not value:
        raise ConfigError("components", value, accepted, "leave it out for the default")
    for index, item in enumerate(value):
        _one_of(f"components[{index}]", item, COMPONENTS)
        if item in value[:index]:
            raise ConfigError("components", value, "each component once", f'"{item}" is named twice')
        if item == "vae" and mode != "module":
            raise ConfigError(
                f"components[{index}]",
                item,
                f'"dit" and "text_encoder" with mode "{mode}"; "vae" only with mode "module"',
                'a VAE stays resident unless whole components take turns, as they do with mode "module"',
            )
    return tuple(value)


def _layer_options(value: object, mode: str, components: tuple[str, ...]) -> FrozenDict[str, LayerOptions]:
    if value is None:
        return FrozenDict()
    if not isinstance(value, Mapping):
        raise ConfigError("layer_options", value, f"a mapping from a component ({_words(components)}) to its options")
    if value and mode == "module":
        raise ConfigError("layer_options", dict(value), 'nothing with mode "module"; mode "layer" or "auto"')
    result: dict[str, LayerOptions] = {}
    for name, item in value.items():
        if name not in components:
            raise ConfigError(f"layer_options.{name}", item, f"options for a selected component: {_words(components)}")
        result[name] = _one_layer_options(f"layer_options.{name}", name, item)
    return FrozenDict(result)


def _one_layer_options(prefix: str, component: str, value: object) -> LayerOptions:
    if isinstance(value, LayerOptions):
        options = value
    elif isinstance(value, Mapping):
        _known_keys(f"{prefix}.", value, LAYER_OPTION_FIELDS)
        words = {"weight_transfer": "rank-local", "resident_layers": 0, **value}
        # Checked before construction, so that the error names the user's path and not the class.
        _check_layer_options(prefix, **words)
        options = LayerOptions(**words)
    else:
        raise ConfigError(prefix, value, f"a mapping with {_words(LAYER_OPTION_FIELDS)}")
    if options.resident_layers and component != "dit":
        raise ConfigError(
            f"{prefix}.resident_layers", options.resident_layers, f'0 for "{component}"; more only for "dit"'
        )
    return options


def _check_layer_options(prefix: str, weight_transfer: object, resident_layers: object) -> None:
    _one_of(f"{prefix}.weight_transfer", weight_transfer, WEIGHT_TRANSFERS)
    _natural(f"{prefix}.resident_layers", resident_layers)


def _pin_memory(value: object) -> bool | int:
    if isinstance(value, bool):
        return value
    accepted = f"true, false, or at least 1 MiB as {ACCEPTED_BYTES}"
    budget = parse_bytes(value, "pin_memory", accepted)
    if budget < SMALLEST_PIN_BUDGET:
        raise ConfigError("pin_memory", value, accepted)
    return budget


def _check_legacy(legacy: Mapping[str, object]) -> None:
    _boolean("dlo_use_allgather", legacy["dlo_use_allgather"])
    _natural("dlo_resident_layers", legacy["dlo_resident_layers"])
    _one_of("dlo_pin_failure_policy", legacy["dlo_pin_failure_policy"], PIN_FAILURE_POLICIES)
    gigabytes = legacy["dlo_pin_budget_gb"]
    if gigabytes is not None and (
        isinstance(gigabytes, bool)
        or not isinstance(gigabytes, int | float)
        or not SMALLEST_PIN_BUDGET <= cast(float, gigabytes) * 10**9 < float("inf")
    ):
        raise ConfigError("dlo_pin_budget_gb", gigabytes, "a number of GB of at least 1 MiB (0.002), or nothing")
    megabytes = legacy["dlo_chunk_size_mb"]
    if megabytes is not None and (isinstance(megabytes, bool) or not isinstance(megabytes, int) or megabytes < 1):
        raise ConfigError("dlo_chunk_size_mb", megabytes, "a whole number of MB >= 1, or nothing")


def _words(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
