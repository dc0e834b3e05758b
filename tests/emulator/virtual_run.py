"""A run on the virtual clock, whose figures a fresh process prints: see test_emu_virtual_time.py."""

import json

import torch
from diffusers.hooks import apply_group_offloading
from emulator_models import CASES

import greenroom.emulator  # noqa: F401


def figures() -> dict[str, object]:
    emu = torch.emu
    emu.set_virtual_time(True, flops=3e9, membw=7e9, launch=3e-6)
    emu.set_bandwidth(1.3e8)
    emu.set_timeline(True)
    emu.set_memory_timeline(True, 0)
    emu.reset_counters()
    emu.reset_peak_memory_stats()
    case = CASES["wan"]
    model = case.model()
    apply_group_offloading(
        model,
        onload_device=torch.device("emu"),
        offload_type="block_level",
        num_blocks_per_group=1,
        use_stream=True,
        record_stream=True,
    )
    for _ in range(3):
        out = case.run(model, "emu")
    emu.synchronize()
    return {
        "seconds": emu.virtual_time(),
        "stalls": emu.counters()["stall_s"],
        "peak": emu.max_memory_allocated(),
        "reserved peak": emu.max_memory_reserved(),
        "timeline": emu.take_timeline(),
        "memory": emu.take_memory_timeline(0),
        "sum": out.double().sum().item(),
    }


if __name__ == "__main__":
    print(json.dumps(figures()))
