"""The tiny pipelines: they build, run, save, reload, and really have the structures they are there for."""

from __future__ import annotations

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import nn

from greenroom import testing
from greenroom.catalog import lookup
from greenroom.declare import block_paths
from greenroom.errors import ConfigError

DTYPES = (torch.float32, torch.bfloat16)
every_architecture = pytest.mark.parametrize("name", testing.ARCHITECTURES)
in_both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])


def modules_of(pipe: DiffusionPipeline) -> dict[str, nn.Module]:
    return {key: item for key, item in pipe.components.items() if isinstance(item, nn.Module)}


def denoisers_of(pipe: DiffusionPipeline) -> list[nn.Module]:
    return [component for component in modules_of(pipe).values() if lookup(component).role == "dit"]


def blocks_of(module: nn.Module) -> list[nn.Module]:
    return [module.get_submodule(path) for path in block_paths(module, lookup(module).blocks)]


def size(module: nn.Module) -> int:
    """Bytes of all parameters and buffers."""
    return sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])


def dtypes_of(pipe: DiffusionPipeline) -> dict[str, torch.dtype]:
    return {
        f"{key}.{name}": tensor.dtype
        for key, component in modules_of(pipe).items()
        for name, tensor in [*component.named_parameters(), *component.named_buffers()]
    }


@every_architecture
@in_both_dtypes
def test_draws_the_same_bits_again_and_after_reloading(name, dtype, tmp_path):
    pipe = testing.build_pipeline(name, dtype=dtype)
    drawn = testing.run(pipe, name)
    kwargs = testing.call_kwargs(name)
    pixels = kwargs.get("num_frames", 1) * 3 * kwargs["height"] * kwargs["width"]
    assert drawn.numel() == pixels or kwargs["enable_sound"]
    assert drawn.isfinite().all()
    # Clamped pixels hide differences, and a flat picture would too.
    picture = drawn.flatten()[:pixels].float()
    assert ((picture <= 0) | (picture >= 1)).float().mean() < 0.2
    assert picture.std() > 0.05
    assert torch.equal(drawn, testing.run(pipe, name))
    assert not torch.equal(drawn, testing.run(pipe, name, seed=1))
    assert torch.equal(drawn, testing.run(testing.build_pipeline(name, dtype=dtype), name))

    with testing.quiet():
        pipe.save_pretrained(tmp_path)
        reloaded = DiffusionPipeline.from_pretrained(tmp_path, dtype=dtype)
    reloaded.set_progress_bar_config(disable=True)
    assert type(reloaded) is type(pipe)
    assert dtypes_of(reloaded) == dtypes_of(pipe)
    for component in modules_of(reloaded).values():
        testing.realign(component)
    assert torch.equal(drawn, testing.run(reloaded, name))


@every_architecture
def test_other_weights_and_other_prompts_draw_something_else(name):
    pipe = testing.build_pipeline(name)
    drawn = testing.run(pipe, name)
    assert not torch.equal(drawn, testing.run(testing.build_pipeline(name, seed=1), name))
    kwargs = testing.call_kwargs(name)
    other = pipe(**{**kwargs, "prompt": kwargs["prompt"].upper() + " 7"}, return_dict=False)[0].flatten()
    assert not torch.equal(drawn.flatten()[: other.numel()].to(other.dtype), other)


@every_architecture
def test_every_weight_of_every_block_counts(name):
    """A block whose bytes were wrong must show: each parameter has a gradient from the denoiser's output.

    The last block of a two-stream model also computes a text stream that nobody reads; of that block, it is
    enough that some parameters matter.
    """
    pipe = testing.build_pipeline(name)
    for denoiser in denoisers_of(pipe):
        captured: list[tuple[tuple, dict]] = []
        hook = denoiser.register_forward_pre_hook(
            lambda _, args, kwargs, captured=captured: captured.append((args, kwargs)), with_kwargs=True
        )
        testing.run(pipe, name)
        hook.remove()
        args, kwargs = captured[0]
        output = denoiser(*args, **kwargs)[0]
        prediction = output[0] if isinstance(output, list) else output
        torch.manual_seed(0)
        (prediction * torch.randn_like(prediction)).sum().backward()
        paths = block_paths(denoiser, lookup(denoiser).blocks)
        for path in paths:
            parameters = dict(denoiser.get_submodule(path).named_parameters())
            idle = [key for key, item in parameters.items() if item.grad is None or not item.grad.abs().max() > 0]
            if path == paths[-1]:
                assert len(idle) < len(parameters)
            else:
                assert not idle, path


