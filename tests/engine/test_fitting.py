"""Requests that a budget cannot hold: refused, without a trace in those that come after."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest

from greenroom import Omni
from greenroom.demo import checkpoint_path
from greenroom.engine import DoesNotFit

SMALL = {"seed": 7, "num_inference_steps": 1}
LARGE = {**SMALL, "height": 256, "width": 256}


def draw(omni: Omni, words: dict[str, Any], **more: Any) -> int:
    """Device bytes at the peak of a request."""
    return omni.generate("a handwritten seven", {**words, **more}, progress=False)[0].metrics.peak_bytes


def refusal(omni: Omni, words: dict[str, Any], **more: Any) -> str:
    with pytest.raises(DoesNotFit) as caught:
        draw(omni, words, **more)
    return str(caught.value)


def test_a_refused_request_leaves_nothing_on_the_device(emu: Any, without_garbage_collection: None) -> None:
    with Omni(checkpoint_path(), device="emu", memory_budget=emu.memory_allocated() + 1_200_000) as omni:
        told = refusal(omni, LARGE)
        before = emu.memory_allocated()
        for _ in range(3):
            assert refusal(omni, LARGE) == told
            assert emu.memory_allocated() == before


def test_a_failed_request_leaves_nothing_on_the_device(emu: Any, without_garbage_collection: None) -> None:
    with Omni(checkpoint_path(), device="emu") as omni:
        draw(omni, SMALL)

        def fail(module: Any, args: Any) -> None:
            raise RuntimeError("planted")

        hook = omni.pipeline.transformer.transformer_blocks[1].register_forward_pre_hook(fail)
        before = emu.memory_allocated()
        kept = []
        for _ in range(2):
            with pytest.raises(RuntimeError, match="planted") as caught:
                draw(omni, SMALL)
            kept.append(caught.value)
            assert emu.memory_allocated() == before
        assert all("transformer_blocks" in t or "in fail" in t for t in map("".join, map(_told, kept)))
        hook.remove()
        draw(omni, SMALL)


def _told(error: BaseException) -> list[str]:
    return traceback.format_exception(type(error), error, error.__traceback__)


@pytest.mark.parametrize("first", ["set_memory", "another request"])
def test_a_refusal_is_of_its_own_request(emu: Any, checkpoints: dict[str, Path], first: str) -> None:
    """The encoder runs twice for one request: the second time is refused for what was seen the first time."""
    words = {"seed": 1, "num_inference_steps": 1, "height": 64, "width": 64, "num_frames": 1}
    budget = emu.memory_allocated() + 14_700_000
    with Omni(checkpoints["wan22_t2v"], device="emu", memory_budget=budget) as omni:
        draw(omni, words, max_sequence_length=64)
        told = refusal(omni, words, max_sequence_length=520)
        assert "text_encoder" in told and "at the least" not in told
        if first == "set_memory":
            omni.set_memory(budget + 2**26)
            draw(omni, words, max_sequence_length=520)
        else:
            draw(omni, words, max_sequence_length=64)


def test_a_budget_may_be_lowered_again(emu: Any) -> None:
    budget = emu.memory_allocated() + 6 * 2**20
    with Omni(checkpoint_path(), device="emu", memory_budget=budget) as omni:
        draw(omni, SMALL)
        refusal(omni, LARGE)
        omni.set_memory(budget + 2**26)
        assert draw(omni, LARGE) > budget
        omni.set_memory(budget)
        assert draw(omni, SMALL) <= budget
        refusal(omni, LARGE)
        assert draw(omni, SMALL) <= budget
        report = omni.report()
        assert report is not None and report.peak <= budget and report.predicted_peak is not None


def test_the_budget_that_a_refusal_names_does(emu: Any) -> None:
    budget = emu.memory_allocated() + 1_200_000
    with Omni(checkpoint_path(), device="emu", memory_budget=budget) as omni:
        for _ in range(4):  # each component may refuse once by what it is sure to need
            try:
                draw(omni, LARGE)
                break
            except DoesNotFit as error:
                omni.set_memory(int(str(error).split("at least ")[-1].split()[0]))
        else:
            pytest.fail("no budget was enough")
