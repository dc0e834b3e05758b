"""Numbers that no pipeline makes sense of are refused by name before anything runs, on every way in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from greenroom import Omni
from greenroom.cli import app
from greenroom.demo import checkpoint_path
from greenroom.engine import RequestRefused

PROMPT = "a handwritten seven"
WRONG: list[tuple[str, Any, str]] = [
    ("num_inference_steps", 0, "a whole number from 1"),
    ("num_inference_steps", 2.5, "a whole number from 1"),
    ("num_inference_steps", True, "a whole number from 1"),
    ("height", -8, "a whole number from 1 to 65536"),
    ("height", "x", "a whole number from 1 to 65536"),
    ("width", 10**30, "a whole number from 1 to 65536"),
    ("guidance_scale", float("nan"), "a number from 0 to 1000"),
    ("guidance_scale", float("inf"), "a number from 0 to 1000"),
    ("guidance_scale", -1, "a number from 0 to 1000"),
    ("guidance_scale", "much", "a number from 0 to 1000"),
    ("true_cfg_scale", 10**400, "a number from 0 to 1000"),
    ("max_sequence_length", 0, "a whole number from 1"),
    ("seed", 99999999999999999999999, "a whole number from 0 to 2**63 - 1"),
    ("seed", 1.5, "a whole number from 0 to 2**63 - 1"),
]


@pytest.fixture(scope="module")
def omni() -> Iterator[Omni]:
    with Omni(checkpoint_path(), device="cpu") as engine:
        yield engine


@pytest.fixture
def forwards(omni: Omni) -> Iterator[list[str]]:
    """The components whose forward was called."""
    called: list[str] = []
    parts = {n: m for n, m in omni.pipeline.components.items() if hasattr(m, "register_forward_pre_hook")}
    hooks = [m.register_forward_pre_hook(lambda *_, name=n: called.append(name)) for n, m in parts.items()]
    yield called
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize(("field", "value", "accepted"), WRONG)
def test_omni_refuses_before_anything_runs(
    omni: Omni, forwards: list[str], field: str, value: Any, accepted: str
) -> None:
    with pytest.raises(RequestRefused) as refused:
        omni.generate(PROMPT, {"num_inference_steps": 1, field: value}, progress=False)
    assert refused.value.field == field
    shown = repr(value)[:200]
    assert str(refused.value).startswith(f"{field} = {shown}") and f"accepted: {accepted}" in str(refused.value)
    assert not forwards
    assert omni.generate(PROMPT, {"num_inference_steps": 1}, progress=False)[0].images and forwards


@pytest.mark.parametrize(
    "field", ["num_inference_steps", "num_frames", "max_sequence_length", "num_outputs_per_prompt"]
)
def test_counts_that_no_memory_holds_are_refused(omni: Omni, forwards: list[str], field: str) -> None:
    with pytest.raises(RequestRefused, match=f"{field} = {10**12} is not accepted; accepted: a whole number from 1 to"):
        omni.generate(PROMPT, {field: 10**12}, progress=False)
    assert not forwards


@pytest.mark.parametrize("field", ["height", "width"])
def test_sizes_between_two_that_the_model_draws_are_refused(omni: Omni, forwards: list[str], field: str) -> None:
    grain = omni.facts.grain
    for value, near in ((1, str(grain)), (grain + 1, f"{grain} or {2 * grain}")):
        with pytest.raises(RequestRefused, match=f"{field} = {value} .*multiples of {grain} .*such as {near}$"):
            omni.generate(PROMPT, {field: value}, progress=False)
    assert not forwards


def test_numbers_of_numpy_are_numbers(omni: Omni) -> None:
    words = {"height": np.int64(32), "guidance_scale": np.float32(2.0), "seed": np.int64(3), "num_inference_steps": 1}
    assert omni.generate(PROMPT, words, progress=False)[0].images[0].height == 32


@pytest.mark.parametrize(("field", "value", "accepted"), WRONG)
def test_the_server_refuses_the_same(field: str, value: Any, accepted: str) -> None:
    schemas = pytest.importorskip("greenroom.serving.schemas")
    with pytest.raises(ValidationError) as refused:
        schemas.ImageGeneration(prompt=PROMPT, **{field: value})
    assert {error["loc"][0] for error in refused.value.errors()} == {field}


@pytest.mark.parametrize(
    ("flag", "value", "accepted"),
    [
        ("--height", "1", "multiples of"),
        ("--width", "33", "multiples of"),
        ("--height", "99999999", "a whole number from 1 to 65536"),
        ("--seed", "99999999999999999999999", "a whole number from 0 to 2**63 - 1"),
        ("--seed", "-1", "a whole number from 0 to 2**63 - 1"),
        ("--guidance-scale", "nan", "a number from 0 to 1000"),
    ],
)
def test_the_command_line_refuses_in_one_line(flag: str, value: str, accepted: str, tmp_path: Path) -> None:
    out = tmp_path / "out.png"
    line = ["generate", str(checkpoint_path()), "--prompt", PROMPT, "--device", "cpu", "-o", str(out), flag, value]
    run = CliRunner().invoke(app, line)
    assert run.exit_code == 2 and isinstance(run.exception, SystemExit), run.exception
    (told,) = [text for text in run.output.splitlines() if text.startswith("error:")]
    assert told.startswith(f"error: {flag} = {value} is not accepted; accepted: {accepted}")
    assert not out.exists()
