"""What pipelines and classes declare about themselves: read, expanded into blocks, or refused."""

from __future__ import annotations

import copy
import pickle
from typing import ClassVar

import pytest
from torch import nn

from greenroom.declare import (
    ComponentLists,
    OffloadPlan,
    SupportsComponentDiscovery,
    block_paths,
    blocks_attrs_of,
    component_lists_of,
    plan_of,
)
from greenroom.errors import ConfigError, TopologyError


class Stage(nn.Module):
    def __init__(self, resnets: int, attentions: int | None) -> None:
        super().__init__()
        # Registered in the order in which forward does not run them.
        if attentions is not None:
            self.attentions = nn.ModuleList(nn.Identity() for _ in range(attentions))
        self.resnets = nn.ModuleList(nn.Identity() for _ in range(resnets))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Identity() for _ in range(2))
        self.named = nn.ModuleDict({"b": nn.Identity(), "a": nn.Identity()})
        self.row = nn.Sequential(nn.Identity(), nn.Identity())
        self.stages = nn.ModuleList([Stage(2, 2), Stage(2, None)])
        self.middle = Stage(2, 1)
        self.empty = nn.ModuleList()


@pytest.mark.parametrize(
    ("containers", "expected"),
    [
        (["blocks"], "blocks.0 blocks.1"),
        (["row", "blocks"], "row.0 row.1 blocks.0 blocks.1"),
        (["named"], "named.b named.a"),
        (["middle"], "middle"),
        (["stages.1"], "stages.1"),
        (["stages.*"], "stages.0 stages.1"),
        (["stages.0.resnets"], "stages.0.resnets.0 stages.0.resnets.1"),
        (["stages.*.resnets"], "stages.0.resnets.0 stages.0.resnets.1 stages.1.resnets.0 stages.1.resnets.1"),
        (["middle.{resnets,attentions}"], "middle.resnets.0 middle.attentions.0 middle.resnets.1"),
        (
            ["stages.*.{resnets,attentions}"],
            "stages.0.resnets.0 stages.0.attentions.0 stages.0.resnets.1 stages.0.attentions.1 "
            "stages.1.resnets.0 stages.1.resnets.1",
        ),
    ],
)
def test_blocks_in_execution_order(containers, expected):
    assert block_paths(Net(), containers) == tuple(expected.split())


@pytest.mark.parametrize(
    ("containers", "words"),
    [
        (["layers"], ["Net", "layers"]),
        (["blocks.0.inner"], ["Net", "blocks.0.inner"]),
        (["stages.*.attentions"], ["Net", "stages.1.attentions"]),
        (["empty"], ["Net", "no block", "empty"]),
        (["middle.{convs,norms}"], ["Net", "no block"]),
        (["blocks", "row", "blocks"], ["Net", "blocks.0", "twice"]),
    ],
)
def test_blocks_that_are_not_there(containers, words):
    with pytest.raises(TopologyError) as caught:
        block_paths(Net(), containers)
    assert all(word in str(caught.value) for word in words)


def declaring(**attributes):
    return type("Denoiser", (nn.Module,), attributes)


def test_class_attribute():
    assert blocks_attrs_of(Net()) is None
    plural = declaring(_layerwise_offload_blocks_attrs=["transformer_blocks", "single_transformer_blocks"])
    assert blocks_attrs_of(plural) == ("transformer_blocks", "single_transformer_blocks")
    assert blocks_attrs_of(plural()) == blocks_attrs_of(type("Child", (plural,), {}))
    assert blocks_attrs_of(declaring(_layerwise_offload_blocks_attr="blocks")) == ("blocks",)
    both = declaring(_layerwise_offload_blocks_attr="old", _layerwise_offload_blocks_attrs=("new",))
    assert blocks_attrs_of(both) == ("new",)


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("_layerwise_offload_blocks_attrs", "blocks"),
        ("_layerwise_offload_blocks_attrs", []),
        ("_layerwise_offload_blocks_attrs", 3),
        ("_layerwise_offload_blocks_attrs", ["blocks", None]),
        ("_layerwise_offload_blocks_attrs", ["blocks", "blocks"]),
        ("_layerwise_offload_blocks_attrs", ["a..b"]),
        ("_layerwise_offload_blocks_attrs", [""]),
        ("_layerwise_offload_blocks_attrs", ["*"]),
        ("_layerwise_offload_blocks_attr", ["blocks"]),
        ("_layerwise_offload_blocks_attr", "a b"),
    ],
)
def test_bad_class_attribute(attribute, value):
    with pytest.raises(ConfigError, match=f"Denoiser.{attribute}"):
        blocks_attrs_of(declaring(**{attribute: value}))


