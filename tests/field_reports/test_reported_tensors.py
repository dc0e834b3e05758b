"""Buffers, parameters outside any layer, tied weights, and components that are not plain modules."""

from __future__ import annotations

import copy
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import safetensors.torch
import torch
import toys
from torch import nn

import greenroom

every_config = pytest.mark.parametrize("config", toys.EVERY.values(), ids=toys.EVERY.keys())


# ---------------------------------------------------------------------- outside of blocks and layers


class Rooted(nn.Module):
    """Parameters and buffers hang on the model itself."""

    _layerwise_offload_blocks_attrs: ClassVar = ["blocks"]

    def __init__(self) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.randn(1, 4, toys.WIDTH))
        self.register_buffer("freqs", torch.randn(toys.WIDTH))
        self.register_buffer("steps", torch.zeros(1), persistent=False)
        self.blocks = nn.ModuleList(toys.Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        x = x + self.pos_embed * self.steps + self.freqs
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(("mode", "placement"), [("module", "swap"), ("layer", "stream")])
def test_what_hangs_on_the_root_hinders_no_strategy(emu: ModuleType, mode: str, placement: str) -> None:
    torch.manual_seed(0)
    plain = Rooted()
    pipe = toys.only(copy.deepcopy(plain))
    x = torch.randn(1, 4, toys.WIDTH)
    with torch.no_grad():
        handle = greenroom.offload(pipe, {"mode": mode, "components": ["dit"]}, device="emu")
        for _ in range(3):
            assert torch.equal(pipe.transformer(x).cpu(), plain(x))
        (component,) = handle.report().components
        assert component.placement == placement
        assert component.moved >= 0.9 * component.weights
        if mode == "layer":
            found = (pipe.transformer.pos_embed, pipe.transformer.freqs, pipe.transformer.steps)
            assert {t.device.type for t in found} == {"emu"}
        handle.disable()
    assert pipe.transformer.steps.item() == 3


class Checker(nn.Module):
    """Bare parameters that are used in arithmetic, beside a child."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.Linear(toys.WIDTH, 32)
        self.concepts = nn.Parameter(torch.randn(17, 32))
        self.weights = nn.Parameter(torch.rand(17))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        seen = self.vision(images)
        return (nn.functional.normalize(seen) @ nn.functional.normalize(self.concepts).t()) - self.weights


@pytest.mark.parametrize("words", [*toys.EVERY.values(), None], ids=[*toys.EVERY.keys(), "budget"])
def test_bare_parameters_of_a_component_that_nobody_knows(emu: ModuleType, words: dict[str, Any] | None) -> None:
    pipe = toys.Pipeline()
    pipe.safety_checker = Checker().eval()  # type: ignore[attr-defined]
    parts = {**pipe.components, "safety_checker": pipe.safety_checker}  # type: ignore[attr-defined]
    holder = nn.Module()
    for name, part in parts.items():
        holder.add_module(name, part)
    x = torch.randn(2, toys.WIDTH)
    with torch.no_grad():
        expected = holder.safety_checker(x)
        weights = sum(map(toys.nbytes, parts.values()))
        memory = {} if words else {"memory": emu.memory_allocated() + weights // 2}
        handle = greenroom.offload(holder, words, device="emu", **memory)
        for _ in range(2):
            assert torch.equal(holder.safety_checker(x).cpu(), expected)
    report = next(c for c in handle.report().components if c.name == "safety_checker")
    assert report.weights == toys.nbytes(holder.safety_checker)


class Wrapper:
    """Holds a model and looks like one, and is none."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def parameters(self) -> Any:
        return self.model.parameters()

    def __call__(self, *args: Any) -> Any:
        return self.model(*args)


def test_a_component_that_is_no_module_is_named(emu: ModuleType) -> None:
    pipe = toys.Pipeline()
    pipe.transformer_2 = Wrapper(pipe.transformer_2)  # type: ignore[assignment]
    with pytest.warns(UserWarning, match=r"transformer_2.*Wrapper.*not a torch\.nn\.Module"):
        handle = greenroom.offload(pipe, toys.LAYERWISE, device="emu")
    assert "transformer_2" not in {c.name for c in handle.report().components}


# ---------------------------------------------------------------------- tied weights


class Tied(toys.Pipeline):
    """One matrix in a text encoder, once more in it, in the other encoder and in a block of the DiT."""

    def __init__(self) -> None:
        super().__init__()
        self.text_encoder_2.embed.weight = self.text_encoder.embed.weight
        self.text_encoder_2.head.weight = self.text_encoder.embed.weight
        self.transformer.blocks[1].down.weight = self.text_encoder.layers[0].down.weight
        self.transformer.blocks[3].down.weight = self.text_encoder.layers[0].down.weight


@pytest.mark.parametrize("words", [*toys.EVERY.values(), None], ids=[*toys.EVERY.keys(), "budget"])
def test_weights_tied_across_components_and_blocks(emu: ModuleType, words: dict[str, Any] | None) -> None:
    pipe = Tied()
    expected = pipe()
    ids = {name: id(t) for name, t in toys.tensors(pipe).items()}
    weights = sum({id(t): t.nbytes for t in toys.tensors(pipe).values()}.values())
    memory = {} if words else {"memory": emu.memory_allocated() + weights // 2}
    handle = greenroom.offload(pipe, words, device="emu", **memory)
    emu.set_bandwidth(20e6)  # a copy that is half there would be seen
    for _ in range(2):
        assert torch.equal(pipe("emu"), expected)
    assert emu.pinned_stats()["current"] <= 1.1 * weights  # one master for all its places
    assert {name: id(t) for name, t in toys.tensors(pipe).items()} == ids
    handle.disable()
    assert {name: id(t) for name, t in toys.tensors(pipe).items()} == ids
    assert torch.equal(pipe(), expected)


def test_a_tied_weight_is_on_the_device_once(emu: ModuleType) -> None:
    pipe = nn.Module()
    pipe.text_encoder = toys.Encoder(2).eval()
    before = emu.memory_allocated()
    handle = greenroom.offload(pipe, toys.LAYERWISE | {"components": ["text_encoder"]}, device="emu")
    tokens = torch.arange(5)[None]
    with torch.no_grad():
        pipe.text_encoder.generate(tokens)
    emu.synchronize()
    arena = handle.report().arena
    embedding = pipe.text_encoder.embed.weight.nbytes
    assert embedding <= emu.memory_allocated() - before - arena <= 1.1 * embedding


@every_config
def test_weights_tied_while_offloaded(emu: ModuleType, config: dict[str, Any]) -> None:
    def tie(pipe: toys.Pipeline) -> None:
        pipe.text_encoder_2.head.weight = pipe.text_encoder_2.embed.weight
        pipe.transformer.blocks[2].down.weight = pipe.transformer.blocks[0].down.weight

    plain, pipe = toys.Pipeline(), toys.Pipeline()
    for each in (plain, pipe):
        torch.manual_seed(4)
        each.text_encoder_2.head.weight = nn.Parameter(torch.randn_like(each.text_encoder_2.embed.weight))
    handle = greenroom.offload(pipe, config, device="emu")
    pipe("emu")
    for each in (plain, pipe):
        tie(each)
    for _ in range(2):
        assert torch.equal(pipe("emu"), plain())
        assert pipe.transformer.blocks[2].down.weight is pipe.transformer.blocks[0].down.weight
    assert len(pipe.transformer.state_dict()) == len(plain.transformer.state_dict())
    handle.disable()
    assert pipe.text_encoder_2.head.weight is pipe.text_encoder_2.embed.weight
    assert pipe.transformer.blocks[2].down.weight is pipe.transformer.blocks[0].down.weight
    assert torch.equal(pipe(), plain())


class TwoTies(toys.DiT):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].down.weight = self.blocks[0].down.weight
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight


@every_config
def test_every_group_of_tied_weights_is_saved_as_one(emu: ModuleType, config: dict[str, Any], tmp_path: Path) -> None:
    pipe = toys.Pipeline()
    pipe.transformer = TwoTies().eval()
    expected = {k: v.clone() for k, v in pipe.transformer.state_dict().items()}
    greenroom.offload(pipe, config, device="emu")
    pipe("emu")
    torch.save(pipe.transformer.state_dict(), tmp_path / "weights.pt")
    saved = torch.load(tmp_path / "weights.pt", map_location="cpu")
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[k], expected[k]) for k in expected)
    for one, other in (("blocks.0.down", "blocks.2.down"), ("first", "last")):
        assert saved[f"{one}.weight"].data_ptr() == saved[f"{other}.weight"].data_ptr()
    safetensors.torch.save_model(pipe.transformer, str(tmp_path / "weights.safetensors"))
    again = TwoTies()
    safetensors.torch.load_model(again, str(tmp_path / "weights.safetensors"))
    assert all(torch.equal(again.state_dict()[k], expected[k]) for k in expected)


def test_one_tensor_is_saved_without_its_neighbours(emu: ModuleType, tmp_path: Path) -> None:
    pipe = toys.Pipeline()
    greenroom.offload(pipe, toys.LAYERWISE, device="emu")
    weight = pipe.transformer.blocks[0].down.weight
    torch.save(weight, tmp_path / "weight.pt")
    assert (tmp_path / "weight.pt").stat().st_size < 1.1 * weight.nbytes
