"""Operations: the CPU's bits, device errors, views, parameters that change device."""

import pytest
import torch
import torch.nn.functional as F


@pytest.fixture(autouse=True)
def _needs_emu(emu):
    torch.manual_seed(0)


def same(f, *args):
    assert torch.equal(f(*args), f(*[a.to("emu") for a in args]).cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_that_backends_choose_differently(dtype):
    q, k, v = (torch.randn(2, 4, 33, 16).to(dtype) for _ in range(3))
    mask = torch.rand(2, 1, 33, 33) > 0.3
    x, w = torch.randn(2, 8, 9, 9).to(dtype), torch.randn(8, 8, 3, 3).to(dtype)
    x3, w3 = torch.randn(1, 4, 5, 6, 6).to(dtype), torch.randn(4, 4, 3, 3, 3).to(dtype)
    lin, bias = torch.randn(16, 9).to(dtype), torch.randn(16).to(dtype)
    same(F.scaled_dot_product_attention, q, k, v)
    same(F.scaled_dot_product_attention, q, k, v, mask)
    same(lambda a, b, c: F.scaled_dot_product_attention(a, b, c, is_causal=True), q, k, v)
    same(F.conv2d, x, w)
    same(F.conv3d, x3, w3)
    same(F.linear, x, lin, bias)
    same(lambda t: F.group_norm(t, 4), x)
    same(lambda t: F.layer_norm(t, (9,)), x)
    same(lambda t: F.interpolate(t, scale_factor=2.0, mode="nearest"), x)
    same(lambda t: F.gelu(t, approximate="tanh").softmax(-1), x)


def test_in_place_out_and_resized_arguments():
    x = torch.arange(12.0, device="emu").view(3, 4)
    x[:, 1:3].zero_()
    assert x.cpu().tolist() == [[0, 0, 0, 3], [4, 0, 0, 7], [8, 0, 0, 11]]
    out = torch.empty(0, device="emu")
    torch.add(x, x, out=out)
    assert out.shape == (3, 4) and torch.equal(out.cpu(), x.cpu() * 2)
    assert x[x > 3].cpu().tolist() == [4, 7, 8, 11]
    assert x[torch.tensor([0, 2])].shape == (2, 4)  # indices may live on the host
    assert torch.equal(torch.cat([x, x]).unique().cpu(), x.cpu().unique())


def test_random_numbers_are_the_cpus():
    torch.manual_seed(3)
    a = torch.randn(5, device="emu")
    torch.manual_seed(3)
    assert torch.equal(a.cpu(), torch.randn(5))
    on_emu = torch.Generator("emu").manual_seed(4)
    assert torch.equal(
        torch.randn(5, device="emu", generator=on_emu).cpu(), torch.randn(5, generator=torch.Generator().manual_seed(4))
    )
    state = torch.emu.get_rng_state()
    first = torch.rand(3, device="emu")
    torch.emu.set_rng_state(state)
    assert torch.equal(first.cpu(), torch.rand(3, device="emu").cpu())


def test_autograd():
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.GroupNorm(2, 8), torch.nn.SiLU(), torch.nn.Conv2d(8, 3, 3)
    )
    x = torch.randn(2, 3, 8, 8)
    net(x).square().mean().backward()
    expected = [p.grad.clone() for p in net.parameters()]
    net.zero_grad(set_to_none=True)
    net.to("emu")
    net(x.to("emu")).square().mean().backward()
    assert all(torch.equal(p.grad.cpu(), e) for p, e in zip(net.parameters(), expected, strict=True))


def test_autocast():
    a = torch.randn(4, 4)
    with torch.autocast("emu", dtype=torch.bfloat16):
        out = a.to("emu") @ a.to("emu")
    assert torch.equal(out.cpu(), a.bfloat16() @ a.bfloat16())


