"""The configuration, through its public door: what is accepted, what it means, and what each refusal says."""

from __future__ import annotations

import copy
import json
import pickle

import pytest

from greenroom.config import (
    LayerOptions,
    Memory,
    OffloadConfig,
    Strategy,
    format_bytes,
    parse_bytes,
    parse_config,
)
from greenroom.errors import ConfigError, GreenroomError

ALLGATHER = {"weight_transfer": "allgather"}


def layer(**words):
    return {"mode": "layer", **words}


MEANINGS = [
    ({}, Strategy.AUTO, ("dit", "text_encoder")),
    ({"config": {}}, Strategy.AUTO, ("dit", "text_encoder")),
    ({"config": {"mode": "module"}}, Strategy.MODEL_LEVEL, ("dit", "text_encoder")),
    ({"config": {"mode": "module", "components": ["dit", "vae"]}}, Strategy.MODEL_LEVEL, ("dit", "vae")),
    ({"config": layer()}, Strategy.LAYERWISE, ("dit",)),
    ({"config": '{"mode":"layer","components":["text_encoder"]}'}, Strategy.LAYERWISE, ("text_encoder",)),
    ({"config": layer(components=("dit", "text_encoder"))}, Strategy.LAYERWISE, ("dit", "text_encoder")),
    ({"config": layer(layer_options={"dit": {}})}, Strategy.LAYERWISE, ("dit",)),
    ({"config": layer(layer_options={"dit": ALLGATHER})}, Strategy.DISTRIBUTED_LAYERWISE, ("dit",)),
    (
        {"config": layer(layer_options={"dit": {"resident_layers": 2}})},
        Strategy.DISTRIBUTED_LAYERWISE,
        ("dit",),
    ),
    ({"config": layer(distributed=True)}, Strategy.DISTRIBUTED_LAYERWISE, ("dit",)),
    ({"enable_cpu_offload": True}, Strategy.MODEL_LEVEL, ("dit", "text_encoder")),
    ({"enable_cpu_offload": True, "enable_layerwise_offload": True}, Strategy.LAYERWISE, ("dit",)),
    (
        {
            "enable_cpu_offload": True,
            "enable_layerwise_offload": True,
            "enable_distributed_layerwise_offload": True,
        },
        Strategy.DISTRIBUTED_LAYERWISE,
        ("dit",),
    ),
    # Legacy flags that say the same as the config do not contradict it.
    (
        {"config": {"mode": "module"}, "enable_cpu_offload": True},
        Strategy.MODEL_LEVEL,
        ("dit", "text_encoder"),
    ),
    (
        {
            "config": layer(layer_options={"dit": ALLGATHER}),
            "enable_distributed_layerwise_offload": True,
        },
        Strategy.DISTRIBUTED_LAYERWISE,
        ("dit",),
    ),
]


@pytest.mark.parametrize(("words", "strategy", "components"), MEANINGS)
def test_meaning(words, strategy, components):
    config = parse_config(**words)
    assert config.strategy is strategy
    assert config.components == components


@pytest.mark.parametrize("words", [words for words, _, _ in MEANINGS])
def test_round_trips(words):
    config = parse_config(**words)
    assert parse_config(config.to_mapping()) == config
    assert parse_config(json.dumps(config.to_mapping())) == config
    assert parse_config(config) is config
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config
    assert len({config, copy.deepcopy(config)}) == 1


def test_round_trip_keeps_every_word():
    config = OffloadConfig(
        mode="layer",
        components=["dit", "text_encoder"],
        layer_options={
            "dit": {"weight_transfer": "allgather", "resident_layers": 3},
            "text_encoder": ALLGATHER,
        },
        pin_memory="8GiB",
        memory_budget="37.5%",
        distributed=True,
        pin_failure_policy="whole_block_fallback",
        chunk_size="16MB",
    )
    assert parse_config(json.dumps(config.to_mapping())) == config
    assert config.layer_options["dit"] == LayerOptions("allgather", 3)
    assert config.pin_memory == 8 * 2**30
    assert config.memory_budget == Memory(percent=37.5)
    assert config.chunk_size == 16_000_000


def test_legacy_distributed_options():
    config = parse_config(
        enable_distributed_layerwise_offload=True,
        dlo_use_allgather=False,
        dlo_resident_layers=2,
        dlo_pin_budget_gb=1.5,
        dlo_pin_failure_policy="whole_block_fallback",
        dlo_chunk_size_mb=4,
    )
    assert config.options_of("dit") == LayerOptions("rank-local", 2)
    assert config.pin_memory == 1_500_000_000
    assert config.pin_failure_policy == "whole_block_fallback"
    assert config.chunk_size == 4_000_000
    rank_local = parse_config(enable_distributed_layerwise_offload=True, dlo_use_allgather=False)
    assert rank_local.strategy is Strategy.DISTRIBUTED_LAYERWISE
    gathering = parse_config(enable_distributed_layerwise_offload=True)
    assert gathering.options_of("dit").weight_transfer == "allgather"


