"""Pipelines that share components; moving, copying and saving a pipeline that is offloaded."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers import (
    DiffusionPipeline,
    SD3ControlNetModel,
    StableDiffusion3ControlNetPipeline,
    StableDiffusion3Img2ImgPipeline,
    StableDiffusion3InpaintPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLInpaintPipeline,
)
from PIL import Image
from ways import WAYS, controlled, draw, every_way, modules, offload, runner, same_story, words_for

import greenroom
from greenroom import OffloadConfig, OffloadError, TopologyError, testing

pytestmark = pytest.mark.filterwarnings("ignore")
PICTURE = Image.radial_gradient("L").resize((64, 64)).convert("RGB")
MASK = Image.linear_gradient("L").resize((64, 64))
CALL = {"prompt": "a red cube", "num_inference_steps": 3, "height": 64, "width": 64}


def text2img(pipe: Any) -> torch.Tensor:
    return draw(pipe, **CALL)


def img2img(pipe: Any) -> torch.Tensor:
    call = {k: v for k, v in CALL.items() if k not in ("height", "width")}
    return draw(pipe, **call, image=PICTURE, strength=0.9)


def inpaint(pipe: Any) -> torch.Tensor:
    return draw(pipe, **CALL, image=PICTURE, mask_image=MASK, strength=0.9)


def controlnet(pipe: Any) -> torch.Tensor:
    return draw(pipe, **CALL, image=PICTURE, controlnet_conditioning_scale=0.8)


FAMILIES: dict[str, list[tuple[type, Callable[[Any], torch.Tensor]]]] = {
    "sdxl": [(StableDiffusionXLImg2ImgPipeline, img2img), (StableDiffusionXLInpaintPipeline, inpaint)],
    "sd3": [(StableDiffusion3Img2ImgPipeline, img2img), (StableDiffusion3InpaintPipeline, inpaint)],
}


def family(name: str) -> list[tuple[Any, Callable[[Any], torch.Tensor]]]:
    base = testing.build_pipeline(name)
    relatives = [(base, text2img)]
    for cls, call in FAMILIES[name]:
        relative = cls.from_pipe(base)
        relative.set_progress_bar_config(disable=True)
        relatives.append((relative, call))
    return relatives


@every_way
@pytest.mark.parametrize("name", FAMILIES)
def test_relatives_of_an_offloaded_pipeline(emu: ModuleType, name: str, way: str) -> None:
    """Image to image and inpainting on the same components, of which only one pipeline was offloaded."""
    expected = [call(pipe) for pipe, call in family(name)]
    relatives = family(name)
    handle = offload(relatives[0][0], way)
    for _ in range(2):
        for (pipe, call), value in zip(relatives, expected, strict=True):
            assert torch.equal(call(pipe), value)
            named = handle.report().arena + sum(c.resident for c in handle.report().components)
            assert emu.memory_allocated() <= named + 2**16  # what takes turns has left, whoever called
    handle.disable()
    assert all(type(p).__dict__ is not None and "maybe_free_model_hooks" not in vars(p) for p, _ in relatives)
    assert torch.equal(relatives[1][1](relatives[1][0]), expected[1])


@every_way
def test_relatives_that_are_offloaded_themselves(emu: ModuleType, way: str) -> None:
    expected = [call(pipe) for pipe, call in family("sdxl")]
    relatives = family("sdxl")
    words = words_for(relatives[0][0], way)  # the same for all: other words would replace the first one's offload
    handles = [greenroom.offload(pipe, **words, device="emu") for pipe, _ in relatives]
    for (pipe, call), value in zip([*relatives, *reversed(relatives)], [*expected, *reversed(expected)], strict=True):
        assert torch.equal(call(pipe), value)
    assert all(h.enabled for h in handles)
    handles[1].disable()
    assert not any(h.enabled for h in handles)
    assert emu.pinned_stats()["current"] == 0
    for (pipe, call), value in zip(relatives, expected, strict=True):
        assert torch.equal(call(pipe), value)


@every_way
def test_a_controlnet_beside_an_offloaded_dit(emu: ModuleType, way: str) -> None:
    def build() -> Any:
        base = testing.build_pipeline("sd3")
        net = SD3ControlNetModel.from_transformer(base.transformer, num_layers=3, num_extra_conditioning_channels=0)
        testing.randomise(net.eval(), seed=9)
        pipe = StableDiffusion3ControlNetPipeline(**base.components, controlnet=net)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def story(pipe: Any) -> Any:
        for strength in (0.8, 0.0, 0.8):
            torch.manual_seed(7)  # this pipeline encodes the picture with noise of the global generator
            yield draw(pipe, **CALL, control_image=PICTURE, controlnet_conditioning_scale=strength)

    same_story(build, story, way, chapters=2)


@every_way
@pytest.mark.parametrize("first", ["base", "relative"])
def test_a_relative_with_a_component_of_its_own(emu: ModuleType, way: str, first: str) -> None:
    """Text to image, and a ControlNet pipeline around the same components: offloaded in either order."""
    base = testing.build_pipeline("sdxl")
    relative = controlled(base)
    expected = text2img(base), controlnet(relative)
    pair = (base, relative) if first == "base" else (relative, base)
    handles = [offload(pipe, way) for pipe in pair]
    for _ in range(2):
        assert torch.equal(text2img(base), expected[0])
        assert torch.equal(controlnet(relative), expected[1])
    assert way == "budget" or handles[0].enabled  # other words for the second one replace the first's
    assert {c.name for c in handles[1].report().components} >= {"unet", "controlnet", "vae"}
    handles[1].disable()
    assert not handles[0].enabled
    assert torch.equal(text2img(base), expected[0])
    assert torch.equal(controlnet(relative), expected[1])


def test_a_component_that_came_later_is_named(emu: ModuleType) -> None:
    base = testing.build_pipeline("sdxl")
    handle = offload(base, "layerwise")
    relative = controlled(base)
    with pytest.raises(OffloadError, match=r"controlnet.*cpu.*greenroom\.offload"):
        controlnet(relative)
    greenroom.offload(relative, WAYS["layerwise"]["config"], device="emu")
    plain = testing.build_pipeline("sdxl")
    assert torch.equal(controlnet(relative), controlnet(controlled(plain)))
    assert torch.equal(text2img(base), text2img(plain))
    assert handle.enabled


def test_a_replaced_component_is_named(emu: ModuleType) -> None:
    pipe = testing.build_pipeline("sdxl")
    handle = offload(pipe, "layerwise")
    text2img(pipe)
    pipe.unet = testing.build_pipeline("sdxl", seed=1).unet
    with pytest.raises(OffloadError, match=r"unet.*came to the pipeline later"):
        text2img(pipe)
    handle.rescan()
    plain = testing.build_pipeline("sdxl")
    plain.unet = testing.build_pipeline("sdxl", seed=1).unet
    assert torch.equal(text2img(pipe), text2img(plain))


# ---------------------------------------------------------------------- moving


@every_way
def test_moving_to_the_device_it_computes_on_changes_nothing(emu: ModuleType, way: str) -> None:
    pipe = testing.build_pipeline("sd3")
    expected = text2img(pipe)
    offload(pipe, way)
    allocated = emu.memory_allocated()
    for device in ("emu", "emu:0", torch.device("emu", 0)):
        pipe.to(device)
        pipe.transformer.to(device=device)
    assert emu.memory_allocated() == allocated
    assert torch.equal(text2img(pipe), expected)


@every_way
@pytest.mark.parametrize(
    "move", [lambda p: p.to("cpu"), lambda p: p.transformer.to("cpu"), lambda p: p.text_encoder.cpu()]
)
def test_moving_elsewhere_is_refused_as_a_whole(emu: ModuleType, way: str, move: Callable[[Any], Any]) -> None:
    pipe = testing.build_pipeline("sd3")
    expected = text2img(pipe)
    handle = offload(pipe, way)
    for _ in range(2):
        with pytest.raises(OffloadError, match=r"handle\.disable\(\)"):
            move(pipe)
        assert torch.equal(text2img(pipe), expected)
    handle.disable()
    move(pipe)


@every_way
def test_moving_the_pipeline_elsewhere_in_the_middle_of_a_call_is_refused(emu: ModuleType, way: str) -> None:
    pipe = testing.build_pipeline("sd3")
    expected = text2img(pipe)
    offload(pipe, way)
    refused: list[int] = []

    def move(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        with pytest.raises(OffloadError, match=r"handle\.disable\(\)"):
            pipe.to("cpu")
        refused.append(step)
        return {}

    assert torch.equal(draw(pipe, **CALL, callback_on_step_end=move), expected)
    assert refused == [0, 1, 2]
    assert torch.equal(text2img(pipe), expected)


@every_way
def test_casting_while_offloaded(emu: ModuleType, way: str) -> None:
    plain, pipe = testing.build_pipeline("sd3"), testing.build_pipeline("sd3")
    handle = offload(pipe, way)
    text2img(pipe)
    for each in (plain, pipe):
        each.to(torch.bfloat16)
    expected = text2img(plain)
    assert torch.equal(text2img(pipe), expected)
    assert torch.equal(text2img(pipe), expected)
    handle.disable()
    assert torch.equal(text2img(pipe), expected)


@pytest.mark.parametrize(
    "method", ["enable_model_cpu_offload", "enable_sequential_cpu_offload", "enable_group_offload"]
)
def test_another_offloading_after_ours_is_refused(emu: ModuleType, method: str) -> None:
    pipe = testing.build_pipeline("sd3")
    expected = text2img(pipe)
    handle = offload(pipe, "layerwise")
    words: dict[str, Any] = {"device": "emu"}
    if method == "enable_group_offload":
        words = {"onload_device": torch.device("emu"), "offload_type": "leaf_level"}
    with pytest.raises(OffloadError, match=r"offloaded.*handle\.disable\(\)"):
        getattr(pipe, method)(**words)
    assert torch.equal(text2img(pipe), expected)
    handle.disable()
    assert torch.equal(text2img(pipe), expected)


def test_ours_after_another_offloading(emu: ModuleType) -> None:
    pipe = testing.build_pipeline("sd3")
    expected = text2img(pipe)
    pipe.enable_model_cpu_offload(device="emu")
    with pytest.raises(TopologyError, match="remove_all_hooks"):
        greenroom.offload(pipe, WAYS["layerwise"]["config"], device="emu")
    assert torch.equal(text2img(pipe), expected)
    pipe.remove_all_hooks()
    pipe.to("cpu")
    offload(pipe, "layerwise")
    assert torch.equal(text2img(pipe), expected)


def test_group_offloading_before_ours_is_refused_by_name(emu: ModuleType) -> None:
    pipe = testing.build_pipeline("sd3")
    pipe.transformer.enable_group_offload(onload_device=torch.device("emu"), offload_type="leaf_level")
    with pytest.raises(TopologyError, match=r"transformer.*group-offloaded"):
        greenroom.offload(pipe, WAYS["layerwise"]["config"], device="emu")


def test_a_hook_of_another_library_is_no_offloading(emu: ModuleType) -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    pipe = testing.build_pipeline("sd3")
    expected = text2img(pipe)
    add_hook_to_module(pipe.transformer, AlignDevicesHook(io_same_device=False))
    hook = pipe.transformer._hf_hook
    handle = offload(pipe, "layerwise")
    assert torch.equal(text2img(pipe), expected)
    handle.disable()
    assert pipe.transformer._hf_hook is hook
    assert torch.equal(text2img(pipe), expected)


# ---------------------------------------------------------------------- copying and saving


@every_way
def test_a_saved_pipeline_is_whole(emu: ModuleType, way: str, tmp_path: Any) -> None:
    pipe = testing.build_pipeline("wan22_t2v", dtype=torch.bfloat16)
    run = runner("wan22_t2v")
    expected = run(pipe)
    state = {n: {k: v.clone() for k, v in c.state_dict().items()} for n, c in pipe.components.items() if has_state(c)}
    offload(pipe, way)
    run(pipe)
    for name, values in state.items():
        found = getattr(pipe, name).state_dict()
        assert found.keys() == values.keys()
        assert all(torch.equal(found[k].cpu(), v) for k, v in values.items())
    with testing.quiet():
        pipe.save_pretrained(tmp_path)
        again = DiffusionPipeline.from_pretrained(tmp_path, dtype=torch.bfloat16)
    again.set_progress_bar_config(disable=True)
    for component in modules(again):
        testing.realign(component)
    assert torch.equal(run(again), expected)
    assert torch.equal(run(pipe), expected)


def has_state(component: Any) -> bool:
    return isinstance(component, torch.nn.Module)


@every_way
def test_weights_loaded_into_an_offloaded_component(emu: ModuleType, way: str) -> None:
    pipe, other = testing.build_pipeline("sd3"), testing.build_pipeline("sd3", seed=1)
    offload(pipe, way)
    text2img(pipe)
    pipe.transformer.load_state_dict(other.transformer.state_dict())
    plain = testing.build_pipeline("sd3")
    plain.transformer = other.transformer
    assert torch.equal(text2img(pipe), text2img(plain))


@every_way
def test_a_deep_copy_is_a_plain_pipeline(emu: ModuleType, way: str) -> None:
    pipe = testing.build_pipeline("sd3")
    expected = text2img(pipe)
    handle = offload(pipe, way)
    text2img(pipe)
    twin = copy.deepcopy(pipe)
    assert {t.device.type for c in modules(twin) for t in (*c.parameters(), *c.buffers())} == {"cpu"}
    for component in modules(twin):
        testing.realign(component)
    copies = handle.report().copied
    assert torch.equal(text2img(twin), expected)
    assert handle.report().copied == copies
    twin_handle = offload(twin, way)
    assert torch.equal(text2img(twin), expected)
    assert torch.equal(text2img(pipe), expected)
    handle.disable()
    assert twin_handle.enabled
    del pipe
    gc.collect()
    assert torch.equal(text2img(twin), expected)


def test_pickling_an_offloaded_module_is_refused_by_name(emu: ModuleType) -> None:
    pipe = testing.build_pipeline("sd3")
    handle = offload(pipe, "layerwise")
    for component in (pipe.transformer, pipe.vae):
        with pytest.raises(OffloadError, match=r"pickled.*handle\.disable\(\)"):
            pickle.dumps(component)
    handle.disable()
    weights = pickle.loads(pickle.dumps(pipe.vae)).state_dict()
    assert all(torch.equal(weights[k], v) for k, v in pipe.vae.state_dict().items())


def test_configurations_are_copied_and_pickled(emu: ModuleType) -> None:
    pipe = testing.build_pipeline("sd3")
    expected = text2img(pipe)
    config = greenroom.offload(pipe, WAYS["layerwise with residents"]["config"], device="emu").config
    for other in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert isinstance(other, OffloadConfig)
        assert other == config
        greenroom.offload(pipe, other, device="emu")
        assert torch.equal(text2img(pipe), expected)
