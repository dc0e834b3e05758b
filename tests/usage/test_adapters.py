"""LoRA adapters come and go while the pipeline is offloaded."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers.utils import logging as diffusers_logging
from peft import LoraConfig, inject_adapter_in_model
from peft.utils import get_peft_model_state_dict
from ways import WAYS, builder, every_way, offload, runner, same_story

from greenroom import testing

pytestmark = pytest.mark.filterwarnings("ignore")
TARGETS = {
    "sd3": ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj"],
    "wan22_t2v": ["to_q", "to_k", "to_v", "to_out.0"],
    "sdxl": ["to_q", "to_k", "to_v", "to_out.0"],
}
CASES = [(name, way) for name in TARGETS for way in WAYS if name == "sd3" or way in ("layerwise", "budget")]
every_case = pytest.mark.parametrize(("name", "way"), CASES)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    level = diffusers_logging.get_verbosity()
    diffusers_logging.set_verbosity_error()
    yield
    diffusers_logging.set_verbosity(level)


@functools.cache
def adapter(name: str, seed: int, rank: int = 4) -> dict[str, torch.Tensor]:
    """The weights of an adapter as a file would hold them."""
    pipe = testing.build_pipeline(name)
    component = "unet" if hasattr(pipe, "unet") else "transformer"
    module = copy.deepcopy(getattr(pipe, component))
    module.add_adapter(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS[name]), "default")
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{component}.{key}": torch.randn(value.shape, generator=generator) / 4
        for key, value in get_peft_model_state_dict(module).items()
    }


def load(pipe: Any, name: str, seed: int, rank: int = 4) -> None:
    pipe.load_lora_weights(dict(adapter(name, seed, rank)), adapter_name=f"adapter{seed}")


@every_case
def test_adapters_load_switch_scale_and_unload(emu: ModuleType, name: str, way: str) -> None:
    run = runner(name)

    def story(pipe: Any) -> Iterator[torch.Tensor]:
        yield run(pipe)
        load(pipe, name, 1)
        yield run(pipe)
        pipe.set_adapters(["adapter1"], [0.5])
        yield run(pipe)
        load(pipe, name, 2, rank=2)
        pipe.set_adapters(["adapter2"], [1.0])
        yield run(pipe)
        pipe.set_adapters(["adapter1", "adapter2"], [0.7, 0.3])
        yield run(pipe)
        pipe.delete_adapters("adapter1")
        yield run(pipe)
        pipe.disable_lora()
        yield run(pipe)
        pipe.enable_lora()
        pipe.unload_lora_weights()
        yield run(pipe)

    same_story(builder(name), story, way, chapters=6)


@every_case
def test_adapters_fuse_and_unfuse(emu: ModuleType, name: str, way: str) -> None:
    run = runner(name)

    def story(pipe: Any) -> Iterator[torch.Tensor]:
        load(pipe, name, 1)
        yield run(pipe)
        pipe.fuse_lora(lora_scale=0.75)
        yield run(pipe)
        yield run(pipe)
        pipe.unfuse_lora()
        yield run(pipe)
        pipe.fuse_lora()
        pipe.unload_lora_weights()
        yield run(pipe)

    same_story(builder(name), story, way)


@every_way
def test_an_adapter_injected_into_a_text_encoder(emu: ModuleType, way: str) -> None:
    run = runner("sdxl")

    def story(pipe: Any) -> Iterator[torch.Tensor]:
        yield run(pipe)
        config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        torch.manual_seed(5)
        inject_adapter_in_model(config, pipe.text_encoder)
        yield run(pipe)

    same_story(builder("sdxl"), story, way, chapters=2)


@every_way
def test_a_heavy_adapter(emu: ModuleType, way: str) -> None:
    """Its weights exceed those of the blocks it belongs to."""
    run = runner("sd3")

    def story(pipe: Any) -> Iterator[torch.Tensor]:
        yield run(pipe)
        load(pipe, "sd3", 1, rank=64)
        yield run(pipe)
        yield run(pipe)
        pipe.unload_lora_weights()
        yield run(pipe)

    same_story(builder("sd3"), story, way, chapters=2)


@every_way
def test_an_adapter_is_fetched_once_a_call(emu: ModuleType, way: str) -> None:
    emu.set_virtual_time(True)  # where a budget measures, it measures the same each time
    emu.set_bandwidth(1e9)
    pipe = testing.build_pipeline("sd3")
    handle = offload(pipe, way)
    run = runner("sd3")
    load(pipe, "sd3", 1)
    run(pipe)
    copied = []
    for _ in range(3):
        before = handle.report().copied
        run(pipe)
        copied.append(handle.report().copied - before)
    assert copied[0] == copied[1] == copied[2]
    if way == "budget":  # what the adapter leaves is filled with blocks, so that the rest moves fewer bytes without it
        return
    pipe.unload_lora_weights()
    run(pipe)
    before = handle.report().copied
    run(pipe)
    added = copied[0] - (handle.report().copied - before)
    nbytes = sum(t.nbytes for t in adapter("sd3", 1).values())
    assert added <= 2 * nbytes


@pytest.mark.parametrize("way", ["model-level", "layerwise"])
def test_memory_stays_flat_while_adapters_alternate(emu: ModuleType, way: str) -> None:
    pipe = testing.build_pipeline("sd3")
    offload(pipe, way)
    run = runner("sd3")
    expected: dict[int, torch.Tensor] = {}
    seen = []
    for turn in range(6):
        load(pipe, "sd3", 1 + turn % 2)
        emu.reset_peak_memory_stats()
        drawn = run(pipe)
        assert torch.equal(drawn, expected.setdefault(turn % 2, drawn))
        pipe.unload_lora_weights()
        run(pipe)
        gc.collect()
        emu.synchronize()
        seen.append((emu.memory_allocated(), emu.max_memory_allocated(), emu.pinned_stats()["current"]))
    assert len(set(seen[2:])) == 1


def test_the_report_counts_adapters(emu: ModuleType) -> None:
    pipe = testing.build_pipeline("sd3")
    handle = offload(pipe, "layerwise")
    before = handle.report()
    load(pipe, "sd3", 1)
    runner("sd3")(pipe)
    nbytes = sum(t.nbytes for t in adapter("sd3", 1).values())
    assert handle.report().device_weights >= before.device_weights + nbytes
    assert handle.report().pinned == emu.pinned_stats()["current"] >= before.pinned + nbytes


@every_way
def test_fused_projections(emu: ModuleType, way: str) -> None:
    """Diffusers puts one new layer in the place of three."""
    run = runner("sdxl")

    def story(pipe: Any) -> Iterator[torch.Tensor]:
        yield run(pipe)
        pipe.fuse_qkv_projections()
        yield run(pipe)
        pipe.unfuse_qkv_projections()
        yield run(pipe)

    same_story(builder("sdxl"), story, way)


@every_way
def test_rescan_takes_up_what_was_added(emu: ModuleType, way: str) -> None:
    pipe, plain = testing.build_pipeline("sd3"), testing.build_pipeline("sd3")
    run = runner("sd3")
    load(plain, "sd3", 1)
    handle = offload(pipe, way)
    run(pipe)
    load(pipe, "sd3", 1)
    handle.rescan()
    assert torch.equal(run(pipe), run(plain))
    handle.disable()
    assert torch.equal(run(pipe), run(plain))


@every_way
def test_weights_replaced_between_calls(emu: ModuleType, way: str) -> None:
    """New Parameter objects in the place of old ones, in a block and outside."""
    run = runner("sd3")

    def story(pipe: Any) -> Iterator[torch.Tensor]:
        yield run(pipe)
        torch.manual_seed(3)
        for layer in (pipe.transformer.transformer_blocks[1].attn.to_q, pipe.transformer.proj_out):
            layer.weight = torch.nn.Parameter(torch.randn_like(layer.weight, device="cpu") / 6)
        yield run(pipe)
        yield run(pipe)

    same_story(builder("sd3"), story, way, chapters=2)


def test_replaced_blocks_ask_for_a_rescan(emu: ModuleType) -> None:
    from greenroom import OffloadError

    pipe = testing.build_pipeline("sd3")
    handle = offload(pipe, "layerwise")
    run = runner("sd3")
    run(pipe)
    blocks = pipe.transformer.transformer_blocks
    blocks[2] = copy.deepcopy(testing.build_pipeline("sd3", seed=1).transformer.transformer_blocks[2])
    with pytest.raises(OffloadError, match=r"transformer.*rescan"):
        run(pipe)
    handle.rescan()
    plain = testing.build_pipeline("sd3")
    plain.transformer.transformer_blocks[2] = testing.build_pipeline("sd3", seed=1).transformer.transformer_blocks[2]
    assert torch.equal(run(pipe), run(plain))
