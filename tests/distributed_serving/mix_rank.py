"""One rank of test_mixes.py, started by torchrun: its own requests, whatever the other ranks do.

Each mix is drawn from the numbers of the mix and the rank: no requests at all, one or several; steps given or left to
the pipeline; guidance on and off; other shapes; several outputs; cancelled at a step, or refused.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import greenroom.emulator  # noqa: F401
from greenroom import Omni, OmniDiffusionSamplingParams
from greenroom.engine import Job, Request, RequestCancelled, RequestRefused
from greenroom.engine.group import local_device, rank, world_size

PROMPT = "a handwritten seven"
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "pictures": [
        {"num_inference_steps": 1},
        {"num_inference_steps": 3},
        {"num_inference_steps": 7},
        {},
        {"num_inference_steps": 2, "true_cfg_scale": 3.0, "negative_prompt": "a handwritten one"},
        {"num_inference_steps": 2, "height": 64, "width": 32},
        {"num_inference_steps": 2, "num_outputs_per_prompt": 2},
    ],
    "videos": [
        {"height": 32, "width": 32, "num_frames": 9, "num_inference_steps": 4},
        {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 2, "guidance_scale": 1.0},
        {"height": 48, "width": 32, "num_frames": 1, "num_inference_steps": 3, "guidance_scale_2": 2.0},
    ],
}


def drawn(result: Any) -> np.ndarray:
    made = result.images if len(result.images) else [frame for video in result.videos for frame in video]
    return np.stack([np.asarray(picture) for picture in made])


def request(words: dict[str, Any], seed: int, prompt: str = PROMPT) -> Request:
    return Request({"prompt": prompt}, OmniDiffusionSamplingParams(seed=seed, **words))


def run_mix(omni: Omni, number: int, variants: list[dict[str, Any]], expected: dict[int, np.ndarray]) -> dict[str, int]:
    """Runs one mix and counts what was right; raises where a bit is wrong."""
    dice = random.Random(f"{number} {rank()}")
    counts = {"right": 0, "cancelled": 0, "refused": 0}
    for _ in range(dice.choice((0, 1, 1, 2, 3))):
        time.sleep(dice.choice((0, 0, 0.02, 0.1)))
        which = dice.randrange(len(variants))
        fate = dice.random()
        if fate < 0.1:
            try:
                omni.submit(request(variants[which], 7, prompt=" ")).future.result()
            except RequestRefused:
                counts["refused"] += 1
        elif fate < 0.3:
            job = omni.submit(request({**variants[which], "num_inference_steps": 30}, 7))
            at = dice.randrange(1, 5)

            def stop(job: Job, at: int = at) -> None:
                if job.step >= at:
                    job.cancel()

            job.listen(stop)
            try:
                job.future.result()
            except RequestCancelled:
                counts["cancelled"] += 1
        else:
            result = omni.submit(request(variants[which], 7)).future.result()
            assert np.array_equal(drawn(result), expected[which]), f"mix {number}, variant {which}: wrong bits"
            counts["right"] += 1
    return counts


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("mixes", type=int)
    parser.add_argument("report", type=Path)
    parser.add_argument("--config", required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.emu.set_poison(True)
    torch.emu.set_race_check("raise")
    device = local_device("emu")
    with Omni(arguments.model, device=device) as resident:
        variants = VARIANTS["videos" if resident.facts.makes_videos else "pictures"]
        expected = {i: drawn(resident.submit(request(words, 7)).future.result()) for i, words in enumerate(variants)}
    totals = {"right": 0, "cancelled": 0, "refused": 0}
    with Omni(arguments.model, device="emu", diffusion_offload_config=arguments.config) as omni:
        report = omni.report()
        assert report is not None and report.strategy == "distributed-layerwise"
        copied = report.copied
        for number in range(arguments.mixes):
            for name, count in run_mix(omni, number, variants, expected).items():
                totals[name] += count
        after = omni.report()
        assert after is not None
        told = {**totals, "copied": after.copied - copied, "rank": rank(), "world": world_size()}
    torch.emu.synchronize()
    assert torch.emu.race_reports() == []
    arguments.report.with_suffix(f".{rank()}").write_text(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