def test_only_named_components_are_explicit():
    assert not parse_config({"mode": "module"}).components_explicit
    assert parse_config({"mode": "module", "components": ["dit", "text_encoder"]}).components_explicit


def test_a_config_cannot_be_changed():
    options = {"dit": {"resident_layers": 1}}
    config = parse_config(layer(layer_options=options))
    options["dit"]["resident_layers"] = 7
    assert config.options_of("dit").resident_layers == 1
    with pytest.raises(AttributeError):
        config.mode = "module"
    with pytest.raises(TypeError):
        config.layer_options["dit"] = LayerOptions()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("12GiB", Memory(bytes=12 * 2**30)),
        ("12 GB", Memory(bytes=12 * 10**9)),
        (" 1.5 gib ", Memory(bytes=3 * 2**29)),
        ("512MiB", Memory(bytes=2**29)),
        ("1000", Memory(bytes=1000)),
        (12e9, Memory(bytes=12 * 10**9)),
        (2**33, Memory(bytes=2**33)),
        ("80%", Memory(percent=80)),
        ("12.5 %", Memory(percent=12.5)),
    ],
)
def test_memory(words, expected):
    assert parse_config(memory=words).memory_budget == expected
    assert parse_config({"memory_budget": words}).memory_budget == expected
    assert parse_config({"mode": "layer"}, memory=words).memory_budget == expected
    assert parse_config({"memory_budget": words}, memory=words).memory_budget == expected
    assert parse_config(enable_cpu_offload=True, memory=words).memory_budget == expected


def test_memory_on_a_device():
    assert Memory.parse("80%").resolve(1000) == 800
    assert Memory.parse("12 kB").resolve(1000) == 12_000
    assert parse_config().memory_budget is None


@pytest.mark.parametrize("size", [1, 999, 1000, 999_999, 12_340_000_000, 5 * 10**12])
def test_formatted_sizes_read_back(size):
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.006)