@every_architecture
def test_sizes_are_those_of_a_miniature(name):
    pipe = testing.build_pipeline(name)
    total = sum(map(size, modules_of(pipe).values()))
    assert total < 5_000_000
    streamed = 0
    for denoiser in denoisers_of(pipe):
        sizes = list(map(size, blocks_of(denoiser)))
        assert len(sizes) >= 4
        assert min(sizes) > 20_000 and max(sizes) < 300_000
        streamed += sum(sizes)
    assert streamed > total / 2


@every_architecture
def test_building_leaves_the_global_random_state_alone(name):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    testing.build_pipeline(name)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("call", [testing.build_pipeline, testing.call_kwargs])
def test_unknown_names_are_refused(call):
    with pytest.raises(ConfigError, match=r"name = 'flux3' .*\"flux2\""):
        call("flux3")


def test_unknown_dtypes_are_refused():
    with pytest.raises(ConfigError, match=r"dtype = torch.float64 .*torch.bfloat16"):
        testing.build_pipeline("sdxl", dtype=torch.float64)


def test_models_do_not_train():
    for name in testing.ARCHITECTURES:
        assert not any(
            part.training
            for component in modules_of(testing.build_pipeline(name)).values()
            for part in component.modules()
        )


def test_realigning_keeps_values_identity_and_ties():
    memory = torch.randn(4 * 4 + 1)
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    first.weight.data = memory[1:].view(4, 4).t()
    second.weight = first.weight
    parameter, value, stride = first.weight, first.weight.detach().clone(), first.weight.stride()
    assert parameter.data_ptr() % 16
    testing.realign(nn.ModuleList([first, second]))
    assert first.weight is parameter and second.weight is parameter
    assert torch.equal(parameter, value) and parameter.stride() == stride
    assert parameter.data_ptr() % 16 == 0


# The structures that make offloading hard, each in the pipeline that is there for it.


def test_flux2_reads_its_vae_from_outside():
    pipe = testing.build_pipeline("flux2")
    drawn = testing.run(pipe, "flux2")
    for statistic in (pipe.vae.bn.running_mean, pipe.vae.bn.running_var):
        statistic.mul_(1.5)
        changed = testing.run(pipe, "flux2")
        assert not torch.equal(drawn, changed)
        drawn = changed


