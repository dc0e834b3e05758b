"""One rank of test_emu_collectives.py, started by tests/launch.py."""

import os
import sys

import torch
import torch.distributed as dist

import greenroom.emulator  # noqa: F401

emu = torch.emu


def collectives(rank: int, world: int, device: torch.device) -> None:
    def full(value: float, n: int = 3) -> torch.Tensor:
        return torch.full((n,), float(value), device=device)

    gathered = torch.empty(3 * world, device=device)
    dist.all_gather_into_tensor(gathered, full(rank + 1))
    assert gathered.cpu().tolist() == [1, 1, 1, 2, 2, 2]
    x = full(rank + 1)
    dist.all_reduce(x)
    assert x.cpu().tolist() == [3, 3, 3]
    on_host = torch.ones(2) * rank
    dist.all_reduce(on_host)  # CPU tensors go to plain gloo
    assert on_host.tolist() == [1, 1]
    parts = [torch.empty(3, device=device) for _ in range(world)]
    dist.all_gather(parts, full(rank))
    assert [p[0].item() for p in parts] == [0, 1]
    b = full(rank)
    dist.broadcast(b, 1)
    assert b.cpu().tolist() == [1, 1, 1]
    scattered = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(scattered, torch.arange(4.0, device=device))
    assert scattered.cpu().tolist() == ([0, 2] if rank == 0 else [4, 6])
    swapped = torch.empty(4, device=device)
    dist.all_to_all_single(swapped, torch.arange(4.0, device=device) + 10 * rank)
    assert swapped.cpu().tolist() == ([0, 1, 10, 11] if rank == 0 else [2, 3, 12, 13])
    if rank == 0:
        dist.send(x, 1)
    else:
        received = torch.empty(3, device=device)
        dist.recv(received, 0)
        assert torch.equal(received.cpu(), x.cpu())
    dist.barrier()


def late_gather(rank: int, world: int, device: torch.device) -> None:
    """An asynchronous collective lands late; wait() orders the stream; not waiting is a race."""
    n = 1 << 16
    mine, out = torch.full((n,), float(rank + 1), device=device), torch.zeros(n * world, device=device)
    emu.synchronize()
    emu.set_bandwidth(0, 0, 2e6)
    work = dist.all_gather_into_tensor(out, mine, async_op=True)
    assert not work.is_completed()
    try:
        out + 1
        raise AssertionError("the race was not seen")
    except RuntimeError as error:
        assert "emu race" in str(error), error
    work.wait()
    assert torch.equal((out + 0).cpu(), torch.tensor([1.0, 2.0]).repeat_interleave(n))
    emu.set_bandwidth(0)
    counts = emu.counters()
    assert counts["p2p_bytes"] >= 4 * n * world


def virtual_gather(device: torch.device, rank: int, world: int) -> None:
    """On the virtual clock a collective begins when the last rank gets to it, and a barrier lines up the hosts."""
    emu.set_virtual_time(True, launch=0, kernel_latency=0)
    emu.set_bandwidth(0, 0, 1e6)
    out = torch.zeros(1000 * world, device=device)
    mine = torch.zeros(1000, device=device)
    emu.synchronize()
    before = emu.virtual_time()
    dist.all_gather_into_tensor(out, mine)
    emu.synchronize()
    assert abs(emu.virtual_time() - before - 4000 * world / 1e6) < 1e-9
    emu.set_virtual_time(True, flops=1e9, membw=1e15, launch=0, kernel_latency=0)
    x = torch.zeros(100, 100, device=device)
    for _ in range(1 + 4 * rank):
        x @ x  # 2 ms each
    dist.all_gather_into_tensor(out, mine)
    emu.synchronize()
    assert abs(emu.virtual_time() - (5 * 2e-3 + 4000 * world / 1e6)) < 1e-6
    if rank == 0:
        x @ x
    dist.barrier(device_ids=[rank])
    assert abs(emu.virtual_time() - (6 * 2e-3 + 4000 * world / 1e6)) < 1e-6
    emu.set_virtual_time(False)


def sharded_model(device: torch.device, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)])
    x = torch.randn(5, 64)
    with torch.no_grad():
        reference = model(x)
        mesh = init_device_mesh("emu", (world,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.to(device)
        assert torch.equal(model(x.to(device)).cpu(), reference)


def main() -> None:
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("cpu:gloo,emu:emu_gloo")
    emu.set_device(rank)
    emu.set_poison(True)
    device = torch.device("emu", rank)
    emu.set_race_check("raise")
    collectives(rank, world, device)
    late_gather(rank, world, device)
    virtual_gather(device, rank, world)
    sharded_model(device, world)
    emu.synchronize()
    assert emu.race_reports() == []
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