# input -> the field named, the value shown, and some of the words that would have been accepted
REFUSALS = [
    # the config as a whole
    ({"config": 3}, "diffusion_offload_config", 3, "mapping"),
    ({"config": ["dit"]}, "diffusion_offload_config", ["dit"], "mapping"),
    ({"config": True}, "diffusion_offload_config", True, "OffloadConfig"),
    ({"config": "layer"}, "diffusion_offload_config", "layer", "JSON"),
    ({"config": '{"mode": "layer"'}, "diffusion_offload_config", '{"mode": "layer"', "JSON"),
    ({"config": '"layer"'}, "diffusion_offload_config", "layer", "mapping"),
    ({"config": '{"mode": "layer", "mode": "module"}'}, "mode", "module", "once"),
    # keys
    ({"config": {"mod": "layer"}}, "mod", "layer", '"mode"?'),
    ({"config": {"memory-budget": "1GB"}}, "memory-budget", "1GB", '"memory_budget"?'),
    ({"config": {"Components": ["dit"]}}, "Components", ["dit"], '"components"?'),
    ({"config": {"zebra": 1}}, "zebra", 1, '"layer_options"'),
    ({"config": {1: 2}}, "[1]", 2, '"mode"'),
    ({"config": {"components_explicit": True}}, "components_explicit", True, '"components"'),
    # mode
    ({"config": {"mode": "model"}}, "mode", "model", '"module"'),
    ({"config": {"mode": "Layer"}}, "mode", "Layer", '"layer"'),
    ({"config": {"mode": None}}, "mode", None, '"auto"'),
    ({"config": {"mode": 1}}, "mode", 1, '"module"'),
    ({"config": {"mode": ["layer"]}}, "mode", ["layer"], '"layer"'),
    # components
    ({"config": layer(components=[])}, "components", [], "non-empty"),
    ({"config": layer(components=None)}, "components", None, "non-empty list"),
    ({"config": layer(components="dit")}, "components", "dit", '["dit"]?'),
    ({"config": layer(components={"dit": 1})}, "components", {"dit": 1}, "list"),
    ({"config": layer(components=["dti"])}, "components[0]", "dti", '"dit"?'),
    ({"config": layer(components=["dit", 3])}, "components[1]", 3, '"text_encoder"'),
    ({"config": layer(components=["dit", True])}, "components[1]", True, '"text_encoder"'),
    ({"config": layer(components=["dit", "dit"])}, "components", ["dit", "dit"], "once"),
    ({"config": layer(components=["vae"])}, "components[0]", "vae", 'only with mode "module"'),
    ({"config": {"components": ["dit", "vae"]}}, "components[1]", "vae", 'only with mode "module"'),
    # layer options
    ({"config": layer(layer_options=["dit"])}, "layer_options", ["dit"], "mapping"),
    (
        {"config": layer(layer_options={"dit": "allgather"})},
        "layer_options.dit",
        "allgather",
        "weight_transfer",
    ),
    ({"config": layer(layer_options={"text_encoder": {}})}, "layer_options.text_encoder", {}, '"dit"'),
    ({"config": layer(layer_options={"unet": {}})}, "layer_options.unet", {}, "selected component"),
    ({"config": {"mode": "module", "layer_options": {"dit": {}}}}, "layer_options", {"dit": {}}, '"layer"'),
    (
        {"config": layer(layer_options={"dit": {"weight_transfer": "all-gather"}})},
        "layer_options.dit.weight_transfer",
        "all-gather",
        '"rank-local"',
    ),
    (
        {"config": layer(layer_options={"dit": {"weight_transfer": True}})},
        "layer_options.dit.weight_transfer",
        True,
        '"allgather"',
    ),
    (
        {"config": layer(layer_options={"dit": {"resident_layer": 2}})},
        "layer_options.dit.resident_layer",
        2,
        '"resident_layers"?',
    ),
    (
        {"config": layer(layer_options={"dit": {"resident_layers": -1}})},
        "layer_options.dit.resident_layers",
        -1,
        ">= 0",
    ),
    (
        {"config": layer(layer_options={"dit": {"resident_layers": True}})},
        "layer_options.dit.resident_layers",
        True,
        "whole number",
    ),
    (
        {"config": layer(layer_options={"dit": {"resident_layers": 2.0}})},
        "layer_options.dit.resident_layers",
        2.0,
        "whole number",
    ),
    (
        {"config": layer(layer_options={"dit": {"resident_layers": "2"}})},
        "layer_options.dit.resident_layers",
        "2",
        "whole number",
    ),
    (
        {"config": layer(components=["dit", "text_encoder"], layer_options={"text_encoder": {"resident_layers": 2}})},
        "layer_options.text_encoder.resident_layers",
        2,
        'only for "dit"',
    ),
    # pinning
    ({"config": {"pin_memory": 1}}, "pin_memory", 1, "true, false"),
    ({"config": {"pin_memory": 0}}, "pin_memory", 0, "true, false"),
    ({"config": {"pin_memory": None}}, "pin_memory", None, "true, false"),
    ({"config": {"pin_memory": "yes"}}, "pin_memory", "yes", "true, false"),
    ({"config": {"pin_memory": "50%"}}, "pin_memory", "50%", "12GiB"),
    ({"config": {"pin_failure_policy": "ignore"}}, "pin_failure_policy", "ignore", '"whole_block_fallback"'),
    # memory
    ({"config": {"memory_budget": "12G"}}, "memory_budget", "12G", '"12GB" or "12GiB"'),
    ({"config": {"memory_budget": "much"}}, "memory_budget", "much", '"80%"'),
    ({"config": {"memory_budget": 0}}, "memory_budget", 0, "positive"),
    ({"config": {"memory_budget": -(2**30)}}, "memory_budget", -(2**30), "positive"),
    ({"config": {"memory_budget": True}}, "memory_budget", True, "positive"),
    ({"config": {"memory_budget": 0.8}}, "memory_budget", 0.8, '"80%"?'),
    ({"config": {"memory_budget": float("nan")}}, "memory_budget", float("nan"), "positive"),
    ({"config": {"memory_budget": float("inf")}}, "memory_budget", float("inf"), "positive"),
    ({"config": {"memory_budget": "0%"}}, "memory_budget", "0%", '"80%"'),
    ({"config": {"memory_budget": "120%"}}, "memory_budget", "120%", '"80%"'),
    ({"config": {"memory_budget": "-3GB"}}, "memory_budget", "-3GB", "positive"),
    ({"config": {"memory_budget": ["12GB"]}}, "memory_budget", ["12GB"], "positive"),
    ({"memory": "12 Gigs"}, "memory", "12 Gigs", "12GiB"),
    ({"memory": "2GB", "config": {"memory_budget": "1GB"}}, "memory", "2GB", "1.00 GB"),
    # the distributed words
    ({"config": {"mode": "module", "distributed": True}}, "distributed", True, '"layer"'),
    ({"config": layer(distributed=1)}, "distributed", 1, "true or false"),
    ({"config": layer(chunk_size=0, distributed=True)}, "chunk_size", 0, "positive"),
    ({"config": layer(chunk_size="16MB")}, "chunk_size", "16MB", '"allgather"'),
    # legacy flags
    ({"enable_cpu_offload": 1}, "enable_cpu_offload", 1, "true or false"),
    ({"enable_layerwise_offload": "yes"}, "enable_layerwise_offload", "yes", "true or false"),
    ({"enable_distributed_layerwise_offload": None}, "enable_distributed_layerwise_offload", None, "true"),
    ({"dlo_use_allgather": 0}, "dlo_use_allgather", 0, "true or false"),
    ({"dlo_resident_layers": -2}, "dlo_resident_layers", -2, ">= 0"),
    ({"dlo_resident_layers": False}, "dlo_resident_layers", False, "whole number"),
    ({"dlo_pin_budget_gb": "4"}, "dlo_pin_budget_gb", "4", "number of GB"),
    ({"dlo_pin_budget_gb": 0}, "dlo_pin_budget_gb", 0, "number of GB"),
    ({"dlo_pin_budget_gb": float("nan")}, "dlo_pin_budget_gb", float("nan"), "number of GB"),
    ({"dlo_pin_failure_policy": "warn"}, "dlo_pin_failure_policy", "warn", '"fail"'),
    ({"dlo_chunk_size_mb": 1.5}, "dlo_chunk_size_mb", 1.5, "whole number"),
    # a legacy option without the flag that gives it a meaning
    ({"dlo_resident_layers": 2}, "dlo_resident_layers", 2, "enable_distributed_layerwise_offload"),
    (
        {"enable_layerwise_offload": True, "dlo_use_allgather": False},
        "dlo_use_allgather",
        False,
        "enable_distributed_layerwise_offload",
    ),
    # a config beside legacy words that contradict it
    (
        {"config": {"mode": "module"}, "enable_layerwise_offload": True},
        "enable_layerwise_offload",
        True,
        "false",
    ),
    ({"config": layer(), "enable_cpu_offload": True}, "enable_cpu_offload", True, "layerwise"),
    ({"config": {}, "enable_cpu_offload": True}, "enable_cpu_offload", True, "auto"),
    (
        {"config": layer(), "enable_distributed_layerwise_offload": True},
        "enable_distributed_layerwise_offload",
        True,
        "false beside a config",
    ),
    ({"config": layer(), "dlo_use_allgather": False}, "dlo_use_allgather", False, "True beside a config"),
    ({"config": layer(), "dlo_resident_layers": 3}, "dlo_resident_layers", 3, "0 beside a config"),
    ({"config": OffloadConfig(), "dlo_pin_budget_gb": 4}, "dlo_pin_budget_gb", 4, "None beside a config"),
    (
        {"config": layer(), "dlo_pin_failure_policy": "whole_block_fallback"},
        "dlo_pin_failure_policy",
        "whole_block_fallback",
        "'fail' beside a config",
    ),
    ({"config": layer(), "dlo_chunk_size_mb": 8}, "dlo_chunk_size_mb", 8, "None beside a config"),
]


