"""Quantised weights: the tensors inside a wrapper move, exactly; what cannot be moved is said."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from ways import every_way, offload, runner

import greenroom
from greenroom import NotSupportedError, testing

pytestmark = pytest.mark.filterwarnings("ignore")


class Opaque(torch.Tensor):
    """A wrapper around a quantised matrix and its scales that does not say what is inside it."""

    qdata: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, qdata: torch.Tensor, scale: torch.Tensor) -> Opaque:
        return torch.Tensor._make_wrapper_subclass(cls, qdata.size(), dtype=scale.dtype, device=qdata.device)

    def __init__(self, qdata: torch.Tensor, scale: torch.Tensor) -> None:
        self.qdata, self.scale = qdata, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].qdata, args[0].scale)
        if func is torch.ops.aten._to_copy.default:
            device = (kwargs or {}).get("device")
            return cls(args[0].qdata.to(device), args[0].scale.to(device))
        plain = torch.utils._pytree.tree_map_only(cls, lambda t: t.qdata.to(t.scale.dtype) * t.scale, args)
        return func(*plain, **(kwargs or {}))


class Scaled(Opaque):
    """One that does, as the wrappers of libraries for quantisation do."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["qdata", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> Scaled:
        return cls(inner["qdata"], inner["scale"])


def quantise(module: nn.Module, kind: type[Opaque] = Scaled) -> None:
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            weight = layer.weight.detach()
            scale = weight.abs().amax(dim=1, keepdim=True) / 127
            qdata = (weight / scale).round().to(torch.int8)
            layer.weight = nn.Parameter(kind(qdata, scale), requires_grad=False)


def torchao(name: str) -> Callable[[nn.Module], None]:
    def apply(module: nn.Module) -> None:
        quantisation = pytest.importorskip("torchao.quantization")
        quantisation.quantize_(module, getattr(quantisation, name)())

    return apply


KINDS: dict[str, Callable[[nn.Module], None]] = {
    "toy": quantise,
    "torchao int8": torchao("Int8WeightOnlyConfig"),
    "torchao float8": torchao("Float8WeightOnlyConfig"),
}


def build(kind: str) -> Any:
    pipe = testing.build_pipeline("sd3")
    KINDS[kind](pipe.transformer)
    KINDS[kind](pipe.text_encoder_3)
    return pipe


def inner(module: nn.Module) -> list[torch.Tensor]:
    found = []
    for parameter in module.parameters():
        if type(parameter) is nn.Parameter:
            found.append(parameter)
        else:
            names, _ = parameter.__tensor_flatten__()
            found += [t for n in names if (t := getattr(parameter, n)) is not None]
    return found


@every_way
@pytest.mark.parametrize("kind", KINDS)
def test_quantised_weights_are_moved_exactly(emu: ModuleType, kind: str, way: str) -> None:
    run = runner("sd3")
    pipe = build(kind)
    expected = run(pipe)
    assert not torch.equal(expected, run(testing.build_pipeline("sd3")))
    identities = [id(p) for p in pipe.transformer.parameters()]
    values = [t.clone() for t in inner(pipe.transformer)]
    handle = offload(pipe, way)
    emu.reset_counters()
    for _ in range(2):
        assert torch.equal(run(pipe), expected)
    report = {c.name: c for c in handle.report().components}["transformer"]
    assert report.note == ""
    assert report.weights < 0.7 * sum(p.numel() * 4 for p in pipe.transformer.parameters())  # int8, not fp32, moves
    assert [id(p) for p in pipe.transformer.parameters()] == identities
    handle.disable()
    assert all(torch.equal(a.cpu(), b) for a, b in zip(inner(pipe.transformer), values, strict=True))
    assert {t.device.type for t in inner(pipe.transformer)} == {"cpu"}
    assert torch.equal(run(pipe), expected)
    assert emu.pinned_stats()["current"] == 0


@every_way
def test_gguf_weights_are_moved_exactly(emu: ModuleType, way: str) -> None:
    """Through the classes with which diffusers holds GGUF files: raw bytes, dequantised in each forward."""
    gguf = pytest.importorskip("gguf")
    from diffusers.quantizers.gguf.utils import GGUFParameter, _replace_with_gguf_linear

    run = runner("sd3")

    def build() -> Any:
        pipe = testing.build_pipeline("sd3")
        state = {}
        for name, value in pipe.transformer.state_dict().items():
            if value.ndim == 2 and value.shape[1] % 32 == 0 and "transformer_blocks" in name:
                raw = gguf.quants.quantize(value.numpy(), gguf.GGMLQuantizationType.Q8_0)
                state[name] = GGUFParameter(torch.from_numpy(raw.copy()), quant_type=gguf.GGMLQuantizationType.Q8_0)
        original = {k: v.clone() for k, v in pipe.transformer.state_dict().items()}
        _replace_with_gguf_linear(pipe.transformer, torch.float32, state)
        for name, parameter in list(pipe.transformer.named_parameters()):
            if parameter.is_meta:
                layer, _, leaf = name.rpartition(".")
                setattr(pipe.transformer.get_submodule(layer), leaf, state.get(name, nn.Parameter(original[name])))
        return pipe

    pipe, plain = build(), testing.build_pipeline("sd3")
    expected = run(pipe)
    assert not torch.equal(expected, run(plain))
    handle = offload(pipe, way)
    for _ in range(2):
        assert torch.equal(run(pipe), expected)
    assert type(pipe.transformer.transformer_blocks[0].attn.to_q.weight) is GGUFParameter
    handle.disable()
    assert torch.equal(run(pipe), expected)


@every_way
def test_a_kind_that_cannot_be_moved_stays_and_is_reported(emu: ModuleType, way: str) -> None:
    run = runner("sd3")
    pipe = testing.build_pipeline("sd3")
    pipe.transformer.proj_out.weight.data.clamp_(-0.3, 0.3)
    quantise(pipe.transformer.proj_out, Opaque)
    expected = run(pipe)
    with pytest.raises(NotSupportedError, match=r"transformer holds a Opaque.*on cpu.*accepted.*__tensor_flatten__"):
        offload(pipe, way)
    assert torch.equal(run(pipe), expected)
    layer = pipe.transformer.proj_out
    layer.weight = nn.Parameter(Opaque(layer.weight.qdata.to("emu"), layer.weight.scale.to("emu")), requires_grad=False)
    handle = offload(pipe, way)
    assert torch.equal(run(pipe), expected)
    assert "1 tensors of kind Opaque cannot be moved" in str(handle.report())
    handle.disable()
    assert pipe.transformer.proj_out.weight.device.type == "emu"


def test_a_model_that_cannot_leave_the_device(emu: ModuleType) -> None:
    """As bitsandbytes' 8-bit models, whose weights are not tensors that the host could hold."""
    pipe = testing.build_pipeline("sd3")
    quantise(pipe.text_encoder_3, Opaque)
    with pytest.raises(NotSupportedError, match=r"text_encoder_3 holds a Opaque"):
        greenroom.offload(pipe, {"mode": "module"}, device="emu")
    assert all("_hf_hook" not in vars(c) for c in pipe.components.values() if isinstance(c, nn.Module))


def test_layers_quantised_after_the_offload(emu: ModuleType) -> None:
    run = runner("sd3")
    pipe, plain = testing.build_pipeline("sd3"), testing.build_pipeline("sd3")
    offload(pipe, "layerwise")
    run(pipe)
    for each in (pipe, plain):
        quantise(each.transformer.transformer_blocks[2])
    expected = run(plain)
    for _ in range(2):
        assert torch.equal(run(pipe), expected)
