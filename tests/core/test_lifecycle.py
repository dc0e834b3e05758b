"""Enable, fail, switch, disable, delete: nothing is lost, half moved or left behind."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import pickle
import re
import threading
import weakref
from types import ModuleType
from typing import Any

import pytest
import torch
import toys

import greenroom


@pytest.fixture(params=toys.EVERY.values(), ids=toys.EVERY.keys())
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


def snapshot(pipe: toys.Pipeline) -> dict[str, Any]:
    """Everything that an offload might change and has to give back."""
    state: dict[str, Any] = {}
    for name, tensor in toys.tensors(pipe).items():
        state[name] = (id(tensor), tensor.device, tensor.dtype, tensor.stride(), tensor.is_pinned(), tensor.tolist())
    for name, component in pipe.components.items():
        for path, module in component.named_modules():
            hooks = len(module._forward_hooks), len(module._forward_pre_hooks), len(module._forward_hooks_always_called)
            attributes = sorted(k for k in vars(module) if not k.startswith("_forward"))
            state[f"{name}.{path}"] = (hooks, attributes, str(inspect.signature(module.forward)))
    state["pipeline"] = sorted(k for k in vars(pipe) if k != "_greenroom")
    return state


def make_odd(pipe: toys.Pipeline) -> None:
    """Strides and shared storage that a careless copy would lose."""
    block = pipe.transformer.blocks[1]
    block.down.weight.data = torch.randn(4 * toys.WIDTH, toys.WIDTH).t()
    both = torch.randn(2 * toys.WIDTH)
    block.norm.weight.data, block.norm.bias.data = both[: toys.WIDTH], both[toys.WIDTH :]
    block.offset.data = torch.randn(1).expand(toys.WIDTH)


def test_disable_gives_everything_back(emu: ModuleType, config: dict[str, Any]) -> None:
    pipe = toys.Pipeline()
    make_odd(pipe)
    before, expected = snapshot(pipe), pipe()
    handle = greenroom.offload(pipe, config, device="emu")
    pipe("emu")
    handle.disable()
    assert snapshot(pipe) == before
    assert torch.equal(pipe(), expected)
    assert emu.memory_allocated() == 0
    assert emu.pinned_stats()["current"] == 0
    handle.disable()
    assert not handle.enabled
    with pytest.raises(greenroom.OffloadError):
        handle.report()


def test_disable_restores_a_pipeline_that_was_on_the_device(emu: ModuleType, config: dict[str, Any]) -> None:
    pipe = toys.Pipeline()
    expected = pipe()
    for component in pipe.components.values():
        component.to("emu")
    before = snapshot(pipe)
    allocated = emu.memory_allocated()
    handle = greenroom.offload(pipe, config, device="emu")
    assert torch.equal(pipe("emu"), expected)
    handle.disable()
    assert snapshot(pipe) == before
    assert emu.memory_allocated() == allocated


def test_signatures_survive(emu: ModuleType, config: dict[str, Any]) -> None:
    pipe = toys.Pipeline()
    block, vae = pipe.transformer.blocks[0], pipe.vae
    before = inspect.signature(block.forward), inspect.signature(vae.decode), inspect.signature(pipe.vae.forward)
    greenroom.offload(pipe, config, device="emu")
    assert (inspect.signature(block.forward), inspect.signature(vae.decode), inspect.signature(vae.forward)) == before


def test_identity_and_ties_survive(emu: ModuleType, config: dict[str, Any]) -> None:
    pipe = toys.Pipeline()
    before = {name: id(t) for name, t in toys.tensors(pipe).items()}
    handle = greenroom.offload(pipe, config, device="emu")
    for _ in range(2):
        pipe("emu")
        assert {name: id(t) for name, t in toys.tensors(pipe).items()} == before
        assert pipe.text_encoder.head.weight is pipe.text_encoder.embed.weight
    tied = pipe.text_encoder.embed.weight.nbytes
    report = next(c for c in handle.report().components if c.name == "text_encoder")
    assert report.resident + report.moved < toys.nbytes(pipe.text_encoder) + tied / 2  # stored once


def test_state_dict_is_real_at_any_time(emu: ModuleType, config: dict[str, Any]) -> None:
    pipe = toys.Pipeline()
    expected = {k: v.clone() for k, v in pipe.transformer.state_dict().items()}
    greenroom.offload(pipe, config, device="emu")

    def check(step: int, x: torch.Tensor) -> None:
        for key, value in pipe.transformer.state_dict().items():
            assert torch.equal(value.cpu(), expected[key]), key

    pipe.between = check
    pipe("emu")
    check(0, torch.empty(0))


def test_the_pipeline_dies_when_it_is_deleted(emu: ModuleType, config: dict[str, Any]) -> None:
    gc.collect()
    assert emu.memory_allocated() == 0
    pipe = toys.Pipeline()
    handle = greenroom.offload(pipe, config, device="emu")
    pipe("emu")
    dead = weakref.ref(pipe)
    modules = [weakref.ref(m) for m in pipe.components.values()]
    gc.disable()
    try:
        del pipe
        assert dead() is None
        assert [m() for m in modules] == [None] * len(modules)
        assert emu.memory_allocated() == 0
        assert emu.pinned_stats()["current"] == 0
    finally:
        gc.enable()
    assert not handle.enabled


def test_enabling_twice_is_harmless(emu: ModuleType, config: dict[str, Any]) -> None:
    pipe = toys.Pipeline()
    expected = pipe()
    before = snapshot(pipe)
    first = greenroom.offload(pipe, config, device="emu")
    hooks = len(pipe.transformer._forward_pre_hooks)
    copied = first.report().copied
    second = greenroom.offload(pipe, config, device="emu")
    assert len(pipe.transformer._forward_pre_hooks) == hooks
    assert second.report().copied == copied
    assert torch.equal(pipe("emu"), expected)
    second.disable()
    assert not first.enabled
    assert snapshot(pipe) == before


def test_switching_strategy_is_a_clean_disable_first(emu: ModuleType) -> None:
    pipe = toys.Pipeline()
    expected, before = pipe(), snapshot(pipe)
    handle = None
    for config in (*toys.EVERY.values(), *reversed(toys.EVERY.values())):
        handle = greenroom.offload(pipe, config, device="emu")
        assert torch.equal(pipe("emu"), expected)
    assert handle is not None
    handle.disable()
    assert snapshot(pipe) == before


def test_dropping_the_handle_changes_nothing(emu: ModuleType, config: dict[str, Any]) -> None:
    pipe = toys.Pipeline()
    expected = pipe()
    greenroom.offload(pipe, config, device="emu")
    gc.collect()
    assert torch.equal(pipe("emu"), expected)


@pytest.mark.parametrize("fault", ["pin", "allocation", "copy"])
def test_a_failed_enable_leaves_the_pipeline_as_it_was(emu: ModuleType, config: dict[str, Any], fault: str) -> None:
    if fault == "pin" and config.get("pin_memory") is False:
        pytest.skip("nothing is pinned")
    pipe = toys.Pipeline()
    make_odd(pipe)
    before, expected = snapshot(pipe), pipe()
    failures = 0
    for k in range(1, 60):
        inject = {"pin": emu.fail_pin, "allocation": emu.fail_allocation, "copy": emu.fail_copy}[fault]
        inject(k)
        try:
            greenroom.offload(pipe, config, device="emu")
        except RuntimeError:
            inject(None)
            failures += 1
            assert snapshot(pipe) == before
            assert emu.memory_allocated() == 0
            assert emu.pinned_stats()["current"] == 0
            continue
        inject(None)
        break
    assert failures, "the fault was never met"
    assert torch.equal(pipe("emu"), expected)


def failing_modules(pipe: toys.Pipeline) -> list[Any]:
    return [
        pipe.text_encoder,
        pipe.text_encoder.layers[1],
        pipe.text_encoder_2.layers[1],
        pipe.transformer,
        pipe.transformer.blocks[0],
        pipe.transformer.blocks[3].down,
        pipe.transformer.single_blocks[2],
        pipe.transformer_2.blocks[2],
        pipe.vae.decoder,
    ]


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("index", range(9))
def test_the_call_after_a_failed_one_is_clean(
    emu: ModuleType, config: dict[str, Any], index: int, kind: type[BaseException]
) -> None:
    pipe = toys.Pipeline()
    expected = pipe()
    greenroom.offload(pipe, config, device="emu")
    pipe("emu")
    emu.reset_peak_memory_stats()
    pipe("emu")
    peak = emu.max_memory_allocated()
    for when in (1, 2):
        calls = 0

        def fail(module: Any, args: Any, output: Any, when: int = when) -> None:
            nonlocal calls
            calls += 1
            if calls == when:
                raise kind("injected")

        hook = failing_modules(pipe)[index].register_forward_hook(fail)
        with contextlib.suppress(kind):
            pipe("emu")
        assert calls >= 1
        hook.remove()
        gc.collect()  # torch's call frames are cycles
        emu.reset_peak_memory_stats()
        assert torch.equal(pipe("emu"), expected)
        assert emu.max_memory_allocated() == peak


def test_an_offload_from_inside_a_component_is_refused(emu: ModuleType) -> None:
    pipe = toys.Pipeline()
    handle = greenroom.offload(pipe, toys.LAYERWISE, device="emu")
    errors: list[str] = []

    def inside(module: Any, args: Any) -> None:
        for attempt in (handle.disable, lambda: greenroom.offload(pipe, toys.MODEL_LEVEL, device="emu")):
            with pytest.raises(greenroom.OffloadError) as caught:
                attempt()
            errors.append(str(caught.value))

    hook = pipe.transformer.blocks[0].register_forward_pre_hook(inside)
    pipe("emu", steps=2)
    hook.remove()
    assert len(errors) == 2
    handle.disable()


def test_edits_of_offloaded_weights_take_effect(emu: ModuleType, config: dict[str, Any]) -> None:
    def edit(pipe: toys.Pipeline) -> None:
        with torch.no_grad():
            pipe.transformer.blocks[0].down.weight.mul_(1.5)  # in place
            pipe.transformer.blocks[2].up.weight.data += 0.25  # in place, past the version counter
            norm = pipe.transformer_2.blocks[1].norm
            norm.bias.data = torch.ones_like(norm.bias.data)  # replaced

    plain, offloaded = toys.Pipeline(), toys.Pipeline()
    handle = greenroom.offload(offloaded, config, device="emu")
    offloaded("emu")
    edit(plain)
    with handle.materialized(offloaded.transformer):
        edit(offloaded)
    expected = plain()
    assert torch.equal(offloaded("emu"), expected)
    assert torch.equal(offloaded("emu"), expected)
    handle.disable()
    assert torch.equal(offloaded(), expected)


def test_replaced_layers_are_found_by_rescan(emu: ModuleType, config: dict[str, Any]) -> None:
    plain, offloaded = toys.Pipeline(), toys.Pipeline()
    handle = greenroom.offload(offloaded, config, device="emu")
    offloaded("emu")
    torch.manual_seed(5)
    layer = torch.nn.Linear(4 * toys.WIDTH, toys.WIDTH)
    plain.transformer.blocks[1].down = layer
    offloaded.transformer.blocks[1].down = pickle.loads(pickle.dumps(layer))
    handle.rescan()
    assert torch.equal(offloaded("emu"), plain())
    assert handle.enabled


def test_disabling_in_the_middle_of_a_call_is_refused(emu: ModuleType, config: dict[str, Any]) -> None:
    pipe = toys.Pipeline()
    expected = pipe()
    handle = greenroom.offload(pipe, config, device="emu")
    refused: list[int] = []

    def between(step: int, x: torch.Tensor) -> None:
        with pytest.raises(greenroom.OffloadError, match="while a call of Pipeline is running"):
            handle.disable()
        thread = threading.Thread(target=elsewhere, args=(step,))
        thread.start()
        thread.join()

    def elsewhere(step: int) -> None:
        with pytest.raises(greenroom.OffloadError, match="while a call of Pipeline is running"):
            handle.disable()
        refused.append(step)

    pipe.between = between
    assert torch.equal(pipe("emu"), expected)
    assert refused == [0, 1, 2, 3]
    pipe.between = None
    assert torch.equal(pipe("emu"), expected)
    handle.disable()
    assert torch.equal(pipe(), expected)


def test_disabling_after_a_call_that_failed(emu: ModuleType, config: dict[str, Any]) -> None:
    pipe = toys.Pipeline()
    expected = pipe()
    handle = greenroom.offload(pipe, config, device="emu")

    def between(step: int, x: torch.Tensor) -> None:
        raise ZeroDivisionError

    pipe.between = between
    with pytest.raises(ZeroDivisionError):
        pipe("emu")
    handle.disable()
    pipe.between = None
    assert torch.equal(pipe(), expected)


@pytest.mark.parametrize("call", ["rescan", "sleep", "offload", "set_memory"])
def test_moving_weights_in_the_middle_of_a_call_is_refused(emu: ModuleType, call: str) -> None:
    """From a step callback and from another thread; the call that runs is not disturbed."""
    pipe = toys.Pipeline()
    expected, total = pipe(), sum(map(toys.nbytes, pipe.components.values()))
    words: dict[str, Any] = {"memory": 2 * total} if call == "set_memory" else {"config": toys.LAYERWISE}
    handle = greenroom.offload(pipe, device="emu", **words)
    moves = {
        "rescan": handle.rescan,
        "sleep": handle.sleep,
        "offload": lambda: greenroom.offload(pipe, toys.MODEL_LEVEL, device="emu"),
        "set_memory": lambda: handle.set_memory(total),
    }
    refused: list[int] = []

    def refuse(step: int) -> None:
        with pytest.raises(greenroom.OffloadError, match=rf"{call}\(\) was called while a call of Pipeline is running"):
            moves[call]()
        refused.append(step)

    def between(step: int, x: torch.Tensor) -> None:
        refuse(step)
        thread = threading.Thread(target=refuse, args=(step,))
        thread.start()
        thread.join()

    pipe.between = between
    assert torch.equal(pipe("emu"), expected)
    assert refused == [0, 0, 1, 1, 2, 2, 3, 3]
    pipe.between = None
    assert torch.equal(pipe("emu"), expected)
    moves[call]()
    if call == "sleep":
        handle.wake()
    assert torch.equal(pipe("emu"), expected)


def test_the_same_words_in_the_middle_of_a_call_are_harmless(emu: ModuleType, config: dict[str, Any]) -> None:
    pipe = toys.Pipeline()
    expected = pipe()
    handle = greenroom.offload(pipe, config, device="emu")
    pipe.between = lambda step, x: greenroom.offload(pipe, config, device="emu")
    assert torch.equal(pipe("emu"), expected)
    assert handle.enabled


@pytest.mark.parametrize("strange", ["pipeline", None, "transformer", torch.nn.Linear(2, 2)])
def test_materializing_what_is_no_part_of_the_offload(emu: ModuleType, strange: Any) -> None:
    pipe = toys.Pipeline()
    handle = greenroom.offload(pipe, toys.LAYERWISE, device="emu")
    given = pipe if strange == "pipeline" else strange
    shown = {"pipeline": "Pipeline", None: "None", "transformer": "'transformer'"}.get(strange, "Linear")
    with (
        pytest.raises(greenroom.OffloadError, match=rf"materialized: {shown} is no part .* accepted: .*transformer_2"),
        handle.materialized(given),
    ):
        pass
    assert handle.enabled


def test_a_call_while_components_are_materialized_is_refused(emu: ModuleType, config: dict[str, Any]) -> None:
    plain, pipe = toys.Pipeline(), toys.Pipeline()
    handle = greenroom.offload(pipe, config, device="emu")
    pipe("emu")
    with handle.materialized(pipe.transformer), torch.no_grad():
        pipe.transformer.scale.mul_(2)
        plain.transformer.scale.mul_(2)
        with handle.materialized(pipe.vae):
            pipe.vae.decoder.bias.add_(1)
            plain.vae.decoder.bias.add_(1)
        with pytest.raises(greenroom.OffloadError, match=r"Pipeline was called inside .* call it after the block"):
            pipe("emu")
    for _ in range(2):
        assert torch.equal(pipe("emu"), plain())
    handle.disable()
    assert torch.equal(pipe(), plain())


@pytest.mark.parametrize("given", [10**30, "1KiB", "0.001%"])
def test_a_refused_budget_is_shown_as_it_was_given(emu: ModuleType, given: int | str) -> None:
    pipe = toys.Pipeline()
    words = re.escape(f"memory_budget = {given!r} is not accepted; accepted: at ")
    with pytest.raises(greenroom.ConfigError, match=words):
        greenroom.offload(pipe, memory=given, device="emu")
    with pytest.raises(greenroom.ConfigError, match=words):
        greenroom.offload(pipe, {"mode": "auto", "memory_budget": given}, device="emu")
    handle = greenroom.offload(pipe, memory="80%", device="emu")
    with pytest.raises(greenroom.ConfigError, match=words):
        handle.set_memory(given)


def test_a_deep_copy_is_whole_and_plain(emu: ModuleType, config: dict[str, Any]) -> None:
    """Of the pipeline between two calls, and of a component in the middle of one."""
    pipe = toys.Pipeline()
    make_odd(pipe)
    expected, before = pipe(), snapshot(pipe)
    handle = greenroom.offload(pipe, config, device="emu")
    pipe("emu")
    inside: list[Any] = []
    pipe.between = lambda step, x: inside.append(copy.deepcopy(pipe.transformer if step < 2 else pipe.transformer_2))
    pipe("emu")
    pipe.between = None
    copied = handle.report().copied
    twin = copy.deepcopy(pipe)
    other = toys.Pipeline()
    other.transformer, other.transformer_2 = inside[1], inside[2]
    assert torch.equal(twin(), expected)
    assert torch.equal(other(), expected)
    for each in (twin.transformer, *inside):
        assert {t.device.type for t in (*each.parameters(), *each.buffers())} == {"cpu"}
        assert all(not m._forward_hooks and not m._forward_pre_hooks for m in each.modules())
    assert handle.report().copied == copied  # nothing of the copy reaches the offload
    after = snapshot(twin)
    assert after.keys() == before.keys()
    for name, value in before.items():  # all but the identities, and where the host memory is
        if name in toys.tensors(pipe):
            assert after[name][1:4] + after[name][5:] == value[1:4] + value[5:], name
    assert twin.text_encoder.head.weight is twin.text_encoder.embed.weight
    with torch.no_grad():
        twin.transformer.scale.zero_()
    assert torch.equal(pipe("emu"), expected)
    handle.disable()
    assert snapshot(pipe) == before


class Keeps(toys.Block):
    """Makes views of its weights in its first forward, and reads them in the later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.views: dict[str, Any] = {}
        self.gain: Any = None

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        if self.gain is None:
            self.gain = self.scale_shift_table.detach()[1]
            self.views["shift"] = [self.scale_shift_table[0].detach(), self.down.weight.detach().t()]
        shift, weight = self.views["shift"]
        return super().forward(x, scale=scale) * (1 + self.gain) + shift + x @ weight.t()[:, : toys.WIDTH]


