"""A memory budget is kept, used to the last block, and refused when nothing fits."""

from __future__ import annotations

import random
import re
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
import toys

import greenroom
from greenroom import testing

STEPS = 6


class OneDiT(toys.Pipeline):
    def __init__(self) -> None:
        super().__init__(blocks=10, single=6)
        self.transformer_2 = None
        self.text_encoder_2 = None

    @torch.no_grad()
    def __call__(self, device: Any = "cpu", steps: int = STEPS, seed: int = 0) -> torch.Tensor:
        embeds = self.text_encoder(torch.arange(6)[None].to(self.text_encoder.embed.weight.device))
        x = torch.randn(1, 6, toys.WIDTH, generator=torch.Generator().manual_seed(seed)).to(device)
        for _ in range(steps):
            x = self.transformer(x, {"embeds": [embeds]})
        image = self.vae.decode(x).cpu()
        self.maybe_free_model_hooks()
        return image


class TwoDiTs(toys.Pipeline):
    def __init__(self) -> None:
        super().__init__(blocks=8, single=4)


class TwoEncoders(OneDiT):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.text_encoder = toys.Encoder(6).eval()
        self.text_encoder_2 = toys.Encoder(8).eval()

    @torch.no_grad()
    def __call__(self, device: Any = "cpu", steps: int = STEPS, seed: int = 0) -> torch.Tensor:
        return super().__call__(device, steps, seed) + self.text_encoder_2(torch.arange(6)[None]).cpu()


PIPELINES = {"one DiT": OneDiT, "two DiTs": TwoDiTs, "two text encoders": TwoEncoders}


def weights(pipe: toys.Pipeline) -> int:
    return sum(map(toys.nbytes, pipe.components.values()))


def modelled(emu: ModuleType, bandwidth: float = 2e9) -> None:
    emu.set_virtual_time(True, flops=1e12, membw=100e9, launch=1e-7, kernel_latency=1e-6)
    emu.set_bandwidth(bandwidth)


@pytest.mark.parametrize("build", PIPELINES.values(), ids=PIPELINES.keys())
def test_from_too_little_to_everything(emu: ModuleType, build: type[toys.Pipeline]) -> None:
    """Each budget gives the same bits, within the budget, or names the smallest one; and that one, tried, works."""
    modelled(emu)
    pipe = build()
    expected, total = pipe(steps=STEPS), weights(pipe)
    served = refused = 0
    for step in range(12):
        budget = int(total * (0.03 + 0.12 * step))
        emu.set_capacity(budget)
        try:
            handle = greenroom.offload(pipe, memory=budget, device="emu")
        except greenroom.ConfigError as error:
            refused += 1
            smallest = int(re.search(r"at least (\d+) bytes", str(error)).group(1))  # type: ignore[union-attr]
            assert budget < smallest < total
            continue
        try:
            for _ in range(3):
                assert torch.equal(pipe("emu", steps=STEPS), expected)
            served += 1
            assert handle.report().peak <= budget
        except torch.OutOfMemoryError as error:
            refused += 1
            smallest = int(re.search(r"at least (\d+) bytes", str(error)).group(1))  # type: ignore[union-attr]
            assert budget < smallest
            emu.set_capacity(smallest)
            handle.set_memory(smallest)
            assert torch.equal(pipe("emu", steps=STEPS), expected)
        handle.disable()
    assert served >= 8
    assert refused >= 1


@pytest.mark.parametrize("build", PIPELINES.values(), ids=PIPELINES.keys())
def test_more_memory_moves_fewer_bytes(emu: ModuleType, build: type[toys.Pipeline]) -> None:
    modelled(emu)
    pipe = build()
    total = weights(pipe)
    moved = []
    for share in (0.35, 0.6, 0.85, 1.3):
        greenroom.offload(pipe, memory=int(total * share), device="emu")
        for _ in range(2):
            pipe("emu", steps=STEPS)
        emu.reset_counters()
        pipe("emu", steps=STEPS)
        moved.append(emu.counters()["h2d_bytes"])
    assert moved[0] > moved[1] > moved[2] > moved[3]
    assert moved[3] < 20_000  # inputs: when everything fits, nothing is ever evicted