def test_plan():
    plan = OffloadPlan(
        block_attrs={"transformer": ["transformer_blocks"], "unet": ["down_blocks.*.{resnets,attentions}"]},
        encoder_component_types={"prompt_model": "text_encoder"},
        encoder_block_attrs={"prompt_model": ["encoder.layers"]},
        offload_submodules={"transformer.caption": "layers"},
        resident_dit_paths=["transformer"],
        encoder_dlo_weight_replication={"prompt_model"},
        on_demand_component_paths=["vae"],
    )
    assert plan.block_attrs["transformer"] == ("transformer_blocks",)
    assert plan.offload_submodules["transformer.caption"] == ("layers",)
    assert plan.encoder_dlo_weight_replication == ("prompt_model",)
    assert pickle.loads(pickle.dumps(plan)) == plan == copy.deepcopy(plan)
    assert len({plan, copy.deepcopy(plan)}) == 1
    assert OffloadPlan().resident_dit_paths is None
    with pytest.raises(AttributeError):
        plan.resident_dit_paths = None
    with pytest.raises(TypeError):
        plan.block_attrs["x"] = ("y",)


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("block_attrs", ["transformer"], "['transformer']"),
        ("block_attrs", {"transformer": "blocks"}, "'blocks'"),
        ("block_attrs", {"transformer": []}, "[]"),
        ("block_attrs", {"": ["blocks"]}, "''"),
        ("block_attrs", {3: ["blocks"]}, "3"),
        ("block_attrs", {"transformer": ["blocks", 1]}, "1"),
        ("encoder_component_types", {"prompt_model": "vae"}, "'vae'"),
        ("encoder_component_types", "text_encoder", "'text_encoder'"),
        ("encoder_block_attrs", {"prompt_model": {"layers": 1}}, "{'layers': 1}"),
        ("encoder_block_attrs", None, "None"),
        ("offload_submodules", {"transformer.caption": 2}, "2"),
        ("resident_dit_paths", "transformer", "'transformer'"),
        ("resident_dit_paths", ["transformer", "transformer"], "'transformer'"),
        ("encoder_dlo_weight_replication", [None], "None"),
        ("on_demand_component_paths", 1, "1"),
    ],
)
def test_bad_plan(field, value, shown):
    with pytest.raises(ConfigError) as caught:
        OffloadPlan(**{field: value})
    assert caught.value.field.startswith(f"OffloadPlan.{field}")
    assert f" = {shown} is not accepted" in str(caught.value)


def test_a_path_is_a_denoiser_or_an_encoder():
    with pytest.raises(ConfigError, match="not declared as encoders"):
        OffloadPlan(block_attrs={"model": ["layers"]}, encoder_component_types={"model": "text_encoder"})


class Pipeline:
    _dit_modules: ClassVar = ["transformer", "refiner.transformer"]
    _encoder_modules = ("text_encoder",)
    _vae_modules: ClassVar = []
    _resident_modules: ClassVar = ["image_encoder"]
    _offload_plan = OffloadPlan(block_attrs={"transformer": ("blocks",)})


def test_pipeline_declarations():
    pipeline = Pipeline()
    assert isinstance(pipeline, SupportsComponentDiscovery)
    assert component_lists_of(pipeline) == ComponentLists(
        dit=("transformer", "refiner.transformer"), encoder=("text_encoder",), resident=("image_encoder",)
    )
    assert plan_of(pipeline) is Pipeline._offload_plan


def test_silent_and_half_silent_pipelines():
    assert component_lists_of(object()) is None and plan_of(object()) is None
    half = type("Half", (), {"_dit_modules": ["transformer"]})()
    assert component_lists_of(half) == ComponentLists(dit=("transformer",))
    assert not isinstance(half, SupportsComponentDiscovery)


@pytest.mark.parametrize(
    ("attributes", "field"),
    [
        ({"_dit_modules": "transformer"}, "_dit_modules"),
        ({"_dit_modules": ["transformer", 2]}, "_dit_modules[1]"),
        ({"_vae_modules": ["vae", "vae"]}, "_vae_modules[1]"),
        ({"_dit_modules": ["model"], "_encoder_modules": ["model"]}, "_encoder_modules"),
        ({"_resident_modules": {"a": 1}}, "_resident_modules"),
    ],
)
def test_bad_component_lists(attributes, field):
    with pytest.raises(ConfigError) as caught:
        component_lists_of(type("Pipeline", (), attributes)())
    assert caught.value.field == f"Pipeline.{field}"


def test_a_plan_must_be_a_plan():
    pipeline = type("Pipeline", (), {"_offload_plan": {"block_attrs": {}}})()
    with pytest.raises(ConfigError, match=r"Pipeline\._offload_plan .* an OffloadPlan"):
        plan_of(pipeline)
