import torch


def test_an_op_runs_on_the_device(emu):
    x = torch.arange(6.0).reshape(2, 3)
    y = x.to("emu") @ x.to("emu").T
    assert y.device == torch.device("emu:0")
    assert torch.equal(y.cpu(), x @ x.T)
