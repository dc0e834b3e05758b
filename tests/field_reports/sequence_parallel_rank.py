"""One rank of a streamed model that exchanges its sequence inside each block, started by tests/launch.py."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import toys

import greenroom
import greenroom.emulator


class Exchanging(toys.Block):
    """Each rank holds half of the sequence; attention is computed on half of the channels of the whole."""

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        if not dist.is_initialized():
            return super().forward(x, scale=scale)
        world = dist.get_world_size()
        sent = torch.stack(x.chunk(world, dim=-1)).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        returned = torch.empty_like(sent)
        dist.all_to_all_single(returned, received.contiguous())
        return super().forward(torch.cat(returned.unbind(), dim=-1), scale=scale)


def main() -> None:
    torch.set_num_threads(1)
    emu = torch.emu
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    pipe = toys.only(toys.Row(Exchanging() for _ in range(6)))
    x = torch.randn(1, 8, toys.WIDTH)
    with torch.no_grad():
        expected = pipe.transformer(x.chunk(world, dim=1)[rank])
        dist.init_process_group("cpu:gloo,emu:emu_gloo")
        emu.set_device(rank)
        emu.set_poison(True)
        emu.set_race_check("raise")
        greenroom.offload(pipe, {"mode": "layer", "components": ["dit"]}, device=f"emu:{rank}")
        emu.set_bandwidth(20e6)
        mine = x.chunk(world, dim=1)[rank].to(f"emu:{rank}")
        for _ in range(3):
            assert torch.equal(pipe.transformer(mine).cpu(), expected)
    emu.synchronize()
    assert emu.race_reports() == []
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
