"""What is found in a pipeline, what is refused, and what is on the device while things are loaded and enabled."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
import toys
from diffusers import DiffusionPipeline
from torch import nn
from ways import controlled, runner, same_story

import greenroom
from greenroom import testing
from greenroom.loading import load_checkpoint
from greenroom.testing import encoders

every_config = pytest.mark.parametrize("config", toys.EVERY.values(), ids=toys.EVERY.keys())
PACKAGE = Path(greenroom.__file__).parent


def weights(pipe: toys.Pipeline) -> int:
    return sum(map(toys.nbytes, pipe.components.values()))


def untouched(pipe: Any) -> bool:
    return all("_hf_hook" not in vars(c) and not c._forward_pre_hooks for c in pipe.components.values())


# ---------------------------------------------------------------------- found


def test_two_lists_of_blocks_pass_through_one_ring(emu: ModuleType) -> None:
    pipe = toys.Pipeline()
    handle = greenroom.offload(pipe, toys.LAYERWISE_DIT, device="emu")
    report = {c.name: c for c in handle.report().components}
    for name in ("transformer", "transformer_2"):
        dit = getattr(pipe, name)
        assert report[name].streamed_blocks == len(dit.blocks) + len(dit.single_blocks)
        assert report[name].moved >= sum(map(toys.nbytes, (*dit.blocks, *dit.single_blocks)))
    assert handle.report().arena <= 2.1 * toys.nbytes(pipe.transformer.blocks[0])


class Renamed:
    """Components under names that say nothing, one of them absent."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.mllm = encoders.t5().eval()
        self.net = toys.DiT().eval()
        self.image_encoder = None

    @property
    def components(self) -> dict[str, Any]:
        return {"mllm": self.mllm, "net": self.net, "image_encoder": self.image_encoder}


@pytest.mark.parametrize("mode", ["module", "layer"])
def test_components_under_unusual_names(emu: ModuleType, mode: str) -> None:
    pipe = Renamed()
    tokens = torch.arange(5)[None]
    x, context = toys.inputs()
    with torch.no_grad():
        expected = pipe.mllm(tokens)[0], pipe.net(x, context)
        handle = greenroom.offload(pipe, {"mode": mode, "components": ["dit", "text_encoder"]}, device="emu")
        found = {c.name: c.role for c in handle.report().components}
        assert found == {"mllm": "text_encoder", "net": "dit"}
        for _ in range(2):
            assert torch.equal(pipe.mllm(tokens)[0].cpu(), expected[0])
            assert torch.equal(pipe.net(x, context).cpu(), expected[1])


class Stages:
    """The DiT lies one level down, in a pipeline of its own."""

    def __init__(self) -> None:
        self.first_stage = toys.Pipeline()
        self.upsampler = nn.Linear(8, 8)


class DeclaredStages(Stages):
    _dit_modules: ClassVar = ["first_stage.transformer"]
    _encoder_modules: ClassVar = ["first_stage.text_encoder"]
    _vae_modules: ClassVar = ["first_stage.vae"]


@pytest.mark.filterwarnings("ignore")
def test_a_dit_inside_a_nested_pipeline(emu: ModuleType) -> None:
    pipe = Stages()
    with pytest.raises(
        greenroom.TopologyError, match=r"'dit' was asked for and the pipeline has none; it has upsampler"
    ):
        greenroom.offload(pipe, toys.LAYERWISE_DIT, device="emu")
    declared = DeclaredStages()
    x, context = toys.inputs()
    with torch.no_grad():
        expected = declared.first_stage.transformer(x, context)
        handle = greenroom.offload(declared, toys.LAYERWISE_DIT, device="emu")
        assert torch.equal(declared.first_stage.transformer(x, context).cpu(), expected)
    dit = next(c for c in handle.report().components if c.name == "first_stage.transformer")
    assert dit.streamed_blocks == dit.blocks == 7