@pytest.mark.parametrize("other", ["cpu", "emu:1", "meta"])
@pytest.mark.parametrize(
    "call",
    [
        lambda x, other: x + torch.ones(2, 3, device=other),
        lambda x, other: torch.ones(2, 3, device=other) * x,
        lambda x, other: F.linear(x, torch.ones(4, 3, device=other)),
        lambda x, other: F.linear(x, torch.ones(4, 3, device="emu"), torch.ones(4, device=other)),
        lambda x, other: F.linear(torch.ones(2, 3, device=other), x),
        lambda x, other: F.conv1d(x[None], torch.ones(4, 2, 1, device=other)),
        lambda x, other: F.conv1d(x[None], torch.ones(4, 2, 1, device="emu"), torch.ones(4, device=other)),
        lambda x, other: F.layer_norm(x, (3,), torch.ones(3, device=other)),
        lambda x, other: F.embedding(torch.zeros(2, dtype=torch.long, device="emu"), torch.ones(4, 3, device=other)),
        lambda x, other: torch.cat([x, torch.ones(2, 3, device=other)]),
        lambda x, other: torch.where(x > 0, x, torch.ones(2, 3, device=other)),
        lambda x, other: x.bmm(x) if other is None else x[None] @ torch.ones(1, 3, 2, device=other),
        lambda x, other: F.scaled_dot_product_attention(
            *(t[None, None] for t in (x, torch.ones(2, 3, device=other), x))
        ),
        lambda x, other: F.group_norm(x[None], 1, torch.ones(2, device=other)),
        lambda x, other: x.add_(torch.ones(2, 3, device=other)),
    ],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_arguments_on_different_devices_are_refused(call, other, mode):
    x = torch.ones(2, 3, device="emu")
    with mode(), pytest.raises(RuntimeError, match="device"):
        call(x, other)


def test_a_module_with_a_placeholder_for_a_weight_is_refused():
    with torch.device("meta"):
        placeholders = [torch.nn.Linear(3, 3), torch.nn.Conv1d(3, 3, 1), torch.nn.LayerNorm(3)]
    for module in placeholders:
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"emu:0.*meta|meta.*emu:0"):
            module(torch.ones(1, 3, 3, device="emu"))


def test_meta_tensors_alone_still_work():
    assert F.linear(torch.empty(2, 3, device="meta"), torch.empty(4, 3, device="meta")).shape == (2, 4)
    assert F.conv1d(torch.empty(1, 2, 3, device="meta"), torch.empty(4, 2, 1, device="meta")).shape == (1, 4, 3)
    assert torch.empty(2, device="meta").copy_(torch.ones(2, device="emu")).is_meta


def test_host_scalars_may_mix():
    x = torch.ones(3, device="emu")
    assert ((x * torch.tensor(2.0)) + 1).cpu().tolist() == [3, 3, 3]


def test_data_swaps_between_devices_and_keeps_identity(emu):
    parameter = torch.nn.Parameter(torch.arange(4.0))
    tied = parameter
    host = parameter.data
    arena = torch.zeros(64, dtype=torch.uint8, device="emu")
    arena[16:32].view(torch.float32).copy_(host)
    for _ in range(2):
        parameter.data = arena[16:32].view(torch.float32).as_strided((4,), (1,))
        assert parameter is tied and parameter.device.type == "emu" and parameter.requires_grad
        assert torch.equal((parameter.detach() + 1).cpu(), host + 1)
        parameter.data = host
        assert parameter.device.type == "cpu" and torch.equal(parameter.detach() + 1, torch.arange(1.0, 5.0))


def test_views_of_a_byte_buffer_cost_nothing(emu):
    emu.set_virtual_time(True)
    arena = torch.zeros(1024, dtype=torch.uint8, device="emu")
    emu.synchronize()
    before, allocated = emu.virtual_time(), emu.memory_allocated()
    emu.set_timeline(True)
    emu.reset_counters()
    view = arena[64:192].view(torch.bfloat16).as_strided((4, 8), (8, 1))
    view.t().unsqueeze(0).view(torch.int16).unfold(1, 2, 1).detach()
    torch.view_as_complex(arena.view(torch.float32).view(-1, 2))
    emu.synchronize()
    assert emu.virtual_time() == before and emu.memory_allocated() == allocated and emu.take_timeline() == []
    assert emu.counters()["allocations"] == 0
    assert view.data_ptr() == arena.data_ptr() + 64


def test_saving_and_loading(tmp_path):
    x = torch.randn(3)
    torch.save({"x": x.to("emu")}, tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt")["x"].device == torch.device("emu:0")
    assert torch.equal(torch.load(tmp_path / "x.pt", map_location="cpu")["x"], x)
    from safetensors.torch import load_file, save_file

    save_file({"x": x}, tmp_path / "x.safetensors")
    loaded = load_file(tmp_path / "x.safetensors", device="emu")["x"]
    assert loaded.device.type == "emu" and torch.equal(loaded.cpu(), x)


def test_cpu_view_shares_the_bytes(emu):
    x = torch.zeros(3, device="emu")
    emu.cpu_view(x)[1] = 5
    assert x.cpu().tolist() == [0, 5, 0]
    host = torch.zeros(3)
    assert emu.cpu_view(host) is host or emu.cpu_view(host).data_ptr() == host.data_ptr()
