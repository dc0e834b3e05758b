"""The output equals the never-offloaded pipeline's, whatever the strategy and the order of calls."""

from __future__ import annotations

import types
from types import ModuleType
from typing import Any

import pytest
import torch
import toys
from torch import nn

import greenroom


@pytest.fixture(params=toys.EVERY.values(), ids=toys.EVERY.keys())
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


def test_repeated_calls_give_the_same_bits(emu: ModuleType, config: dict[str, Any]) -> None:
    pipe = toys.Pipeline()
    expected = [pipe(seed=s) for s in range(3)]
    greenroom.offload(pipe, config, device="emu")
    for seed in (0, 1, 2, 0):
        assert torch.equal(pipe("emu", seed=seed), expected[seed])


def test_copies_that_land_late_change_nothing(emu: ModuleType, config: dict[str, Any]) -> None:
    pipe = toys.Pipeline()
    expected = pipe()
    greenroom.offload(pipe, config, device="emu")
    emu.set_bandwidth(20e6)  # a block takes about 2 ms, far longer than its kernels
    assert torch.equal(pipe("emu"), expected)
    assert torch.equal(pipe("emu"), expected)


def test_the_virtual_clock_gives_the_same_bits(emu: ModuleType, config: dict[str, Any]) -> None:
    pipe = toys.Pipeline()
    expected = pipe()
    emu.set_virtual_time(True)
    emu.set_bandwidth(1e9)
    greenroom.offload(pipe, config, device="emu")
    assert torch.equal(pipe("emu"), expected)


@pytest.mark.parametrize(
    "orders",
    [
        [[0, 1, 2, 3, 4, 5, 6], [0, 1, 3, 4, 6], [0, 1, 2, 3, 4, 5, 6]],  # skipped, as skip-layer guidance does
        [[6, 5, 4, 3, 2, 1, 0]] * 3,  # not the declared order
        [[0, 0, 1, 1, 2, 2], [3, 3, 3], [0]],  # repeated
        [[4, 0, 5, 1], [2, 6], [], [1, 5, 0, 4]],
    ],
    ids=["skipped", "reversed", "repeated", "conditional"],
)
def test_any_order_of_blocks_gives_the_same_bits(emu: ModuleType, config: dict[str, Any], orders: Any) -> None:
    pipe = toys.Pipeline()
    x, context = toys.inputs()
    with torch.no_grad():
        expected = [pipe.transformer(x, context, order) for order in orders]
        greenroom.offload(pipe, config, device="emu")
        for order, value in zip(orders, expected, strict=True):
            assert torch.equal(pipe.transformer(x, context, order).cpu(), value)


def test_an_order_seen_once_is_prefetched_the_next_time(emu: ModuleType) -> None:
    pipe = toys.Pipeline()
    handle = greenroom.offload(pipe, toys.LAYERWISE_DIT, device="emu")
    x, context = toys.inputs()
    order = [6, 4, 2, 0, 1, 3, 5]
    with torch.no_grad():
        for _ in range(2):
            pipe.transformer(x, context, order)
        before = handle.report().misses
        for _ in range(3):
            pipe.transformer(x, context, order)
    assert handle.report().misses == before


def test_a_skipped_block_costs_at_most_one_synchronous_load(emu: ModuleType) -> None:
    pipe = toys.Pipeline()
    handle = greenroom.offload(pipe, toys.LAYERWISE_DIT, device="emu")
    x, context = toys.inputs()
    with torch.no_grad():
        pipe.transformer(x, context)
        before = handle.report().misses
        pipe.transformer(x, context, [0, 1, 2, 4, 5, 6])
        assert handle.report().misses <= before + 1


def test_entry_points_that_are_not_forward(emu: ModuleType, config: dict[str, Any]) -> None:
    pipe = toys.Pipeline()
    tokens, x = torch.arange(5)[None], torch.randn(1, 5, toys.WIDTH)
    with torch.no_grad():
        expected = [
            pipe.text_encoder.generate(tokens),
            pipe.text_encoder.get_text_features(tokens),
            pipe.vae.encode(x),
            pipe.vae.decode(x),
            pipe.text_encoder.layers[1](x),
            pipe.vae.decoder(x),
        ]
        greenroom.offload(pipe, config, device="emu")
        found = [
            pipe.text_encoder.generate(tokens),
            pipe.text_encoder.get_text_features(tokens),
            pipe.vae.encode(x),
            pipe.vae.decode(z=x),
            pipe.text_encoder.layers[1](x.to("emu")),
            pipe.vae.decoder(x.to("emu")),
        ]
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.cpu(), b)


def test_generate_moves_each_block_once(emu: ModuleType) -> None:
    pipe = toys.Pipeline()
    handle = greenroom.offload(pipe, toys.LAYERWISE, device="emu")
    tokens = torch.arange(5)[None]
    encoder = next(c for c in handle.report().components if c.name == "text_encoder")
    before = handle.report().copied
    with torch.no_grad():
        pipe.text_encoder.generate(tokens, new=8)
    assert handle.report().copied - before <= encoder.moved + handle.report().arena


def test_a_preview_decoded_between_steps(emu: ModuleType, config: dict[str, Any]) -> None:
    pipe = toys.Pipeline()
    previews: list[torch.Tensor] = []
    pipe.between = lambda step, x: previews.append(pipe.vae.decode(x).cpu())
    expected = pipe()
    expected_previews, previews = previews, []
    greenroom.offload(pipe, config, device="emu")
    assert torch.equal(pipe("emu"), expected)
    for a, b in zip(previews, expected_previews, strict=True):
        assert torch.equal(a, b)


