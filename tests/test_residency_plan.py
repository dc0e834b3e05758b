"""The plan of a whole pipeline call: what fits, what is fastest, and what a refusal says."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.residency import (
    Block,
    BudgetTooSmall,
    Component,
    PipelineModel,
    Plan,
    TransferCurve,
    plan_call,
    run_s,
)

GB, MB = 10**9, 10**6
CURVE = TransferCurve(20e-6, 25e9)
quick = settings(derandomize=True, deadline=None, max_examples=60)


def equal(megabytes: float, seconds: float, count: int) -> tuple[Block, ...]:
    return (Block(round(megabytes * MB), seconds),) * count


def flux2(calls: int = 50) -> PipelineModel:
    return PipelineModel(
        (
            Component("text_encoder", "text_encoder", 2760 * MB, equal(1111.5, 0.02, 40), activation_bytes=GB),
            Component(
                "transformer",
                "dit",
                1630 * MB,
                equal(1962.9, 0.03, 8) + equal(981.5, 0.015, 48),
                calls=calls,
                activation_bytes=3 * GB,
            ),
            Component("vae", "vae", 170 * MB, other_s=0.3, activation_bytes=5 * GB),
        ),
        reserved_bytes=GB,
    )


def wan(seconds: float = 0.01) -> PipelineModel:
    experts = tuple(
        Component(name, "dit", 470 * MB, equal(702.8, seconds, 40), calls=40, activation_bytes=2 * GB)
        for name in ("transformer", "transformer_2")
    )
    encoder = Component("text_encoder", "text_encoder", 2100 * MB, equal(385.9, 0.005, 24), calls=2)
    return PipelineModel((encoder, *experts, Component("vae", "vae", 250 * MB, other_s=3.0, activation_bytes=3 * GB)))


def peaks(model: PipelineModel, plan: Plan) -> dict[str, int]:
    """Bytes of each phase, counted from what each component is said to hold."""
    found = {}
    for phase in model.phases:
        total = model.reserved_bytes + plan.shared_arena_bytes
        for c in model.components:
            part = plan.component(c.name)
            held = c.other_bytes + sum(c.blocks[i].bytes for i in part.resident)
            if part.hold == "always":
                total += held
            elif c.phase == phase:
                total += held + part.arena_bytes
        found[phase] = total + max(c.activation_bytes for c in model.components if c.phase == phase)
    return found


@st.composite
def models(draw: st.DrawFn) -> PipelineModel:
    def blocks(most: int) -> tuple[Block, ...]:
        sizes = draw(st.lists(st.sampled_from([60, 100, 200]), max_size=most))
        return tuple(Block(s * MB, s * 1e-4 * draw(st.sampled_from([0.3, 1.0]))) for s in sizes)

    def component(name: str, role: str, most: int, calls: int) -> Component:
        return Component(
            name,
            role,
            draw(st.integers(0, 300)) * MB,
            blocks(most),
            calls=calls,
            loads=draw(st.integers(1, 2)),
            other_s=draw(st.sampled_from([0.0, 0.02])),
            activation_bytes=draw(st.integers(0, 400)) * MB,
        )

    parts = [component(f"text_encoder_{i}", "text_encoder", 5, 2) for i in range(draw(st.integers(0, 2)))]
    parts += [component(f"transformer_{i}", "dit", 8, draw(st.integers(1, 30))) for i in range(draw(st.integers(1, 2)))]
    parts.append(component("vae", "vae", 0, 1))
    parts.append(component("controlnet", "other", 0, 0))
    return PipelineModel(tuple(parts), reserved_bytes=draw(st.integers(0, 100)) * MB)


def smallest_budget(model: PipelineModel) -> int:
    with pytest.raises(BudgetTooSmall) as refusal:
        plan_call(model, -1, CURVE)
    return refusal.value.minimum_bytes


@quick
@given(models(), st.floats(0, 1.2))
def test_a_plan_holds_its_budget_in_every_phase(model: PipelineModel, share: float) -> None:
    least, total = smallest_budget(model), sum(c.total_bytes for c in model.components)
    budget = least + int(share * max(0, total + 500 * MB - least))
    plan = plan_call(model, budget, CURVE)
    assert {p.name: p.peak_bytes for p in plan.phases} == peaks(model, plan)
    assert plan.peak_bytes == max(p.peak_bytes for p in plan.phases) <= budget
    assert plan.call_s == pytest.approx(sum(c.seconds for c in plan.components))
    assert plan.call_s >= sum(c.calls * c.compute_s for c in model.components) * (1 - 1e-9)
    for c in model.components:
        part = plan.component(c.name)
        assert part.strategy in c.allowed
        assert part.strategy == "stream" or part.resident == tuple(range(len(c.blocks)))
        assert (part.refill_bytes > 0) == (part.hold == "phase" and part.held_bytes > 0)


@quick
@given(models())
def test_the_smallest_budget_works_and_one_byte_less_is_refused(model: PipelineModel) -> None:
    least = smallest_budget(model)
    assert plan_call(model, least, CURVE).peak_bytes <= least
    with pytest.raises(BudgetTooSmall) as refusal:
        plan_call(model, least - 1, CURVE)
    assert refusal.value.minimum_bytes == least == sum(nbytes for _, nbytes in refusal.value.items)
    assert refusal.value.phase in model.phases
    assert f"got {least - 1} bytes" in str(refusal.value)
    assert f"at least {least} " in str(refusal.value)


@quick
@given(models(), st.floats(0, 1), st.floats(0, 1))
def test_more_memory_is_never_noticeably_slower(model: PipelineModel, one: float, other: float) -> None:
    least, total = smallest_budget(model), sum(c.total_bytes for c in model.components)
    small, large = sorted(least + int(x * max(0, total - least)) for x in (one, other))
    # A tie of 1 % goes to the coarser plan, one slot must gain 1.5 %, and the search is allowed 2 %.
    assert plan_call(model, large, CURVE).call_s <= plan_call(model, small, CURVE).call_s * 1.045


@quick
@given(models(), st.floats(0, 1.2))
def test_no_plain_plan_that_fits_is_faster(model: PipelineModel, share: float) -> None:
    """Everything resident, and all groups in their phase alone, worked out by hand."""
    least, total = smallest_budget(model), sum(c.total_bytes for c in model.components)
    budget = least + int(share * max(0, total + 500 * MB - least))
    call_s = plan_call(model, budget, CURVE).call_s
    compute = sum(c.calls * c.compute_s for c in model.components)
    always = model.reserved_bytes + sum(c.total_bytes for c in model.components if c.role == "other")
    activations = {p: max(c.activation_bytes for c in model.components if c.phase == p) for p in model.phases}
    if model.reserved_bytes + total + max(activations.values()) <= budget:
        assert call_s <= compute * 1.01
    moving = [c for c in model.components if c.role != "other"]
    groups = {p: sum(c.total_bytes for c in moving if c.phase == p) for p in model.phases}
    if max(always + groups[p] + activations[p] for p in model.phases) <= budget:
        refills = sum(c.loads * CURVE.seconds(c.total_bytes) for c in moving)
        assert call_s <= (compute + refills) * 1.0101


def test_what_fits_stays() -> None:
    plan = plan_call(flux2(), 130 * GB, CURVE)
    assert {c.strategy for c in plan.components} == {"resident"}
    assert plan.label == "everything resident"
    assert plan.shared_arena_bytes == 0
    assert all(c.refill_bytes == 0 for c in plan.components)


def test_the_encoder_streams_once_per_call_beside_a_resident_dit() -> None:
    plan = plan_call(flux2(), 80 * GB, CURVE)
    assert plan.component("transformer").strategy == "resident"
    assert plan.component("text_encoder").strategy == "stream"
    assert "everything resident needs" in plan.why


def test_the_dit_fills_what_the_encoder_leaves_and_pays_for_it() -> None:
    model = flux2()
    plan = plan_call(model, 32 * GB, CURVE)
    dit, encoder = plan.component("transformer"), plan.component("text_encoder")
    assert (dit.strategy, dit.hold) == ("stream", "phase")
    assert dit.held_bytes + dit.arena_bytes + encoder.held_bytes + encoder.arena_bytes > 32 * GB
    transformer = model.components[1]
    forwards = run_s(transformer.blocks, dit.resident, dit.arena_bytes, CURVE, 50)
    assert dit.refill_bytes == dit.held_bytes
    assert dit.seconds == pytest.approx(forwards + CURVE.seconds(dit.refill_bytes), rel=1e-3)


def test_each_entry_of_a_phase_pays_for_its_refill() -> None:
    """A component that others displace in the middle of a call comes in again."""
    blocks = equal(100, 0.001, 30)
    model = PipelineModel(
        (
            Component("transformer", "dit", 0, blocks, calls=100, loads=2, strategies=("swap",)),
            Component("vae", "vae", 100 * MB, other_s=0.1, loads=3, strategies=("swap",)),
        )
    )
    plan = plan_call(model, 3 * GB, CURVE)
    assert plan.component("transformer").seconds == pytest.approx(100 * 0.03 + 2 * CURVE.seconds(3 * GB))
    assert plan.component("vae").seconds == pytest.approx(0.1 + 3 * CURVE.seconds(100 * MB))
    streamed = Component("transformer", "dit", 0, blocks, calls=100, loads=2, strategies=("stream",))
    decoder = Component("vae", "vae", 0, activation_bytes=2900 * MB)
    tight = plan_call(PipelineModel((streamed, decoder)), 2950 * MB, CURVE)
    part = tight.component("transformer")
    assert (part.strategy, part.hold) == ("stream", "phase")
    forwards = 2 * run_s(blocks, part.resident, part.arena_bytes, CURVE, 50)
    assert part.seconds == pytest.approx(forwards + 2 * CURVE.seconds(part.refill_bytes), rel=1e-3)


def test_few_steps_do_not_repay_a_refill() -> None:
    """With one forward a call, residents that come in per call save nothing over streaming them."""
    dit = plan_call(flux2(calls=1), 32 * GB, CURVE).component("transformer")
    assert dit.strategy == "stream"
    assert dit.hold == "always" or not dit.resident


def test_two_experts_share_one_ring_or_take_turns() -> None:
    bus_bound = plan_call(wan(0.005), 24 * GB, CURVE)
    parts = [bus_bound.component(n) for n in ("transformer", "transformer_2")]
    assert all((p.strategy, p.hold) == ("stream", "phase") for p in parts)  # each fills the device in its turn
    assert parts[0].resident == parts[1].resident != ()
    compute_bound = plan_call(wan(0.06), 40 * GB, CURVE)
    parts = [compute_bound.component(n) for n in ("transformer", "transformer_2")]
    assert all((p.strategy, p.hold) == ("stream", "always") for p in parts)
    assert all(p.arena_bytes == compute_bound.shared_arena_bytes for p in parts)
    assert abs(len(parts[0].resident) - len(parts[1].resident)) <= 1


def test_a_large_decode_sends_the_dit_away() -> None:
    model = PipelineModel(
        (
            Component("transformer", "dit", 0, equal(100, 0.002, 10), calls=100),
            Component("vae", "vae", 100 * MB, other_s=0.1, activation_bytes=900 * MB),
        )
    )
    plan = plan_call(model, 1100 * MB, CURVE)
    assert plan.component("transformer").hold == "phase"
    assert plan.component("transformer").resident == tuple(range(10))
    assert plan.component("transformer").strategy == "swap"  # as fast as streaming, and coarser


def test_small_encoders_stay_beside_a_large_one_that_moves() -> None:
    model = PipelineModel(
        (
            Component("text_encoder", "text_encoder", 250 * MB, other_s=0.01),
            Component("text_encoder_2", "text_encoder", 1390 * MB, other_s=0.01),
            Component("text_encoder_3", "text_encoder", 260 * MB, equal(385.9, 0.003, 24)),
            Component("transformer", "dit", 490 * MB, equal(180, 0.003, 24), calls=28),
            Component("vae", "vae", 170 * MB, other_s=0.1),
        )
    )
    plan = plan_call(model, 12 * GB, CURVE)
    assert plan.component("text_encoder").strategy == "resident"
    assert plan.component("text_encoder_2").strategy == "resident"
    assert plan.component("text_encoder_3").strategy != "resident"


@pytest.mark.parametrize("strategy", ["resident", "swap", "stream"])
def test_only_allowed_strategies_are_taken(strategy: str) -> None:
    model = PipelineModel(
        (
            Component("transformer", "dit", MB, equal(100, 0.01, 10), calls=20, strategies=(strategy,)),
            Component("vae", "vae", 10 * MB, other_s=0.1),
        )
    )
    for budget in (1100 * MB, 5 * GB):
        assert plan_call(model, budget, CURVE).component("transformer").strategy == strategy
    if strategy == "stream":
        assert plan_call(model, 300 * MB, CURVE).component("transformer").strategy == strategy
    else:
        with pytest.raises(BudgetTooSmall, match="transformer weights"):
            plan_call(model, 300 * MB, CURVE)


def test_a_plan_is_plain_data() -> None:
    plan = plan_call(flux2(), 32 * GB, CURVE)
    content = plan.to_dict()
    assert json.loads(json.dumps(content)) == content
    assert content["components"][1]["name"] == "transformer"
    assert content["peak_bytes"] == plan.peak_bytes
    assert plan.digest() != plan_call(flux2(), 33 * GB, CURVE).digest()
    with pytest.raises(KeyError):
        plan.component("unet")


def test_every_process_makes_the_same_plan() -> None:
    """Ranks compare digests: neither hash seeds nor addresses may reach a choice."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_residency_plan as t;"
        "print(t.plan_call(t.flux2(), 32 * t.GB, t.CURVE).digest())"
    )
    here = os.path.dirname(os.path.abspath(__file__))
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    other = subprocess.run(
        [sys.executable, "-c", code, here], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert other.stdout.split()[-1] == plan_call(flux2(), 32 * GB, CURVE).digest()


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("role", {"role": "unet"}),
        ("other_bytes", {"other_bytes": -1}),
        ("calls", {"calls": -1}),
        ("loads", {"loads": 0}),
        ("other_s", {"other_s": float("nan")}),
        ("activation_bytes", {"activation_bytes": -5}),
        ("strategies", {"strategies": ()}),
        ("strategies", {"strategies": ("layerwise",)}),
    ],
)
def test_a_bad_component_is_refused_by_name(field: str, values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"{field} of 'transformer': got"):
        Component(**{"name": "transformer", "role": "dit", "other_bytes": 0, **values})  # type: ignore[arg-type]


def test_two_components_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="'vae' twice"):
        PipelineModel((Component("vae", "vae", 1), Component("vae", "vae", 2)))