@pytest.mark.parametrize("share", [None, 0.5, 0.7, 0.9, 4.0])
def test_a_block_that_keeps_views_of_its_weights(emu: ModuleType, config: dict[str, Any], share: float | None) -> None:
    def build() -> toys.Pipeline:
        pipe = toys.Pipeline()
        torch.manual_seed(3)
        pipe.transformer.blocks = torch.nn.ModuleList(Keeps() for _ in range(6)).eval()
        return pipe

    if share is not None and config is not toys.MODEL_LEVEL:
        pytest.skip("a budget has no configuration")
    plain, pipe = build(), build()
    expected = [plain(seed=seed) for seed in range(3)]
    if share is None:
        handle = greenroom.offload(pipe, config, device="emu")
    else:
        memory = emu.memory_allocated() + int(share * sum(map(toys.nbytes, pipe.components.values())))
        handle = greenroom.offload(pipe, memory=memory, device="emu")
    for seed in (0, 1, 2):
        assert torch.equal(pipe("emu", seed=seed), expected[seed])
    emu.synchronize()
    settled = emu.memory_allocated()
    with handle.materialized(pipe.transformer), torch.no_grad():
        pipe.transformer.blocks[1].scale_shift_table.mul_(0.5)
    with torch.no_grad():
        plain.transformer.blocks[1].scale_shift_table.mul_(0.5)
    assert torch.equal(pipe("emu"), plain())
    assert emu.memory_allocated() == settled  # no view keeps device memory alive
    assert torch.equal(copy.deepcopy(pipe)(), plain())
    handle.disable()
    assert torch.equal(pipe(), plain())
    assert {pipe.transformer.blocks[i].gain.device.type for i in range(6)} == {"cpu"}
    assert emu.pinned_stats()["current"] == 0
