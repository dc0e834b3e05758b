"""Ways into a component that are not its forward, and where a pipeline thinks that it computes."""

from __future__ import annotations

from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
import toys
from diffusers import StableDiffusionXLImg2ImgPipeline
from PIL import Image
from torch import nn
from ways import draw, every_way, offload

import greenroom
from greenroom import testing

every_config = pytest.mark.parametrize("config", toys.EVERY.values(), ids=toys.EVERY.keys())


@every_config
def test_encode_and_decode_bring_a_component_in(emu: ModuleType, config: dict[str, Any]) -> None:
    """A part of the model runs before the decoder, and nothing ever calls forward."""
    pipe = toys.Pipeline()
    z = torch.randn(2, 3, toys.WIDTH)
    with torch.no_grad():
        expected = pipe.vae.decode(z), pipe.vae.encode(z)
        greenroom.offload(pipe, config, device="emu")
        for _ in range(2):
            assert torch.equal(pipe.vae.decode(z).cpu(), expected[0])
            assert torch.equal(pipe.vae.encode(z).cpu(), expected[1])
            pipe.maybe_free_model_hooks()


@every_config
def test_statistics_that_a_pipeline_reads_itself(emu: ModuleType, config: dict[str, Any]) -> None:
    """Both statistics of a normalisation are read between denoising and decoding, from a VAE that nobody entered."""

    def normalised(pipe: toys.Pipeline, z: torch.Tensor) -> torch.Tensor:
        z = (z - pipe.vae.bn.running_mean) / torch.sqrt(pipe.vae.bn.running_var + pipe.vae.bn.eps)
        return pipe.vae.decode(z).cpu()

    pipe = toys.Pipeline()
    pipe.vae.bn.running_var.uniform_(0.5, 2)
    z = torch.randn(2, 3, toys.WIDTH)
    with torch.no_grad():
        expected = normalised(pipe, z)
        greenroom.offload(pipe, config, device="emu")
        for _ in range(2):
            assert torch.equal(normalised(pipe, z.to("emu")), expected)
            pipe.maybe_free_model_hooks()


class Captioning(toys.Pipeline):
    """An empty prompt lets the encoder write one first."""

    @torch.no_grad()
    def __call__(self, device: Any = "cpu", prompt: tuple[int, ...] = ()) -> torch.Tensor:
        tokens = torch.tensor([prompt]) if prompt else self.text_encoder.generate(torch.tensor([[1, 2]]), new=6)
        embeds = self.text_encoder(tokens)
        x = self.transformer(torch.ones(1, 1, toys.WIDTH, device=device), {"embeds": [embeds[:, -1:]]})
        image = self.vae.decode(x).cpu()
        self.maybe_free_model_hooks()
        return image


@every_config
def test_an_encoder_that_writes_a_prompt_for_an_empty_one(emu: ModuleType, config: dict[str, Any]) -> None:
    pipe = Captioning()
    prompts: list[tuple[int, ...]] = [(), (5, 6, 7), ()]
    expected = [pipe(prompt=prompt) for prompt in prompts]
    handle = greenroom.offload(pipe, config, device="emu")
    settled = emu.memory_allocated()
    for prompt, value in zip(prompts, expected, strict=True):
        before = handle.report().copied
        assert torch.equal(pipe("emu", prompt=prompt), value)
        report = handle.report()
        moved = {c.name: c.moved for c in report.components}
        # The blocks come once for the whole loop, not once for each of its six tokens, and leave after it.
        most = 2 * moved["text_encoder"] + moved["transformer"] + moved["vae"] + 3 * report.arena
        assert report.copied - before <= most
        emu.synchronize()
        assert emu.memory_allocated() <= settled


