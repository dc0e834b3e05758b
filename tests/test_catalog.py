"""The catalog against the installed classes: every path exists, and is listed in the order in which it runs."""

from __future__ import annotations

from collections import Counter

import diffusers
import pytest
import torch
import transformers
from torch import nn

from greenroom import testing
from greenroom.catalog import CATALOG, lookup
from greenroom.declare import block_paths


def on_meta(name: str) -> nn.Module:
    """The class with its default (for the large ones: published) configuration, without memory for weights."""
    with torch.device("meta"):
        if hasattr(diffusers, name):
            return getattr(diffusers, name)()
        cls = getattr(transformers, name)
        return cls(cls.config_class())


@pytest.mark.parametrize("name", CATALOG)
def test_every_declaration_fits_the_installed_class(name):
    declaration = CATALOG[name]
    module = on_meta(name)
    assert lookup(module) is declaration
    blocks = block_paths(module, declaration.blocks)
    occasional = block_paths(module, declaration.occasional_blocks)
    assert not set(blocks) & set(occasional)
    for method in declaration.hold:
        assert callable(getattr(module, method))
    for path in declaration.resident:
        assert module.get_submodule(path) is not None
    if declaration.role in ("dit", "text_encoder"):
        assert len(blocks) > 1
        assert len({type(module.get_submodule(path)) for path in blocks}) <= 3
    else:
        assert not blocks
    if declaration.role == "dit":
        inside = sum(p.numel() for path in blocks for p in module.get_submodule(path).parameters())
        assert inside > 0.9 * sum(p.numel() for p in module.parameters())


def test_subclasses_inherit_and_namesakes_do_not():
    class Mine(transformers.CLIPTextModel):
        pass

    with torch.device("meta"):
        assert lookup(Mine(transformers.CLIPTextConfig())) is CATALOG["CLIPTextModel"]
    namesake = type("FluxTransformer2DModel", (nn.Module,), {})
    assert lookup(namesake()) is None
    assert lookup(nn.Linear(2, 2)) is None


def record_block_order(component: nn.Module, paths: tuple[str, ...]) -> list[list[str]]:
    """One list of block names for each forward of ``component``, filled while it runs."""
    forwards: list[list[str]] = []
    component.register_forward_pre_hook(lambda *_: forwards.append([]))
    for path in paths:
        component.get_submodule(path).register_forward_pre_hook(lambda *_, path=path: forwards[-1].append(path))
    return forwards


@pytest.mark.parametrize("name", testing.ARCHITECTURES)
def test_blocks_run_once_each_in_the_declared_order(name):
    pipe = testing.build_pipeline(name)
    components = {key: item for key, item in pipe.components.items() if isinstance(item, nn.Module)}
    roles = Counter(lookup(component).role for component in components.values())
    assert roles["dit"] == (2 if name.startswith("wan") else 1) and roles["vae"] >= 1
    recorded = {}
    for key, component in components.items():
        declaration = lookup(component)
        paths = block_paths(component, (*declaration.blocks, *declaration.occasional_blocks))
        expected = block_paths(component, declaration.blocks)
        recorded[key] = (list(expected), record_block_order(component, paths))
    testing.run(pipe, name)
    for key, (expected, forwards) in recorded.items():
        if lookup(components[key]).role == "vae":
            continue
        assert forwards, key
        assert all(order == expected for order in forwards), key


def test_flux_blocks_run_in_the_declared_order():
    model = diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        axes_dims_rope=(2, 2, 4),
    )
    expected = block_paths(model, lookup(model).blocks)
    forwards = record_block_order(model, expected)
    model(
        hidden_states=torch.zeros(1, 4, 4),
        encoder_hidden_states=torch.zeros(1, 3, 8),
        pooled_projections=torch.zeros(1, 8),
        timestep=torch.zeros(1),
        img_ids=torch.zeros(4, 3),
        txt_ids=torch.zeros(3, 3),
    )
    assert forwards == [list(expected)]
    assert len(expected) == 5


def test_every_unet_resnet_and_attention_is_streamed():
    unet = testing.build_pipeline("sdxl").unet
    streamed = set(block_paths(unet, lookup(unet).blocks))
    stages = [*unet.down_blocks, unet.mid_block, *unet.up_blocks]
    lists = [part for stage in stages for part in (stage.resnets, getattr(stage, "attentions", []))]
    assert {id(unet.get_submodule(path)) for path in streamed} == {id(block) for part in lists for block in part}