def test_buffers_changed_in_forward_keep_their_values(emu: ModuleType, config: dict[str, Any]) -> None:
    class Counting(toys.Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            self.offset.add_(0.5)
            return super().forward(x)

    def build() -> toys.Pipeline:
        torch.manual_seed(3)
        pipe = toys.Pipeline()
        pipe.transformer.blocks = nn.ModuleList(Counting() for _ in range(4))
        return pipe

    plain, offloaded = build(), build()
    offloaded.transformer.load_state_dict(plain.transformer.state_dict())
    for a, b in zip(plain.transformer.buffers(), offloaded.transformer.buffers(), strict=True):
        b.copy_(a)
    expected = [plain() for _ in range(3)]
    handle = greenroom.offload(offloaded, config, device="emu")
    for value in expected:
        assert torch.equal(offloaded("emu"), value)
    handle.disable()
    for name, value in toys.tensors(plain).items():
        assert torch.equal(toys.tensors(offloaded)[name], value), name


def test_inference_mode(emu: ModuleType, config: dict[str, Any]) -> None:
    pipe = toys.Pipeline()
    expected = pipe()
    with torch.inference_mode():
        handle = greenroom.offload(pipe, config, device="emu")
        assert torch.equal(pipe("emu"), expected)
    assert torch.equal(pipe("emu"), expected)
    handle.disable()
    assert torch.equal(pipe(), expected)


def test_two_threads_are_serialised(emu: ModuleType, config: dict[str, Any]) -> None:
    pipe = toys.Pipeline()
    expected = [pipe(seed=s) for s in range(2)]
    greenroom.offload(pipe, config, device="emu")

    def work(seed: int) -> None:
        for _ in range(4):
            assert torch.equal(pipe("emu", seed=seed), expected[seed])

    toys.at_once(lambda: work(0), lambda: work(1))


def test_two_pipelines_in_turns(emu: ModuleType, config: dict[str, Any]) -> None:
    first, second = toys.Pipeline(), toys.Pipeline(blocks=2)
    expected = first(), second()
    greenroom.offload(first, config, device="emu")
    greenroom.offload(second, config, device="emu")
    for _ in range(2):
        assert torch.equal(first("emu"), expected[0])
        assert torch.equal(second("emu"), expected[1])


def test_gradients_through_streamed_blocks_are_refused(emu: ModuleType) -> None:
    pipe = toys.Pipeline()
    context = {"embeds": [torch.randn(1, 4, toys.WIDTH)]}
    greenroom.offload(pipe, toys.LAYERWISE_DIT, device="emu")
    x = torch.randn(1, 4, toys.WIDTH).to("emu").requires_grad_()
    with pytest.raises(greenroom.OffloadError, match="inference"):
        pipe.transformer(x, context).square().sum().backward()
    greenroom.offload(pipe, toys.MODEL_LEVEL, device="emu")
    pipe.transformer(x, context).square().sum().backward()
    assert x.grad is not None


def test_statistics_of_normalisation_in_training_are_kept(emu: ModuleType, config: dict[str, Any]) -> None:
    class Normed(toys.Block):
        def __init__(self) -> None:
            super().__init__()
            self.statistics = nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(self.statistics(x))

    plain, offloaded = (toys.with_blocks(Normed, seed=7) for _ in range(2))
    for pipe in (plain, offloaded):
        pipe.transformer.blocks.train()
    x, context = toys.inputs(batch=2)
    handle = greenroom.offload(offloaded, config, device="emu")
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(offloaded.transformer(x, context).cpu(), plain.transformer(x, context))
    handle.disable()
    for a, b in zip(plain.transformer.buffers(), offloaded.transformer.buffers(), strict=True):
        assert torch.equal(a, b)


def test_weights_made_in_inference_mode(emu: ModuleType, config: dict[str, Any]) -> None:
    with torch.inference_mode():
        pipe = toys.Pipeline()
        expected = pipe()
        handle = greenroom.offload(pipe, config, device="emu")
        for _ in range(2):
            assert torch.equal(pipe("emu"), expected)
        handle.disable()
        assert torch.equal(pipe(), expected)


def test_a_pipeline_may_be_any_object_with_modules(emu: ModuleType) -> None:
    source = toys.Pipeline()
    x, context = toys.inputs()
    with torch.no_grad():
        expected = source.transformer(x, context)
        plain = types.SimpleNamespace(transformer=source.transformer)
        handle = greenroom.offload(plain, toys.LAYERWISE_DIT, device="emu")
        assert torch.equal(plain.transformer(x, context).cpu(), expected)
        handle.disable()
        module = nn.Module()
        module.transformer = source.transformer
        greenroom.offload(module, memory="1GB", device="emu")
        assert torch.equal(module.transformer(x, context).cpu(), expected)
    for nothing in ({"transformer": source.transformer}, 3, types.SimpleNamespace(a=1)):
        with pytest.raises(greenroom.TopologyError, match="pipeline"):
            greenroom.offload(nothing, toys.LAYERWISE_DIT, device="emu")


def test_the_host_as_the_device(config: dict[str, Any]) -> None:
    pipe = toys.Pipeline()
    expected = pipe()
    handle = greenroom.offload(pipe, config, device="cpu")
    assert torch.equal(pipe(), expected)
    handle.disable()
    assert torch.equal(pipe(), expected)