class VideoVae(nn.Module):
    """Decodes in tiles, with features of the previous frames kept between them; the loop calls the inner parts."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(toys.WIDTH, toys.WIDTH)
        self.post_quant_conv = nn.Linear(toys.WIDTH, toys.WIDTH)
        self.decoder = nn.ModuleDict({"mid": toys.Block(), "up": nn.ModuleList(toys.Block() for _ in range(3))})
        self.cache: dict[int, torch.Tensor] = {}
        self.tiling = False

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)

    def frame(self, z: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate((self.decoder["mid"], *self.decoder["up"])):
            z = block(z + self.cache[i] if i in self.cache else z)
            self.cache[i] = z / 2
        return z

    def tiled_decode(self, z: torch.Tensor) -> torch.Tensor:
        return torch.cat([self._frames(tile) for tile in z.split(2, dim=2)], dim=2)

    def _frames(self, z: torch.Tensor) -> torch.Tensor:
        self.cache = {}
        return torch.stack([self.frame(self.post_quant_conv(f)) for f in z.unbind(1)], dim=1)

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return self.tiled_decode(z) if self.tiling else self._frames(z)


class VideoPipeline(toys.Pipeline):
    _vae_modules: ClassVar = ["vae"]
    _dit_modules: ClassVar = ["transformer", "transformer_2"]
    _encoder_modules: ClassVar = ["text_encoder", "text_encoder_2"]


@pytest.mark.parametrize("words", [*toys.EVERY.values(), {"memory": 0.5}], ids=[*toys.EVERY.keys(), "budget"])
def test_a_video_vae_with_tiles_and_a_cache(emu: ModuleType, words: dict[str, Any]) -> None:
    pipe = VideoPipeline()
    torch.manual_seed(1)
    pipe.vae = VideoVae().eval()  # type: ignore[assignment]
    z = torch.randn(1, 3, 4, toys.WIDTH)
    with torch.no_grad():
        expected = []
        for pipe.vae.tiling in (True, False):
            expected.append(pipe.vae.decode(z))
        if "memory" in words:
            weights = sum(map(toys.nbytes, pipe.components.values()))
            greenroom.offload(pipe, memory=emu.memory_allocated() + int(words["memory"] * weights), device="emu")
        else:
            greenroom.offload(pipe, words, device="emu")
        for pipe.vae.tiling, value in zip((True, False), expected, strict=True):
            for _ in range(2):
                assert torch.equal(pipe.vae.decode(z).cpu(), value)
                pipe.maybe_free_model_hooks()


class CachingBlock(toys.Block):
    """Fills a cache before the loop, by a method of its own."""

    def init_cache(self, x: torch.Tensor) -> None:
        self.cache = self.down(self.up(x.to(torch.bfloat16)).float())

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x, scale=scale) + self.cache


@every_config
def test_blocks_that_fill_their_caches_before_the_loop(emu: ModuleType, config: dict[str, Any]) -> None:
    plain, pipe = (toys.with_blocks(CachingBlock, seed=1) for _ in range(2))
    x, context = toys.inputs()
    with torch.no_grad():
        handle = greenroom.offload(pipe, config, device="emu")
        for factor in (1.0, 2.0):  # the weights are changed in place while they are there, and keep the change
            for block in plain.transformer.blocks:
                block.up.weight.mul_(factor)
                block.init_cache(x)
            for block in pipe.transformer.blocks:
                with handle.materialized(block):
                    block.up.weight.mul_(factor)
                    block.init_cache(x.to("emu"))
            for _ in range(2):
                assert torch.equal(pipe.transformer(x, context).cpu(), plain.transformer(x, context))


# ---------------------------------------------------------------------- where it computes


@every_way
def test_the_pipeline_says_where_it_computes(emu: ModuleType, way: str) -> None:
    pipe = testing.build_pipeline("sd3")
    offload(pipe, way)
    for _ in range(2):
        assert pipe._execution_device == torch.device("emu", 0)
        draw(pipe, **{k: v for k, v in testing.call_kwargs("sd3").items() if k != "generator"})


def test_the_pipeline_says_where_it_computes_if_one_component_is_offloaded(emu: ModuleType) -> None:
    pipe = testing.build_pipeline("sd3")
    greenroom.offload(pipe, {"mode": "layer", "components": ["dit"]}, device="emu")
    assert pipe._execution_device == pipe.device == torch.device("emu", 0)


class Patched(toys.DiT):
    """Convolutions outside the blocks, before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv3d(2, toys.WIDTH, 2, stride=2)
        self.unpatch = nn.ConvTranspose3d(toys.WIDTH, 2, 2, stride=2)

    def forward(self, x: torch.Tensor, context: dict[str, Any], order: Any = None) -> torch.Tensor:
        x = self.patch_embedding(x)
        tokens = super().forward(x.flatten(2).transpose(1, 2), context, order)
        return self.unpatch(tokens.transpose(1, 2).unflatten(2, x.shape[2:]))


@every_config
def test_convolutions_outside_the_blocks(emu: ModuleType, config: dict[str, Any]) -> None:
    pipe = toys.Pipeline()
    torch.manual_seed(1)
    pipe.transformer = Patched().eval()
    x, context = torch.randn(1, 2, 2, 4, 4), {"embeds": [torch.randn(1, 4, toys.WIDTH)]}
    with torch.no_grad():
        expected = pipe.transformer(x, context)
        greenroom.offload(pipe, config, device="emu")
        for _ in range(2):
            assert torch.equal(pipe.transformer(x, context).cpu(), expected)


@every_way
@pytest.mark.filterwarnings("ignore")
def test_statistics_of_latents_are_where_the_latents_are(emu: ModuleType, way: str) -> None:
    """A VAE whose configuration holds a mean and a deviation of latents, in image to image."""

    def build() -> Any:
        pipe = StableDiffusionXLImg2ImgPipeline.from_pipe(testing.build_pipeline("sdxl"))
        pipe.set_progress_bar_config(disable=True)
        pipe.vae.register_to_config(latents_mean=[0.3, -0.2, 0.1, 0.4], latents_std=[1.5, 0.7, 1.1, 0.9])
        return pipe

    picture = Image.radial_gradient("L").resize((64, 64)).convert("RGB")
    call = {"prompt": "a red cube", "image": picture, "strength": 0.9, "num_inference_steps": 3}
    expected = draw(build(), **call)
    pipe = build()
    offload(pipe, way)
    for _ in range(2):
        assert torch.equal(draw(pipe, **call), expected)