@pytest.mark.parametrize("name", ["flux2", "longcat_image", "qwen_image"])
def test_encoders_generate(name):
    pipe = testing.build_pipeline(name)
    forwards = []
    pipe.text_encoder.register_forward_pre_hook(lambda *_: forwards.append(1))
    inputs = pipe.tokenizer(["a red cube"], return_tensors="pt")
    generated = pipe.text_encoder.generate(**inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert generated.shape[1] == inputs.input_ids.shape[1] + 6
    assert len(forwards) == 6


def test_longcat_rewrites_its_prompt():
    pipe = testing.build_pipeline("longcat_image")
    pipe.tokenizer_max_length = 16
    plain = testing.run(pipe, "longcat_image")
    kwargs = {**testing.call_kwargs("longcat_image"), "enable_prompt_rewrite": True}
    assert not torch.equal(plain, pipe(**kwargs, return_dict=False)[0])


def test_vision_towers_do_not_run_for_text():
    for name in ("flux2", "longcat_image", "qwen_image"):
        pipe = testing.build_pipeline(name)
        encoder = pipe.text_encoder
        occasional = block_paths(encoder, lookup(encoder).occasional_blocks)
        assert occasional
        for path in occasional:
            encoder.get_submodule(path).register_forward_pre_hook(lambda *_: pytest.fail("ran"))
        testing.run(pipe, name)


@pytest.mark.parametrize("name", ["sd3", "wan22_t2v", "wan22_i2v"])
@in_both_dtypes
def test_t5_embeddings_are_tied(name, dtype):
    pipe = testing.build_pipeline(name, dtype=dtype)
    encoder = pipe.text_encoder_3 if name == "sd3" else pipe.text_encoder
    assert encoder.shared.weight is encoder.encoder.embed_tokens.weight


@pytest.mark.parametrize("name", ["wan22_t2v", "wan22_i2v"])
def test_both_wan_experts_run_and_take_turns_once(name):
    pipe = testing.build_pipeline(name)
    turns = []
    for key in ("transformer", "transformer_2"):
        getattr(pipe, key).register_forward_pre_hook(lambda *_, key=key: turns.append(key))
    testing.run(pipe, name)
    first = turns.count("transformer")
    assert 0 < first < len(turns)
    assert turns == ["transformer"] * first + ["transformer_2"] * (len(turns) - first)


@pytest.mark.parametrize("name", ["wan22_t2v", "cosmos3"])
def test_fp32_islands_under_bf16(name):
    pipe = testing.build_pipeline(name, dtype=torch.bfloat16)
    (denoiser, *_) = denoisers_of(pipe)
    assert {parameter.dtype for parameter in denoiser.parameters()} == {torch.float32, torch.bfloat16}
    if name.startswith("wan"):
        for block in blocks_of(denoiser):
            assert {parameter.dtype for parameter in block.parameters()} == {torch.float32, torch.bfloat16}


def test_parameters_on_roots_and_blocks_count():
    pipe = testing.build_pipeline("wan22_t2v")
    drawn = testing.run(pipe, "wan22_t2v")
    owners = [pipe.transformer, pipe.transformer_2, *blocks_of(pipe.transformer)]
    for owner in owners:
        with torch.no_grad():
            owner.scale_shift_table.mul_(1.5)
        changed = testing.run(pipe, "wan22_t2v")
        assert not torch.equal(drawn, changed)
        drawn = changed
    assert testing.build_pipeline("cosmos3").transformer.action_modality_embed.abs().min() > 0


def test_cosmos3_sound():
    pipe = testing.build_pipeline("cosmos3")
    video, sound = pipe(**testing.call_kwargs("cosmos3"), return_dict=False)
    assert sound.isfinite().all() and sound.std() > 0.01
    assert testing.run(pipe, "cosmos3").numel() == video.numel() + sound.numel()
    with torch.no_grad():
        pipe.sound_tokenizer.decoder.conv1.weight_g.mul_(1.5)
    assert not torch.equal(sound, pipe(**testing.call_kwargs("cosmos3"), return_dict=False)[1])
    with torch.no_grad():
        pipe.transformer.audio_modality_embed.mul_(1.5)
    assert not torch.equal(video, pipe(**testing.call_kwargs("cosmos3"), return_dict=False)[0])


def test_unequal_blocks_and_a_large_buffer():
    pipe = testing.build_pipeline("sd3")
    sizes = list(map(size, blocks_of(pipe.transformer)))
    assert len(set(sizes)) == 3
    assert pipe.transformer.pos_embed.pos_embed.nbytes > max(sizes)
    unet_sizes = list(map(size, blocks_of(testing.build_pipeline("sdxl").unet)))
    assert max(unet_sizes) > 10 * min(unet_sizes)


def test_sd3_skips_blocks_under_skip_layer_guidance():
    pipe = testing.build_pipeline("sd3")
    runs = []
    pipe.transformer.transformer_blocks[1].register_forward_pre_hook(lambda *_: runs.append("block"))
    pipe.transformer.register_forward_pre_hook(lambda *_: runs.append("model"))
    kwargs = testing.call_kwargs("sd3")
    pipe(**kwargs, skip_guidance_layers=[1], skip_layer_guidance_stop=0.9, skip_layer_guidance_start=0.0)
    assert 0 < runs.count("block") < runs.count("model")


def test_sdxl_upcasts_its_vae_in_fp16():
    pipe = testing.build_pipeline("sdxl", dtype=torch.float16)
    parameter = pipe.vae.post_quant_conv.weight
    seen = []
    pipe.vae.decoder.register_forward_pre_hook(lambda *_: seen.append(parameter.dtype))
    testing.run(pipe, "sdxl")
    assert seen == [torch.float32]
    assert pipe.vae.post_quant_conv.weight is parameter and parameter.dtype is torch.float16


def test_video_vae_blocks_run_once_a_latent_frame():
    pipe = testing.build_pipeline("wan22_t2v")
    frames = []
    pipe.vae.decoder.mid_block.register_forward_pre_hook(lambda *_: frames.append(1))
    testing.run(pipe, "wan22_t2v")
    assert len(frames) == 1 + (testing.call_kwargs("wan22_t2v")["num_frames"] - 1) // 4


def test_the_picture_is_encoded_for_image_to_video():
    pipe = testing.build_pipeline("wan22_i2v")
    assert pipe.image_encoder is None
    encoded = []
    pipe.vae.encoder.register_forward_pre_hook(lambda *_: encoded.append(1))
    testing.run(pipe, "wan22_i2v")
    assert encoded
