"""diffusers' and accelerate's own offloading run on the device unmodified, with the same bits and no race."""

import pytest
import torch
from emulator_models import CASES, generate, wan_pipeline

BLOCKS = {"offload_type": "block_level", "num_blocks_per_group": 1}
LEAVES = {"offload_type": "leaf_level"}
GROUP_OFFLOADS = {
    "blocks": BLOCKS,
    "blocks, stream": BLOCKS | {"use_stream": True},
    "blocks, stream, record": BLOCKS | {"use_stream": True, "record_stream": True},
    "leaves": LEAVES,
    "leaves, stream": LEAVES | {"use_stream": True},
    "leaves, stream, record": LEAVES | {"use_stream": True, "record_stream": True},
    "leaves, stream, low memory": LEAVES | {"use_stream": True, "low_cpu_mem_usage": True},
}


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    return generate(wan_pipeline())


def check(emu, pipe, expected):
    for _ in range(2):
        assert torch.equal(generate(pipe), expected)
    assert emu.race_reports() == []


@pytest.fixture(params=["real", "virtual"])
def clock(emu, request):
    emu.set_virtual_time(request.param == "virtual")
    emu.set_bandwidth(200e6)


def test_whole_pipeline_on_the_device(emu, expected):
    check(emu, wan_pipeline().to("emu"), expected)


def test_model_cpu_offload(emu, clock, expected):
    pipe = wan_pipeline()
    pipe.enable_model_cpu_offload(device="emu")
    check(emu, pipe, expected)


def test_sequential_cpu_offload(emu, clock, expected):
    pipe = wan_pipeline()
    pipe.enable_sequential_cpu_offload(device="emu")
    check(emu, pipe, expected)


@pytest.mark.parametrize("kind", GROUP_OFFLOADS)
def test_group_offload_of_the_transformer(emu, clock, expected, kind):
    pipe = wan_pipeline()
    pipe.transformer.enable_group_offload(onload_device=torch.device("emu"), **GROUP_OFFLOADS[kind])
    pipe.vae.to("emu")
    pipe.text_encoder.to("emu")
    check(emu, pipe, expected)
    assert (emu.counters()["h2d_async"] > 0) == ("stream" in kind)


def test_group_offload_of_the_pipeline(emu, expected):
    pipe = wan_pipeline()
    pipe.enable_group_offload(onload_device=torch.device("emu"), **GROUP_OFFLOADS["leaves, stream, record"])
    check(emu, pipe, expected)


@pytest.mark.parametrize("name", ["flux", "sd3", "qwen_image", "unet", "autoencoder_kl", "umt5", "clip"])
@pytest.mark.parametrize("kind", ["blocks, stream, record", "leaves, stream"])
def test_group_offload_of_other_models(emu, name, kind):
    from diffusers.hooks import apply_group_offloading

    emu.set_bandwidth(200e6)
    case = CASES[name]
    model = case.model()
    reference = case.run(model)
    apply_group_offloading(model, onload_device=torch.device("emu"), **GROUP_OFFLOADS[kind])
    for _ in range(3):  # the order of the groups is learnt in the first forward
        assert torch.equal(case.run(model, "emu").cpu(), reference)
    assert emu.race_reports() == []


class OnlyBlocks(torch.nn.Module):
    """Children are ModuleLists and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(128, 128) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def test_a_missing_wait_in_diffusers_is_found(emu):
    """diffusers 0.42.1, block level with a stream: a module with nothing but ModuleLists gets no prefetch hook,
    so its blocks run before their copies have ended."""
    from diffusers.hooks import apply_group_offloading

    emu.set_race_check("collect")
    emu.set_bandwidth(1e6)
    model, x = OnlyBlocks().eval(), torch.randn(3, 128)
    with torch.no_grad():
        reference = model(x)
        apply_group_offloading(model, onload_device=torch.device("emu"), use_stream=True, **BLOCKS)
        out = model(x.to("emu")).cpu()
    assert not torch.equal(out, reference)
    assert any("un-synchronised" in report for report in emu.race_reports())
    emu.synchronize()
    del model
    emu.race_reports()
