"""One rank of test_context_parallel.py: a call that is spread over the ranks, with and without offloading.

`orders`: whether the ranks are told to compute together "before" they offload, "after" it, or one after the other.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig

import greenroom
import greenroom.emulator
from greenroom import testing

CALLS: dict[str, dict[str, Any]] = {
    # The length of the prompt is split as well, so it has to be even.
    "qwen_image": {"prompt": "a red cube on grass here", "negative_prompt": "blurry and dark and wet here"},
}


def build(name: str) -> Any:
    with testing.quiet():
        pipe: Any = testing.build_pipeline(name)
    return pipe


def spread(pipe: Any) -> None:
    for name in ("transformer", "transformer_2"):
        model = getattr(pipe, name, None)
        if model is not None:
            with testing.quiet():
                model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=dist.get_world_size()))


def run(pipe: Any, name: str) -> torch.Tensor:
    words = {**testing.call_kwargs(name), **CALLS.get(name, {})}
    return torch.as_tensor(pipe(**words, return_dict=False)[0]).cpu()


def main(name: str, config: str, report: str, orders: str) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    torch.emu.set_device(rank)
    torch.emu.set_poison(True)
    torch.emu.set_race_check("raise")
    dist.init_process_group("cpu:gloo,emu:emu_gloo")
    device = f"emu:{rank}"

    alone = build(name)
    alone.to(device)
    expected_alone = run(alone, name)
    alone.to("cpu")

    parallel = build(name)
    parallel.to(device)
    spread(parallel)
    expected = run(parallel, name)
    parallel.to("cpu")

    found = {}
    for when in orders.split():
        pipe = build(name)
        if when == "before":
            spread(pipe)
        handle = greenroom.offload(pipe, json.loads(config), device=device)
        if when == "after":
            spread(pipe)
        found[when] = [torch.equal(run(pipe, name), expected) for _ in range(2)]
        report_text = handle.report()
        assert any(c.streamed_blocks for c in report_text.components)
        dist.barrier(device_ids=[rank])
        handle.disable()
    torch.emu.synchronize(rank)
    close = bool(torch.allclose(expected, expected_alone, atol=1e-3))
    with open(f"{report}.{rank}", "w") as file:
        json.dump({**found, "close": close, "races": torch.emu.race_reports()}, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
