"""What happens inside and around the denoising loop of an offloaded pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import diffusers
import pytest
import torch
import toys
from diffusers.hooks import (
    FasterCacheConfig,
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
)
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection
from ways import builder, draw, every_way, offload, runner, same_story

import greenroom
from greenroom import testing

pytestmark = pytest.mark.filterwarnings("ignore")


@every_way
def test_ip_adapter_loaded_before_and_after(emu: ModuleType, way: str) -> None:
    run = runner("sdxl")
    image = torch.rand(1, 3, 28, 28, generator=torch.Generator().manual_seed(0))

    def build() -> Any:
        pipe = testing.build_pipeline("sdxl")
        torch.manual_seed(2)
        config = CLIPVisionConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=28,
            patch_size=7,
        )
        encoder = CLIPVisionModelWithProjection(config).eval()
        pipe.register_modules(image_encoder=encoder, feature_extractor=lambda images, return_tensors: None)
        return pipe

    def adapt(pipe: Any) -> None:
        generator = torch.Generator().manual_seed(3)
        width, tokens = pipe.unet.config.cross_attention_dim, 4

        def made(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator) / 8

        projection = {
            "proj.weight": made(tokens * width, pipe.image_encoder.config.projection_dim),
            "proj.bias": made(tokens * width),
            "norm.weight": made(width) + 1,
            "norm.bias": made(width),
        }
        layers = [n for n in pipe.unet.attn_processors if n.endswith("attn2.processor")]
        weights = {}
        for i, name in enumerate(layers):
            inner = pipe.unet.get_submodule(name.removesuffix(".processor")).to_k.out_features
            weights[f"{2 * i + 1}.to_k_ip.weight"] = made(inner, width)
            weights[f"{2 * i + 1}.to_v_ip.weight"] = made(inner, width)
        pipe.load_ip_adapter(
            {"image_proj": projection, "ip_adapter": weights}, subfolder="", weight_name="", image_encoder_folder=None
        )
        pipe.set_ip_adapter_scale(0.7)

    def story(pipe: Any) -> Iterator[torch.Tensor]:
        yield run(pipe)
        adapt(pipe)
        with torch.no_grad():
            embeds = pipe.image_encoder(image).image_embeds[:, None].cpu()
        both = [torch.cat([torch.zeros_like(embeds), embeds])]
        yield run(pipe, ip_adapter_image_embeds=both)
        yield run(pipe, ip_adapter_image_embeds=both)

    same_story(build, story, way, chapters=2)

    plain, pipe = build(), build()
    for each in (plain, pipe):
        adapt(each)
    embeds = [torch.rand(2, 1, pipe.image_encoder.config.projection_dim)]
    offload(pipe, way)
    assert torch.equal(run(pipe, ip_adapter_image_embeds=embeds), run(plain, ip_adapter_image_embeds=embeds))


@every_way
@pytest.mark.parametrize("name", ["sdxl", "sd3"])
def test_a_preview_decoded_in_a_step_callback(emu: ModuleType, name: str, way: str) -> None:
    run = runner(name)

    def story(pipe: Any) -> Iterator[torch.Tensor]:
        previews: list[torch.Tensor] = []

        def preview(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
            latents = values["latents"] / pipe.vae.config.scaling_factor
            previews.append(pipe.vae.decode(latents, return_dict=False)[0].cpu())
            return values

        drawn = run(pipe, callback_on_step_end=preview)
        assert len(previews) == 3
        yield torch.cat([p.flatten() for p in previews])
        yield drawn

    same_story(builder(name), story, way)


@every_way
def test_a_step_callback_that_encodes_a_prompt(emu: ModuleType, way: str) -> None:
    run = runner("sd3")

    def story(pipe: Any) -> Iterator[torch.Tensor]:
        def reread(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
            embeds, negative, *_ = pipe.encode_prompt(f"step {step}", None, None, max_sequence_length=64)
            return {**values, "prompt_embeds": torch.cat([negative, embeds])}

        yield run(pipe, callback_on_step_end=reread, callback_on_step_end_tensor_inputs=["latents", "prompt_embeds"])

    same_story(builder("sd3"), story, way)


@every_way
@pytest.mark.parametrize("name", ["sdxl", "wan22_t2v"])
def test_vae_tiling_and_slicing(emu: ModuleType, name: str, way: str) -> None:
    run = runner(name)

    def story(pipe: Any) -> Iterator[torch.Tensor]:
        yield run(pipe)
        if name == "sdxl":
            pipe.vae.enable_slicing()
            pipe.vae.tile_latent_min_size, pipe.vae.tile_sample_min_size = 4, 32
            pipe.vae.enable_tiling()
            yield run(pipe, num_images_per_prompt=2)
        else:
            pipe.vae.enable_tiling(16, 16, 12, 12)
            yield run(pipe)
        pipe.vae.disable_tiling()
        yield run(pipe)

    same_story(builder(name), story, way, chapters=2)


@every_way
def test_a_vae_that_is_upcast_to_decode(emu: ModuleType, way: str) -> None:
    """In fp16 the pipeline casts the VAE to fp32 in the middle of a call, and back after it."""
    run = runner("sdxl")

    def story(pipe: Any) -> Iterator[torch.Tensor]:
        for seed in (0, 1):
            yield run(pipe, seed, num_inference_steps=2)
            assert pipe.vae.dtype == torch.float16

    same_story(builder("sdxl", torch.float16), story, way, chapters=2)


@every_way
def test_prompt_embeddings_from_the_encoders_themselves(emu: ModuleType, way: str) -> None:
    run = runner("wan22_t2v")

    def story(pipe: Any) -> Iterator[torch.Tensor]:
        embeds, negative = pipe.encode_prompt("a red cube", "blurry", max_sequence_length=32)
        yield run(pipe, prompt=None, negative_prompt=None, prompt_embeds=embeds, negative_prompt_embeds=negative)
        tokens = pipe.tokenizer(["a blue ball"], padding="max_length", max_length=32, return_tensors="pt")
        with torch.no_grad():
            # As prompt weighting helpers do: where the encoder says it is, which is the host while it is released.
            asked = tokens.input_ids.to(pipe.text_encoder.device), tokens.attention_mask.to(pipe.text_encoder.device)
            hidden = pipe.text_encoder(*asked).last_hidden_state
        yield run(pipe, prompt=None, negative_prompt=None, prompt_embeds=hidden, negative_prompt_embeds=negative)
        yield run(pipe)

    same_story(builder("wan22_t2v"), story, way, chapters=3)


@every_way
def test_generate_rewrites_the_prompt(emu: ModuleType, way: str) -> None:
    run = runner("longcat_image")

    def build() -> Any:
        pipe = testing.build_pipeline("longcat_image")
        pipe.text_encoder.generation_config.max_new_tokens = 6
        generate = type(pipe.text_encoder).generate

        class Short(type(pipe.text_encoder)):  # type: ignore[misc]
            def generate(self, *args: Any, **kwargs: Any) -> Any:
                return generate(self, *args, **{**kwargs, "max_new_tokens": 6})

        pipe.text_encoder.__class__ = Short
        return pipe

    def story(pipe: Any) -> Iterator[torch.Tensor]:
        yield run(pipe, enable_prompt_rewrite=True)
        yield run(pipe, enable_prompt_rewrite=False)

    same_story(build, story, way)


SCHEDULERS = {  # the first four under every strategy
    "sdxl": [
        "UniPCMultistepScheduler",
        "DPMSolverMultistepScheduler",
        "EulerDiscreteScheduler",
        "HeunDiscreteScheduler",
        "DPMSolverSDEScheduler",
        "EulerAncestralDiscreteScheduler",
        "KDPM2DiscreteScheduler",
        "LMSDiscreteScheduler",
        "DDIMScheduler",
        "PNDMScheduler",
        "DEISMultistepScheduler",
        "LCMScheduler",
    ],
    "sd3": ["FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler"],
}


@pytest.mark.parametrize(
    ("name", "scheduler", "way"),
    [
        (name, scheduler, way)
        for name, schedulers in SCHEDULERS.items()
        for i, scheduler in enumerate(schedulers)
        for way in (["model-level", "layerwise", "budget"] if i < 4 else ["layerwise"])
    ],
)
def test_schedulers_that_keep_state(emu: ModuleType, name: str, scheduler: str, way: str) -> None:
    run = runner(name)
    # The one scheduler that draws its noise without the pipeline's generator.
    own_noise = {"noise_sampler_seed": 5} if scheduler == "DPMSolverSDEScheduler" else {}
    if own_noise:
        pytest.importorskip("torchsde")

    def build() -> Any:
        pipe = testing.build_pipeline(name)
        pipe.scheduler = getattr(diffusers, scheduler).from_config(pipe.scheduler.config, **own_noise)
        return pipe

    def story(pipe: Any) -> Iterator[torch.Tensor]:
        for seed in (0, 1):
            yield run(pipe, seed=seed, num_inference_steps=4)

    same_story(build, story, way, chapters=2)


@every_way
def test_generators_of_the_host_and_of_the_device(emu: ModuleType, way: str) -> None:
    plain = testing.build_pipeline("sd3").to("emu")
    pipe = testing.build_pipeline("sd3")
    call = {k: v for k, v in testing.call_kwargs("sd3").items() if k != "generator"}
    offload(pipe, way)
    for device in ("cpu", "emu"):
        drawn = [draw(p, **call, generator=torch.Generator(device).manual_seed(3)) for p in (plain, pipe)]
        assert torch.equal(*drawn)
    several = [[torch.Generator().manual_seed(s) for s in (1, 2)] for _ in range(2)]
    drawn = [draw(p, **call, num_images_per_prompt=2, generator=g) for p, g in zip((plain, pipe), several, strict=True)]
    assert torch.equal(*drawn)
    # Without a generator, the global one of the device where the pipeline says it computes.
    drawn = []
    for p in (plain, pipe):
        torch.manual_seed(11)
        drawn.append(draw(p, **call, generator=None))
    assert torch.equal(*drawn)


@every_way
@pytest.mark.parametrize("name", ["sdxl", "wan22_t2v"])
def test_inference_mode_and_no_grad(emu: ModuleType, name: str, way: str) -> None:
    run = runner(name)

    def story(pipe: Any) -> Iterator[torch.Tensor]:
        for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                drawn = run(pipe)
            yield drawn.clone()

    same_story(builder(name), story, way)


@every_way
def test_a_pipeline_made_and_offloaded_in_inference_mode(emu: ModuleType, way: str) -> None:
    run = runner("sd3")
    expected = run(testing.build_pipeline("sd3"))
    with torch.inference_mode():
        pipe = testing.build_pipeline("sd3")
        handle = offload(pipe, way)
        assert torch.equal(run(pipe), expected)
    assert torch.equal(run(pipe), expected)
    handle.disable()
    assert torch.equal(run(pipe), expected)


@every_way
def test_skip_layer_guidance(emu: ModuleType, way: str) -> None:
    run = runner("sd3")

    def story(pipe: Any) -> Iterator[torch.Tensor]:
        words = {"skip_guidance_layers": [1, 2, 5], "skip_layer_guidance_start": 0.0, "skip_layer_guidance_stop": 0.9}
        yield run(pipe, **words, num_inference_steps=5)
        yield run(pipe, num_inference_steps=5)
        yield run(pipe, **words, num_inference_steps=5)

    same_story(builder("sd3"), story, way, chapters=2)


def first_block(pipe: Any) -> Any:
    return FirstBlockCacheConfig(threshold=0.5)


def pyramid(pipe: Any) -> Any:
    return PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        cross_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, 1001),
        cross_attention_timestep_skip_range=(-1, 1001),
        current_timestep_callback=lambda: pipe.current_timestep,
    )


def faster(pipe: Any) -> Any:
    return FasterCacheConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, 800),  # the first steps fill the cache
        unconditional_batch_skip_range=2,
        unconditional_batch_timestep_skip_range=(-1, 1001),
        current_timestep_callback=lambda: pipe.current_timestep,
        tensor_format="BFCHW",
        is_guidance_distilled=True,
    )


def magnitudes(pipe: Any) -> Any:
    return MagCacheConfig(threshold=0.9, retention_ratio=0.1, num_inference_steps=6, mag_ratios=[1.0] * 6)


def taylor(pipe: Any) -> Any:
    return TaylorSeerCacheConfig(
        cache_interval=3,
        disable_cache_before_step=1,
        taylor_factors_dtype=torch.float32,
        cache_identifiers=[r".*blocks\.\d+\.attn1"],
    )


CACHES = {"first block": first_block, "pyramid": pyramid, "faster": faster, "magnitudes": magnitudes, "taylor": taylor}


@pytest.mark.parametrize("way", ["model-level", "layerwise", "budget"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES.keys())
def test_step_caches(emu: ModuleType, cache: Callable[[Any], Any], when: str, way: str) -> None:
    """Caches of diffusers skip blocks, or parts of them, in some steps."""
    run = runner("wan22_t2v")
    pipes = [testing.build_pipeline("wan22_t2v") for _ in range(2)]

    def cached(pipe: Any) -> None:
        for dit in (pipe.transformer, pipe.transformer_2):
            dit.enable_cache(cache(pipe))

    uncached = run(pipes[0], num_inference_steps=6)
    for pipe in pipes:
        if when == "before" or pipe is pipes[0]:
            cached(pipe)
    handle = offload(pipes[1], way)
    if when == "after":
        assert torch.equal(run(pipes[1], num_inference_steps=6), uncached)
        cached(pipes[1])
    expected = run(pipes[0], num_inference_steps=6)
    assert not torch.equal(expected, uncached)  # it really skipped something
    for _ in range(2):
        assert torch.equal(run(pipes[1], num_inference_steps=6), expected)
    for dit in (pipes[1].transformer, pipes[1].transformer_2):
        dit.disable_cache()
    assert torch.equal(run(pipes[1], num_inference_steps=6), uncached)
    handle.disable()
    assert torch.equal(run(pipes[1], num_inference_steps=6), uncached)


@every_way
@pytest.mark.parametrize("when", ["before", "after"])
def test_layerwise_casting(emu: ModuleType, when: str, way: str) -> None:
    """Weights are stored in another dtype and cast for each forward of their layer."""
    run = runner("sd3")

    def cast(pipe: Any) -> None:
        pipe.transformer.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)

    plain, pipe = testing.build_pipeline("sd3"), testing.build_pipeline("sd3")
    if when == "before":
        cast(pipe)
    handle = offload(pipe, way)
    if when == "after":
        assert torch.equal(run(pipe), run(plain))
        cast(pipe)
    cast(plain)
    expected = run(plain)
    for _ in range(2):
        assert torch.equal(run(pipe), expected)
    handle.disable()
    assert torch.equal(run(pipe), expected)


@every_way
def test_calls_from_two_threads(emu: ModuleType, way: str) -> None:
    pipes = [testing.build_pipeline("sd3"), testing.build_pipeline("sd3", seed=1)]
    run = runner("sd3")
    expected = [run(p) for p in pipes]
    for pipe in pipes:
        offload(pipe, way)

    def work(index: int) -> None:
        for _ in range(3):
            assert torch.equal(run(pipes[index]), expected[index])

    toys.at_once(lambda: work(0), lambda: work(1))


@every_way
def test_components_called_from_two_threads(emu: ModuleType, way: str) -> None:
    """One pipeline: a thread encodes prompts while another denoises. They wait for each other at the doors."""
    pipe = testing.build_pipeline("sdxl")
    run = runner("sdxl")
    expected = run(pipe)
    tokens = pipe.tokenizer(["a cube"], padding="max_length", return_tensors="pt").input_ids
    with torch.no_grad():
        hidden = pipe.text_encoder(tokens).last_hidden_state
    offload(pipe, way)

    def encode() -> None:
        with torch.no_grad():
            for _ in range(8):
                assert torch.equal(pipe.text_encoder(tokens).last_hidden_state.cpu(), hidden)

    def denoise() -> None:
        for _ in range(2):
            assert torch.equal(run(pipe), expected)

    toys.at_once(encode, denoise)


@every_way
def test_two_pipelines_in_turns(emu: ModuleType, way: str) -> None:
    first, second = testing.build_pipeline("sdxl"), testing.build_pipeline("wan22_t2v")
    expected = runner("sdxl")(first), runner("wan22_t2v")(second)
    handles = [offload(first, way), offload(second, way)]
    for _ in range(2):
        assert torch.equal(runner("sdxl")(first), expected[0])
        assert torch.equal(runner("wan22_t2v")(second), expected[1])
    handles[0].disable()
    assert torch.equal(runner("wan22_t2v")(second), expected[1])


@every_way
def test_an_interrupted_call_is_followed_by_a_right_one(emu: ModuleType, way: str) -> None:
    pipe = testing.build_pipeline("wan22_t2v")
    run = runner("wan22_t2v")
    expected = run(pipe)
    offload(pipe, way)

    class Cancelled(Exception): ...

    def cancel(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        raise Cancelled

    with pytest.raises(Cancelled):
        run(pipe, callback_on_step_end=cancel)
    assert torch.equal(run(pipe), expected)


def test_a_device_that_was_named_is_kept(emu: ModuleType) -> None:
    pipe = testing.build_pipeline("sd3")
    expected = runner("sd3")(pipe)
    if emu.device_count() < 2:
        pytest.skip("one device")
    allocated = emu.memory_allocated(0)
    handle = greenroom.offload(pipe, {"mode": "layer", "components": ["dit"]}, device="emu:1")
    for _ in range(2):
        assert pipe._execution_device == torch.device("emu", 1)
        assert torch.equal(runner("sd3")(pipe), expected)
    assert handle.report().device == "emu:1"
    assert emu.memory_allocated(0) <= allocated