class EncodeOnly(toys.Pipeline):
    """The later components are absent."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = self.transformer_2 = self.vae = None  # type: ignore[assignment]

    @torch.no_grad()
    def __call__(self, device: Any = "cpu") -> torch.Tensor:  # type: ignore[override]
        tokens = torch.arange(6)[None]
        embeds = self.text_encoder(tokens) + self.text_encoder_2(tokens)
        self.maybe_free_model_hooks()
        return embeds.cpu()


def test_the_last_component_leaves_though_the_later_ones_are_absent(emu: ModuleType) -> None:
    pipe = EncodeOnly()
    expected = pipe()
    before = emu.memory_allocated()
    greenroom.offload(pipe, {"mode": "module"}, device="emu")
    for _ in range(2):
        assert torch.equal(pipe("emu"), expected)
        emu.synchronize()
        assert emu.memory_allocated() - before < 0.1 * weights(pipe)


class Handover(toys.Pipeline):
    """Two experts of unequal use: the boundary may lie at either end."""

    boundary = 2

    @torch.no_grad()
    def __call__(self, device: Any = "cpu", steps: int = 4, seed: int = 0) -> torch.Tensor:
        x = torch.ones(1, 6, toys.WIDTH, device=device)
        for step in range(steps):
            dit = self.transformer if step < self.boundary else self.transformer_2
            x = dit(x, {"embeds": [torch.zeros(1, 6, toys.WIDTH, device=device)]})
            if self.between is not None:
                self.between(step, x)
        self.maybe_free_model_hooks()
        return x.cpu()


@pytest.mark.parametrize("boundary", [0, 2, 4])
@pytest.mark.parametrize("mode", ["module", "layer"])
def test_two_experts_hand_over(emu: ModuleType, mode: str, boundary: int) -> None:
    pipe = Handover(blocks=10, single=6)
    pipe.boundary = boundary
    if boundary == 0:
        pipe.transformer = None  # type: ignore[assignment]
    expected = pipe()
    one = toys.nbytes(pipe.transformer_2)
    before = emu.memory_allocated()
    handle = greenroom.offload(pipe, {"mode": mode, "components": ["dit"]}, device="emu")
    others = sum(c.resident for c in handle.report().components)
    seen: list[int] = []
    pipe.between = lambda step, x: (emu.synchronize(), seen.append(emu.memory_allocated()))
    emu.reset_peak_memory_stats()
    for _ in range(2):
        assert torch.equal(pipe("emu"), expected)
    assert max(seen) - before <= others + 1.05 * one
    assert emu.max_memory_allocated() - before <= others + 1.2 * one  # with activations; two would be 2.0
    if mode == "layer" and boundary == 2:
        assert handle.report().misses <= 2  # the ring goes on across the boundary


def test_a_controlnet_in_every_step_beside_a_streamed_dit(emu: ModuleType) -> None:
    from PIL import Image

    picture = Image.radial_gradient("L").resize((64, 64)).convert("RGB")

    def story(pipe: Any) -> Any:
        for _ in range(2):
            yield runner("sdxl")(pipe, image=picture)

    def build() -> Any:
        return controlled(testing.build_pipeline("sdxl"))

    same_story(build, story, "layerwise")
    pipe = build()
    before = emu.memory_allocated()
    handle = greenroom.offload(pipe, {"mode": "module", "components": ["dit", "text_encoder", "vae"]}, device="emu")
    runner("sdxl")(pipe, image=picture)
    emu.synchronize()
    assert emu.memory_allocated() - before <= sum(c.resident for c in handle.report().components) + 2**16
    assert next(c for c in handle.report().components if c.name == "controlnet").placement == "swap"


def test_nothing_depends_on_libraries_for_adapters() -> None:
    """Versions of peft, bitsandbytes or torchao cannot break what does not look at them."""
    foreign = re.compile(r"^(peft|bitsandbytes|torchao|optimum|gguf)(\.|$)")
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(foreign.match(name) for name in names), path


# ---------------------------------------------------------------------- refused before anything is touched


@pytest.mark.parametrize("missing", ["vae", "text_encoder", "dit"])
def test_a_component_that_is_not_there_is_refused_before_anything_is_touched(emu: ModuleType, missing: str) -> None:
    pipe = toys.Pipeline()
    for name in {"vae": ["vae"], "text_encoder": ["text_encoder", "text_encoder_2"]}.get(
        missing, ["transformer", "transformer_2"]
    ):
        setattr(pipe, name, None)
    ids = {name: (id(t), t.data_ptr()) for name, t in toys.tensors(pipe).items()}
    with pytest.raises(greenroom.TopologyError, match=rf"components: '{missing}' was asked for"):
        greenroom.offload(pipe, {"mode": "module", "components": ["dit", "text_encoder", "vae"]}, device="emu")
    assert {name: (id(t), t.data_ptr()) for name, t in toys.tensors(pipe).items()} == ids
    assert untouched(pipe)


def test_a_dit_without_blocks_is_refused_where_blocks_were_asked_for(emu: ModuleType) -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

    class Pipe:
        _dit_modules: ClassVar = ["net"]

        def __init__(self) -> None:
            self.net = Flat()

    with pytest.raises(greenroom.TopologyError, match=r"no blocks were found in net \(Flat\)"):
        greenroom.offload(Pipe(), toys.LAYERWISE_DIT, device="emu")


def test_a_block_larger_than_the_device_is_refused_with_what_would_do(emu: ModuleType) -> None:
    pipe = toys.Pipeline()
    expected = pipe()
    block = toys.nbytes(pipe.transformer.blocks[0])
    ids = {name: (id(t), t.data_ptr()) for name, t in toys.tensors(pipe).items()}
    with pytest.raises(greenroom.ConfigError, match=r"at least (\d+) bytes") as caught:
        greenroom.offload(pipe, memory=emu.memory_allocated() + block // 2, device="emu")
    assert {name: (id(t), t.data_ptr()) for name, t in toys.tensors(pipe).items()} == ids
    assert untouched(pipe)
    emu.set_capacity(emu.memory_allocated() + block)
    with pytest.raises(torch.OutOfMemoryError):
        greenroom.offload(pipe, toys.LAYERWISE, device="emu")
    assert untouched(pipe)
    assert torch.equal(pipe(), expected)
    emu.set_capacity(2**30)
    least = int(re.search(r"at least (\d+) bytes", str(caught.value)).group(1))  # type: ignore[union-attr]
    greenroom.offload(pipe, memory=least + 2**16, device="emu")
    assert torch.equal(pipe("emu"), expected)


# ---------------------------------------------------------------------- while loading and enabling


@every_config
def test_enabling_takes_off_what_it_says_and_never_brings_more(emu: ModuleType, config: dict[str, Any]) -> None:
    """At no moment of enabling is more on the device than the report says, and the weights have really left."""
    pipe = toys.Pipeline(blocks=12, single=4)
    before = emu.memory_allocated()
    emu.reset_peak_memory_stats()
    handle = greenroom.offload(pipe, config, device="emu")
    emu.synchronize()
    report = handle.report()
    assert emu.max_memory_allocated() - before <= 1.01 * report.device_weights
    moved = sum(c.moved for c in report.components)
    assert moved > 0.4 * weights(pipe)
    assert emu.memory_allocated() - before <= weights(pipe) - moved + report.arena + 2**16
    for c in report.components:
        if c.role == "dit":
            assert c.moved > 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    with testing.quiet():
        testing.build_pipeline("wan22_t2v", dtype=torch.bfloat16).save_pretrained(path)
    return path


def test_loading_takes_no_device_memory(emu: ModuleType, folder: Path) -> None:
    """Whatever is built or processed first, the other components wait on the host."""
    before = emu.memory_allocated()
    emu.reset_peak_memory_stats()
    pipe = load_checkpoint(folder).pipeline
    assert emu.max_memory_allocated() == before
    greenroom.offload(pipe, {"mode": "layer", "components": ["dit", "text_encoder"]}, device="emu")
    assert emu.max_memory_allocated() - before < sum(
        toys.nbytes(c) for c in pipe.components.values() if isinstance(c, nn.Module)
    )


def test_a_pipeline_loaded_with_a_device_map_to_the_host(emu: ModuleType, folder: Path) -> None:
    run = runner("wan22_t2v")
    with testing.quiet():
        plain, pipe = (
            DiffusionPipeline.from_pretrained(folder, dtype=torch.bfloat16, **words)
            for words in ({}, {"device_map": "cpu"})
        )
    for each in (plain, pipe):
        each.set_progress_bar_config(disable=True)
        for component in each.components.values():
            if isinstance(component, nn.Module):
                testing.realign(component)
    greenroom.offload(pipe, {"mode": "layer", "components": ["dit", "text_encoder"]}, device="emu")
    assert torch.equal(run(pipe), run(plain))


def on_the_device_only(layer: nn.Linear) -> None:
    """A quantiser whose kernel exists for the accelerator alone."""
    if layer.weight.device.type != "emu":
        raise NotImplementedError("no kernel for the host")
    with torch.no_grad():
        scale = layer.weight.abs().amax() / 127
        layer.weight.copy_((layer.weight / scale).round() * scale)


@every_config
def test_processing_that_exists_for_the_device_alone(emu: ModuleType, config: dict[str, Any]) -> None:
    plain, pipe = toys.Pipeline(), toys.Pipeline()
    for block in plain.transformer.blocks:
        block.to("emu")
        on_the_device_only(block.down)
        block.to("cpu")
    handle = greenroom.offload(pipe, config, device="emu")
    before = emu.memory_allocated()
    emu.reset_peak_memory_stats()
    for block in pipe.transformer.blocks:
        with handle.materialized(block):
            on_the_device_only(block.down)
    if config["mode"] == "layer":  # one block at a time
        assert emu.max_memory_allocated() - before < 3 * toys.nbytes(pipe.transformer.blocks[0])
    for _ in range(2):
        assert torch.equal(pipe("emu"), plain())
