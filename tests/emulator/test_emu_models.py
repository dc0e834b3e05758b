"""Every class that Greenroom cares about gives the CPU's bits on the device."""

import copy

import pytest
import torch
from emulator_models import CASES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_model_equals_the_cpu(emu, name, dtype):
    case = CASES[name]
    model = case.model().to(dtype)
    expected = case.run(model, dtype=dtype)
    model.to("emu")
    for _ in range(2):
        out = case.run(model, "emu", dtype)
        assert out.device.type == "emu"
        assert torch.equal(out.cpu(), expected)
    assert expected.isfinite().all()


def test_channels_last(emu):
    case = CASES["autoencoder_kl"]
    model = case.model().to(memory_format=torch.channels_last)
    expected = case.run(model)
    assert torch.equal(case.run(copy.deepcopy(model).to("emu"), "emu").cpu(), expected)


def test_a_forward_leaves_nothing_on_the_device(emu):
    case = CASES["wan"]
    model = case.model().to("emu")
    case.run(model, "emu")
    emu.synchronize()
    before = emu.memory_allocated()
    case.run(model, "emu")
    assert emu.memory_allocated() == before
