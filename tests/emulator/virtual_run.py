"""A run on the virtual clock, whose figures a fresh process prints: see test_emu_virtual_time.py.

A network of blocks is streamed through memory that is allocated on the copy stream for each block, with an
allocation in between that has to wait for the release of earlier ones.
"""

import json

import torch

import greenroom.emulator  # noqa: F401

BLOCKS, WIDTH = 8, 96


def stream_through(blocks: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    emu = torch.emu
    side, main = emu.Stream(), emu.current_stream()
    for block in blocks:
        with emu.stream(side):
            weight = block.to("emu", non_blocking=True)
        main.wait_stream(side)
        x = torch.nn.functional.gelu(x @ weight)
        weight.record_stream(main)
    return x


def figures() -> dict[str, object]:
    emu = torch.emu
    emu.set_virtual_time(True, flops=3e9, membw=7e9, launch=3e-6)
    emu.set_bandwidth(1.3e8)
    emu.set_timeline(True)
    emu.set_memory_timeline(True, 0)
    torch.manual_seed(0)
    blocks = [(torch.randn(WIDTH, WIDTH) / WIDTH**0.5).pin_memory() for _ in range(BLOCKS)]
    emu.set_capacity(5 * WIDTH * WIDTH * 4)
    x = torch.randn(64, WIDTH).to("emu")
    for _ in range(3):
        x = stream_through(blocks, x)
    emu.synchronize()
    return {
        "seconds": emu.virtual_time(),
        "stalls": emu.counters()["stall_s"],
        "peak": emu.max_memory_allocated(),
        "reserved peak": emu.max_memory_reserved(),
        "timeline": emu.take_timeline(),
        "memory": emu.take_memory_timeline(0),
        "sum": x.double().sum().item(),
    }


if __name__ == "__main__":
    print(json.dumps(figures()))