@pytest.mark.parametrize(("words", "field", "value", "accepted"), REFUSALS)
def test_refusal_names_field_value_and_what_is_accepted(words, field, value, accepted):
    with pytest.raises(ConfigError) as caught:
        parse_config(**words)
    message = str(caught.value)
    assert message.startswith(f"{field} = {value!r} ")
    assert accepted in message.removeprefix(f"{field} = {value!r} ")
    assert caught.value.field == field
    assert repr(caught.value.value) == repr(value)
    assert isinstance(caught.value, GreenroomError) and isinstance(caught.value, ValueError)


def test_errors_cross_process_boundaries():
    with pytest.raises(ConfigError) as caught:
        parse_config({"mode": "layr"})
    copied = pickle.loads(pickle.dumps(caught.value))
    assert str(copied) == str(caught.value)
    assert copied.accepted == caught.value.accepted


@pytest.mark.parametrize(
    "build",
    [
        lambda: OffloadConfig(mode="model"),
        lambda: OffloadConfig(components=()),
        lambda: LayerOptions(weight_transfer="gather"),
        lambda: LayerOptions(resident_layers=-1),
        lambda: Memory(),
        lambda: Memory(bytes=1, percent=1),
        lambda: Memory(percent=0),
        lambda: Memory(bytes=-1),
    ],
)
def test_values_are_valid_by_construction(build):
    with pytest.raises(ConfigError):
        build()