def test_predicted_and_measured_peak(emu: ModuleType) -> None:
    modelled(emu)
    pipe = OneDiT()
    budget = int(weights(pipe) * 0.6)
    handle = greenroom.offload(pipe, memory=budget, device="emu")
    pipe("emu")
    emu.reset_peak_memory_stats()
    pipe("emu")
    report = handle.report()
    measured = emu.max_memory_allocated()
    assert report.predicted_peak == pytest.approx(measured, rel=0.02)
    assert report.peak <= budget
    assert report.budget == budget


def test_what_was_there_before_is_not_measured(emu: ModuleType) -> None:
    pipe = OneDiT()
    before = torch.empty(100_000_000, dtype=torch.uint8, device="emu")
    del before
    handle = greenroom.offload(pipe, memory=weights(pipe), device="emu")
    pipe("emu")
    assert handle.report().peak <= weights(pipe)


def test_others_on_the_device_come_and_go(emu: ModuleType) -> None:
    """Tensors of others are part of the budget, those that come later too: blocks make room for them and return."""
    modelled(emu)
    pipe = OneDiT()
    expected, budget = pipe(), int(weights(pipe) * 0.6)
    greenroom.offload(pipe, memory=budget, device="emu")
    peaks, copied = [], []
    others: list[torch.Tensor] = []
    for nbytes in (0, 0, budget // 4, budget // 4, 0, 0):
        others[:] = [torch.empty(nbytes, dtype=torch.uint8, device="emu")]
        emu.synchronize()
        emu.reset_peak_memory_stats()
        emu.reset_counters()
        assert torch.equal(pipe("emu"), expected)
        emu.synchronize()
        peaks.append(emu.max_memory_allocated())
        copied.append(emu.counters()["h2d_bytes"])
    assert max(peaks[1:]) <= budget
    assert copied[3] > copied[1] == copied[5]


def test_a_need_that_was_only_told_ahead_is_not_said_to_be_too_much(emu: ModuleType) -> None:
    """From a small picture a larger one is told to need more than it does: it fits, and no warning says otherwise."""
    pipe = testing.build_pipeline("sdxl", dtype=torch.float16)
    greenroom.offload(pipe, memory=4_241_664, device="emu")
    words = testing.call_kwargs("sdxl")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe(**words)
        emu.reset_peak_memory_stats()
        pipe(**{**words, "height": 128, "width": 128})
    assert emu.max_memory_allocated() <= 4_241_664
    assert not [w for w in caught if "cannot be kept" in str(w.message)]


def test_the_budget_can_be_changed_between_calls(emu: ModuleType) -> None:
    modelled(emu)
    pipe = OneDiT()
    expected, total = pipe(), weights(pipe)
    handle = greenroom.offload(pipe, memory=int(total * 1.5), device="emu")
    pins = emu.counters()["pins"]
    for share in (1.5, 0.5, 0.25, 0.8, 1.5):
        handle.set_memory(int(total * share))
        for _ in range(2):
            emu.reset_peak_memory_stats()
            assert torch.equal(pipe("emu"), expected)
        assert emu.max_memory_allocated() <= total * share
    assert emu.counters()["pins"] == pins
    before = handle.report()
    with pytest.raises(greenroom.ConfigError, match="at least"):
        handle.set_memory(20_000)
    assert handle.report().budget == before.budget
    assert torch.equal(pipe("emu"), expected)


@pytest.mark.parametrize("mode", ["module", "layer"])
def test_an_explicit_mode_is_kept(emu: ModuleType, mode: str) -> None:
    modelled(emu)
    pipe = OneDiT()
    expected = pipe()
    config = {"mode": mode, "components": ["dit", "text_encoder"], "memory_budget": int(weights(pipe) * 0.9)}
    handle = greenroom.offload(pipe, config, device="emu")
    for _ in range(2):
        assert torch.equal(pipe("emu"), expected)
    placements = {c.placement for c in handle.report().components}
    assert placements <= ({"resident", "swap"} if mode == "module" else {"resident", "stream"})


def test_a_larger_shape_is_planned_for_before_it_fails(emu: ModuleType) -> None:
    modelled(emu)
    pipe = OneDiT()
    context = {"embeds": [torch.zeros(1, 1, toys.WIDTH, device="emu")]}
    sizes = [torch.randn(1, n, toys.WIDTH, generator=torch.Generator().manual_seed(n)) for n in (4, 256, 64, 1024)]
    with torch.no_grad():
        expected = [pipe.transformer(x, {"embeds": [torch.zeros(1, 1, toys.WIDTH)]}) for x in sizes]
        handle = greenroom.offload(pipe, memory=int(weights(pipe) * 1.1), device="emu")
        pipe("emu")
        pipe("emu")
        for x, value in zip(sizes, expected, strict=True):
            for _ in range(2):
                assert torch.equal(pipe.transformer(x.to("emu"), context).cpu(), value)
            pipe.maybe_free_model_hooks()
    assert handle.report().out_of_memory == 0


def test_running_out_of_memory_shrinks_and_runs_again(emu: ModuleType) -> None:
    """The device has less than the budget says: in the middle of a forward somebody else takes some of it."""
    modelled(emu)
    pipe = OneDiT()
    expected, total = pipe(), weights(pipe)
    handle = greenroom.offload(pipe, memory=int(total * 1.5), device="emu")
    pipe("emu")
    greedy = pipe.transformer.blocks[2].register_forward_pre_hook(lambda *_: emu.set_capacity(int(total * 0.5)))
    assert torch.equal(pipe("emu"), expected)
    greedy.remove()
    assert handle.report().out_of_memory >= 1
    before = handle.report().out_of_memory
    assert torch.equal(pipe("emu"), expected)
    assert handle.report().out_of_memory == before  # planned for from now on
    assert emu.memory_allocated() <= total * 0.5


def test_generate_holds_what_fits_into_the_budget(emu: ModuleType) -> None:
    modelled(emu)
    pipe = TwoEncoders()
    tokens = torch.arange(5)[None]
    with torch.no_grad():
        expected = pipe.text_encoder_2.generate(tokens, new=6)
        total = weights(pipe)
        handle = greenroom.offload(pipe, memory=int(total * 0.2), device="emu")
        pipe("emu")
        moved = []
        for _ in range(3):
            emu.reset_counters()
            emu.reset_peak_memory_stats()
            assert torch.equal(pipe.text_encoder_2.generate(tokens, new=6).cpu(), expected)
            moved.append(emu.counters()["h2d_bytes"])
            pipe.maybe_free_model_hooks()
            assert emu.max_memory_allocated() <= total * 0.2
    assert handle.report().peak <= total * 0.2
    assert moved[-1] < 6 * toys.nbytes(pipe.text_encoder_2)


def test_nothing_left_to_give(emu: ModuleType) -> None:
    modelled(emu)
    pipe = OneDiT()
    expected, total = pipe(), weights(pipe)
    handle = greenroom.offload(pipe, memory=int(total * 0.5), device="emu")
    emu.set_capacity(30_000)
    with pytest.raises(torch.OutOfMemoryError, match=r"(?s)at least .*transformer: stream"):
        pipe("emu")
    emu.set_capacity(int(total * 0.5))
    assert torch.equal(pipe("emu"), expected)
    assert handle.enabled


def test_inputs_survive_a_second_run(emu: ModuleType) -> None:
    """A forward that empties a dictionary it was given, and draws random numbers, is run again from what it got."""

    class Hungry(toys.DiT):
        def forward(self, x: torch.Tensor, context: dict[str, Any], order: Any = None) -> torch.Tensor:
            embeds = context.pop("embeds")
            noise = torch.randn(x.shape, device=x.device, generator=context["generator"])
            return super().forward(x + noise, {"embeds": embeds}, order)

    torch.manual_seed(1)
    pipe = toys.Pipeline()
    pipe.transformer = Hungry().eval()

    def call(device: str) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(3)
        x = torch.ones(1, 6, toys.WIDTH, device=device)
        context = {"embeds": [torch.ones(1, 6, toys.WIDTH, device=device)], "generator": generator}
        with torch.no_grad():
            return pipe.transformer(x, context).cpu()

    expected = call("cpu")
    greenroom.offload(pipe, memory=weights(pipe) * 2, device="emu")
    assert torch.equal(call("emu"), expected)
    for k in (3, 9, 30):
        emu.fail_allocation(k)
        assert torch.equal(call("emu"), expected)
        emu.fail_allocation(None)


@pytest.mark.parametrize("share", [0.35, 0.7, 1.4])
def test_out_of_memory_at_any_allocation(emu: ModuleType, share: float) -> None:
    modelled(emu)
    pipe = TwoDiTs()
    expected, total = pipe(steps=STEPS), weights(pipe)
    handle = greenroom.offload(pipe, memory=int(total * share), device="emu")
    pipe("emu", steps=STEPS)
    emu.reset_counters()
    pipe("emu", steps=STEPS)
    allocations = emu.counters()["allocations"]
    generator = random.Random(0)
    finished = 0
    for _ in range(34):
        emu.fail_allocation(generator.randrange(1, allocations))
        try:
            assert torch.equal(pipe("emu", steps=STEPS), expected)
            finished += 1
        except torch.OutOfMemoryError:
            pass
        emu.fail_allocation(None)
        assert torch.equal(pipe("emu", steps=STEPS), expected)
    assert finished >= 24  # those that fail meet it in the pipeline's own code, between components
    assert handle.report().peak <= total * share


def test_two_hundred_calls_in_a_row(emu: ModuleType) -> None:
    modelled(emu)
    pipe = toys.Pipeline()
    greenroom.offload(pipe, memory=int(weights(pipe) * 0.6), device="emu")
    seen = []
    for _ in range(200):
        pipe("emu", steps=2)
        seen.append((emu.memory_allocated(), emu.pinned_stats()["current"], emu.pinned_stats()["count"]))
    assert len(set(seen[2:])) == 1


def test_no_hook_is_left_on_blocks_that_all_fit(emu: ModuleType) -> None:
    pipe = OneDiT()
    greenroom.offload(pipe, memory=weights(pipe) * 4, device="emu")
    for _ in range(2):
        pipe("emu")
    assert all(not b._forward_pre_hooks and not b._forward_hooks for b in pipe.transformer.blocks)


def test_what_is_free_is_the_budget_by_default(emu: ModuleType) -> None:
    pipe = OneDiT()
    expected, total = pipe(), weights(pipe)
    emu.set_capacity(int(total * 0.7))
    handle = greenroom.offload(pipe, device="emu")
    for _ in range(3):
        assert torch.equal(pipe("emu"), expected)
    assert handle.report().budget == int(total * 0.7) - int(0.05 * int(total * 0.7))


def test_a_percentage_is_of_the_device(emu: ModuleType) -> None:
    pipe = OneDiT()
    emu.set_capacity(8_000_000)
    assert greenroom.offload(pipe, memory="25%", device="emu").report().budget == 2_000_000


def test_bad_budgets_are_refused_before_anything_is_touched(emu: ModuleType) -> None:
    pipe = OneDiT()
    for memory in ("12 bananas", 0, -3, "120%", True, [1]):
        with pytest.raises(greenroom.ConfigError, match="memory"):
            greenroom.offload(pipe, memory=memory, device="emu")
    emu.set_capacity(1_000_000)
    with pytest.raises(greenroom.ConfigError, match="at most"):
        greenroom.offload(pipe, memory=2_000_000, device="emu")
    config = {"mode": "layer", "layer_options": {"dit": {"resident_layers": 2}}, "memory_budget": 500_000}
    with pytest.raises(greenroom.ConfigError, match="resident_layers"):
        greenroom.offload(pipe, config, device="emu")
    assert all(not c._forward_pre_hooks for c in pipe.components.values())
    assert emu.pinned_stats()["current"] == 0


def test_a_budget_that_turns_out_too_small_is_said_once(emu: ModuleType) -> None:
    """No hardware limit stops activations from exceeding a budget; the least is kept and somebody is told."""
    pipe = OneDiT()
    smallest = None
    try:
        greenroom.offload(pipe, memory=1000, device="emu")
    except greenroom.ConfigError as error:
        smallest = int(re.search(r"at least (\d+) bytes", str(error)).group(1))  # type: ignore[union-attr]
    assert smallest is not None
    expected = pipe()
    greenroom.offload(pipe, memory=smallest + 600, device="emu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert torch.equal(pipe("emu"), expected)
    assert sum("cannot be kept" in str(w.message) for w in caught) == 1


def test_a_rescan_keeps_the_budget_that_was_set(emu: ModuleType) -> None:
    pipe = OneDiT()
    expected, total = pipe(), weights(pipe)
    handle = greenroom.offload(pipe, memory=2 * total, device="emu")
    handle.set_memory(total)
    for _ in range(2):
        handle.rescan()
        assert handle.report().budget == total
        assert torch.equal(pipe("emu"), expected)
