"""Copies, streams and events on the real clock: asynchronous copies really land late."""

import pytest
import torch

MB = 1 << 20
SLOW = 8 * MB  # bytes a second: a copy of 4 MiB takes half a second


def test_a_copy_is_late_until_waited_for(emu):
    emu.set_race_check("off")  # the early read is the point
    emu.set_bandwidth(SLOW)
    source = torch.randn(MB).pin_memory()
    side = emu.Stream()
    with emu.stream(side):
        there = source.to("emu", non_blocking=True)
    assert not side.query()
    assert there[-4:].clone().cpu().isnan().all()  # poison: not there yet
    emu.current_stream().wait_stream(side)
    assert torch.equal((there + 0).cpu(), source)
    back = there.to("cpu", non_blocking=True)
    assert back.is_pinned() and back[-1].isnan()
    emu.synchronize()
    assert torch.equal(back, source)
    assert emu.counters()["wait_s"] > 0


def test_the_host_may_spoil_a_pinned_source_too_early(emu):
    emu.set_bandwidth(SLOW)
    source = torch.ones(MB).pin_memory()
    with emu.stream(emu.Stream()) as side:
        there = source.to("emu", non_blocking=True)
    source.zero_()
    side.synchronize()
    assert (there[-4:] == 0).all().item()


def test_counters_by_direction_and_kind(emu):
    emu.reset_counters()
    pinned, pageable = torch.ones(100).pin_memory(), torch.ones(50)
    device = torch.empty(100, device="emu")
    device.copy_(pinned, non_blocking=True)
    device.copy_(pinned)
    device[:50].copy_(pageable, non_blocking=True)  # pageable memory: synchronous, whatever was asked
    device.cpu()
    device.to("emu:1")
    emu.synchronize()
    c = emu.counters()
    assert (c["h2d_bytes"], c["h2d_count"], c["h2d_async"], c["h2d_sync"]) == (1000, 3, 1, 2)
    assert (c["d2h_bytes"], c["d2h_count"], c["d2h_async"]) == (400, 1, 0)
    assert (c["p2p_bytes"], c["p2p_count"]) == (400, 1)
    emu.reset_counters()
    assert emu.counters()["h2d_bytes"] == 0


def test_events(emu):
    emu.set_bandwidth(SLOW)
    side = emu.Stream()
    begin, end = emu.Event(enable_timing=True), emu.Event(enable_timing=True)
    pinned = torch.zeros(MB).pin_memory()
    with emu.stream(side):
        begin.record()
        there = pinned.to("emu", non_blocking=True)
        end.record()
    assert not end.query()
    end.synchronize()
    assert end.query() and begin.elapsed_time(end) > 0
    assert torch.equal(there.cpu(), pinned)


def test_an_event_orders_one_stream_after_another(emu):
    emu.set_bandwidth(SLOW)
    loader, reader = emu.Stream(), emu.Stream()
    pinned = torch.randn(MB).pin_memory()
    ready = emu.Event()
    with emu.stream(loader):
        there = pinned.to("emu", non_blocking=True)
        ready.record()
    with emu.stream(reader):
        ready.wait()
        copy = there + 0
    reader.synchronize()
    assert torch.equal(copy.cpu(), pinned)


def test_timeline_on_the_real_clock(emu):
    emu.set_bandwidth(SLOW)
    emu.set_timeline(True)
    side = emu.Stream()
    pinned = torch.ones(MB // 4).pin_memory()
    with emu.stream(side):
        there = pinned.to("emu", non_blocking=True)
    emu.current_stream().wait_stream(side)
    there + 1
    emu.synchronize()
    spans = {(name, stream): (t0, t1, n) for name, stream, t0, t1, n in emu.take_timeline()}
    copy = spans["h2d", f"emu:0/stream{side.stream_id}"]
    add = spans["aten::add.Tensor", "emu:0/stream0"]
    assert copy[2] == MB and copy[0] < copy[1] <= add[0]
    assert ("wait", "emu:0/stream0") in spans
    assert emu.counters()["stall_s"]["emu:0/stream0"] > 0


def test_layouts_and_dtypes_change_on_the_way(emu):
    x = torch.randn(4, 6)
    for there in (x.t().to("emu"), x[:, ::2].to("emu"), x.to("emu", torch.bfloat16), x.expand(3, 4, 6).to("emu")):
        assert there.device.type == "emu"
    assert torch.equal(x.t().to("emu").cpu(), x.t())
    assert torch.equal(x.to("emu", torch.bfloat16).cpu(), x.to(torch.bfloat16))
    out = torch.empty(6, 4).t()
    out.copy_(x.to("emu"))
    assert torch.equal(out, x)


def test_two_devices(emu):
    x = torch.randn(100, device="emu:0")
    y = x.to("emu:1")
    assert y.device.index == 1 and torch.equal(x.cpu(), y.cpu())
    with emu.device(1):
        assert torch.empty(1, device="emu").device.index == 1
    with torch.device("emu:1"):
        assert torch.nn.Linear(2, 2).weight.device == torch.device("emu:1")
    assert emu.current_device() == 0


def test_planned_copy_failure(emu):
    x = torch.ones(3)
    emu.fail_copy(2)
    there = x.to("emu")
    with pytest.raises(RuntimeError, match="d2h copy failed"):
        there.cpu()
    assert torch.equal(there.cpu(), x)


def test_streams_of_several_threads(emu):
    from concurrent.futures import ThreadPoolExecutor

    def work(seed: int) -> bool:
        side = emu.Stream()
        pinned = torch.randn(1000, generator=torch.Generator().manual_seed(seed)).pin_memory()
        same = True
        for _ in range(20):
            with emu.stream(side):
                there = pinned.to("emu", non_blocking=True)
            emu.current_stream().wait_stream(side)
            same &= torch.equal((there * 2).cpu(), pinned * 2)
            there.record_stream(emu.current_stream())
        return same

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
