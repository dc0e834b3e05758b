"""Sizes that a pipeline draws as they are said are taken; those that it would round, or fail at, are refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "pipelines"))

from zoo import ZOO, make

from greenroom import ConfigError, Omni, testing
from greenroom.bounds import check_numbers
from greenroom.engine import RequestRefused
from greenroom.grain import frame_grain_of, grain_of

pytestmark = pytest.mark.filterwarnings("ignore")
# These rescale every size to an area of their own, make embeddings of a picture to come, or do not run on the CPU.
OTHERS = ("FluxKontextPipeline", "StableCascadePriorPipeline", "AllegroPipeline")
# One of each way in which a grain comes about.
ALWAYS = ("flux2", "sd3", "cosmos3", "PixArtSigmaPipeline", "BriaPipeline", "KandinskyV22Pipeline", "AmusedPipeline")
SIZED = [*testing.ARCHITECTURES, *(n for n, (_, call) in ZOO.items() if "height" in call and n not in OTHERS)]


def _made(name: str) -> tuple[Any, dict[str, Any]]:
    if name in testing.ARCHITECTURES:
        pipe, call = testing.build_pipeline(name), testing.call_kwargs(name)
    else:
        pipe, call = make(name), {**ZOO[name][1], "output_type": "pt"}
    if "num_inference_steps" in call:
        call["num_inference_steps"] = 2
    return pipe, call


def _height_of(drawn: Any) -> int:
    (found,) = (v for n in ("images", "frames", "video") if (v := getattr(drawn, n, None)) is not None)
    while not isinstance(found, torch.Tensor):
        found = found[0]
    return int(found.shape[-2])


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ALWAYS else pytest.mark.slow) for n in SIZED], ids=str
)
def test_what_the_pipeline_draws_as_it_is_said_is_taken_and_no_other_size_runs(name: str) -> None:
    pipe, call = _made(name)
    first, drawn = call["height"], 0
    for height in sorted({first + n for n in (0, 1, 2, 4, 8, 16)}):
        call["height"] = height
        try:
            check_numbers({"height": height}, grain_of(pipe, call))
        except ConfigError:
            taken = False
        else:
            taken = True
        try:
            made = _height_of(pipe(**call))
        except ValueError:
            continue  # it says no by itself before it computes
        except RuntimeError:
            assert not taken, f"{height} is taken and fails in the middle"
            continue
        assert taken == (made == height), f"{height} gives {made}"
        drawn += taken
    assert drawn


# CogVideoX makes latents in pairs, and other numbers than are said of most: any is taken.
FILMED = [
    *(n for n in testing.ARCHITECTURES if "num_frames" in testing.call_kwargs(n)),
    *(n for n, (_, call) in ZOO.items() if "num_frames" in call and n not in OTHERS and "CogVideoX" not in n),
]


def _frames_of(drawn: Any) -> int:
    (found,) = (v for n in ("frames", "video") if (v := getattr(drawn, n, None)) is not None)
    return int(found.shape[-4])


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("wan22_t2v", "LTXPipeline") else pytest.mark.slow) for n in FILMED]
)
def test_a_number_of_frames_is_taken_where_as_many_are_made(name: str) -> None:
    pipe, call = _made(name)
    grain, taken = frame_grain_of(pipe), 0
    for frames in (4, 5, 6, 7, 9):
        try:
            check_numbers({"num_frames": frames}, frame_grain=grain)
        except ConfigError:
            assert _frames_of(pipe(**{**call, "num_frames": frames})) != frames
        else:
            assert _frames_of(pipe(**{**call, "num_frames": frames})) == frames
            taken += 1
    assert taken


def test_omni_draws_any_size_that_the_pipeline_cuts_its_own_to() -> None:
    pipe = make("PixArtSigmaPipeline")
    pipe.transformer.register_to_config(sample_size=32)
    prompt = {"num_inference_steps": 1, "clean_caption": False, "max_sequence_length": 16, "width": 50}
    with Omni(pipe, device="cpu") as omni:
        assert omni.facts.grain == 1
        (result,) = omni.generate("a red cube", {**prompt, "height": 33}, progress=False)
        assert result.images[0].size == (50, 33)
        with pytest.raises(RequestRefused, match=r"height = 33 .*multiples of 16"):
            omni.generate("a red cube", {**prompt, "height": 33, "use_resolution_binning": False}, progress=False)


def test_a_patch_of_one_latent_asks_for_no_more_than_latents() -> None:
    pipe, call = _made("SanaPipeline")
    assert grain_of(pipe, call) == pipe.vae_scale_factor == pipe.image_processor.config.vae_scale_factor
