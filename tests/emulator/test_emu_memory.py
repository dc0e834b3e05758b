"""The pool: capacity, figures, deferral by record_stream, poison, the memory timeline, planned failures."""

import gc

import pytest
import torch

MB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_is_left(emu):
    gc.collect()
    before = emu.memory_allocated(), emu.pinned_stats()["current"]
    yield
    gc.collect()
    emu.synchronize()
    assert (emu.memory_allocated(), emu.pinned_stats()["current"]) == before
    assert emu.memory_reserved() == emu.memory_allocated()


def test_figures_agree_with_the_generic_interface(emu):
    base = emu.memory_allocated()
    emu.reset_peak_memory_stats()
    a = torch.empty(MB, device="emu")
    b = torch.empty(3, device="emu")
    assert emu.memory_allocated() - base == 4 * MB + 512  # rounded up to 512
    assert torch.accelerator.memory_allocated() == emu.memory_allocated()
    del a
    assert emu.max_memory_allocated() - base == 4 * MB + 512
    assert torch.accelerator.max_memory_allocated() == emu.max_memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    assert emu.max_memory_allocated() == emu.memory_allocated() == base + 512
    del b


def test_more_than_the_capacity_is_out_of_memory(emu):
    a = torch.empty(MB, device="emu")
    emu.set_capacity(emu.memory_allocated() + 2 * MB)
    assert emu.mem_get_info() == torch.accelerator.get_memory_info() == (2 * MB, emu.memory_allocated() + 2 * MB)
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 4\.00 MiB"):
        a * 2  # the output does not fit
    a.mul_(2)  # in place it does
    kept = torch.empty(MB // 4, device="emu")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(MB // 2, device="emu")
    del a
    torch.empty(MB // 2, device="emu")
    del kept


def test_capacity_is_per_device(emu):
    emu.set_capacity(MB, 1)
    assert emu.get_device_properties(1).total_memory == MB
    torch.empty(MB, device="emu:0")
    with pytest.raises(torch.OutOfMemoryError, match="Device 1"):
        torch.empty(MB, device="emu:1")


def test_record_stream_keeps_memory_until_the_stream_is_done(emu):
    emu.set_virtual_time(True)
    emu.set_bandwidth(1e6)
    side = emu.Stream()
    used = torch.empty(MB, device="emu")
    allocated = emu.memory_allocated()
    with emu.stream(side):
        target = torch.empty(MB, device="emu")
        target.copy_(torch.empty(MB).pin_memory(), non_blocking=True)
    used.record_stream(side)
    del used
    assert emu.memory_allocated() == allocated
    assert emu.memory_reserved() == allocated + 4 * MB
    emu.synchronize()
    assert emu.memory_reserved() == allocated
    del target


def test_an_allocation_waits_for_deferred_memory_before_it_gives_up(emu):
    emu.set_virtual_time(True)
    emu.set_bandwidth(1e6)
    base = emu.memory_allocated()
    side = emu.Stream()
    with emu.stream(side):
        used = torch.empty(MB, device="emu")
        used.copy_(torch.empty(MB).pin_memory(), non_blocking=True)
    emu.current_stream().wait_stream(side)
    total = used.sum()
    used.record_stream(emu.current_stream())
    del used
    emu.set_capacity(base + 5 * MB)
    torch.empty(MB, device="emu")  # fits only once the copy has ended
    assert emu.virtual_time() >= 4 * MB / 1e6
    del total


def test_new_and_freed_memory_is_poisoned(emu):
    fresh = torch.empty(1000, device="emu")
    assert fresh.cpu().isnan().all()
    pinned = torch.empty(1000, pin_memory=True)
    assert pinned.isnan().all()
    fresh.zero_()
    # A view of the bytes that outlives the tensor's accounting: the pool overwrites them as they come back.
    again = torch.zeros(1000, device="emu")
    del again, fresh
    emu.set_poison(False)  # nothing is filled from here on, so what follows is what was left at the release
    reused = torch.empty(1000, device="emu")
    assert reused.cpu().isnan().all()


def test_pinned_memory_is_counted_to_the_byte(emu):
    before = emu.pinned_stats()
    emu.reset_counters()
    a = torch.empty(1001, dtype=torch.uint8, pin_memory=True)
    b = torch.ones(3, dtype=torch.float64).pin_memory()
    assert a.is_pinned() and b.is_pinned() and b[1:].is_pinned()
    assert not torch.empty(3).is_pinned() and not torch.empty(3, device="emu").is_pinned()
    now = emu.pinned_stats()
    assert now["current"] - before["current"] == 1001 + 24 and now["count"] - before["count"] == 2
    del a
    assert emu.pinned_stats()["current"] - before["current"] == 24
    counts = emu.counters()
    assert (counts["pins"], counts["pinned_bytes"], counts["unpins"]) == (2, 1025, 1)
    with pytest.raises(RuntimeError, match="pinned"):
        torch.empty(3, device="emu", pin_memory=True)
    del b


@pytest.mark.parametrize("virtual", [False, True])
def test_memory_timeline_tells_every_change_and_the_peak(emu, virtual):
    emu.set_virtual_time(virtual)
    base = emu.memory_allocated()
    emu.reset_peak_memory_stats()
    emu.set_memory_timeline(True)
    a = torch.empty(MB, device="emu")
    b = a + 1
    c = b * 2
    del a, c
    b.cpu()
    del b
    events = emu.take_memory_timeline()
    assert [n - base for _, n in events] == [4 * MB, 8 * MB, 12 * MB, 8 * MB, 4 * MB, 0]
    assert max(n for _, n in events) == emu.max_memory_allocated()
    times = [t for t, _ in events]
    assert times == sorted(times)
    assert emu.take_memory_timeline() == []
    emu.set_memory_timeline(False)
    torch.empty(1, device="emu")
    assert emu.take_memory_timeline() == []


def test_virtual_memory_timeline_is_on_the_clock_of_the_stream(emu):
    emu.set_virtual_time(True, membw=1e9, launch=0, kernel_latency=0)
    emu.set_memory_timeline(True)
    a = torch.zeros(MB, device="emu")
    b = a + 1
    del a
    emu.take_memory_timeline()
    del b  # the host is still at zero; the stream will be here after it has read and written 12 MB
    [(seconds, _)] = emu.take_memory_timeline()
    assert emu.virtual_time() == 0.0
    emu.synchronize()
    assert seconds == emu.virtual_time() > 12 * MB / 1e9


def test_planned_allocation_failure(emu):
    emu.fail_allocation(2)
    x = torch.ones(4, device="emu")
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        x + 1
    y = x + 1  # once only
    emu.fail_allocation(1, device=1)
    y = x + 1
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1, device="emu:1")
    emu.fail_allocation(1)
    emu.fail_allocation(None)
    assert (y + 1).sum().item() == 12


def test_planned_pin_failure(emu):
    emu.fail_pin(2)
    torch.empty(3, pin_memory=True)
    with pytest.raises(RuntimeError, match="injected by fail_pin"):
        torch.empty(3).pin_memory()
    torch.empty(3).pin_memory()


@pytest.mark.parametrize("bad", [0, -1, 1.5])
def test_a_plan_that_makes_no_sense_is_refused(emu, bad):
    for plan in (emu.fail_allocation, emu.fail_pin, emu.fail_copy):
        with pytest.raises(ValueError, match=f"k={bad}"):
            plan(bad)


def test_bad_settings_name_the_field(emu):
    with pytest.raises(ValueError, match="h2d=-1"):
        emu.set_bandwidth(-1)
    with pytest.raises(ValueError, match="nbytes=-5"):
        emu.set_capacity(-5)
    with pytest.raises(ValueError, match="membw=0"):
        emu.set_virtual_time(True, membw=0)
    with pytest.raises(ValueError, match=r"mode='on'.*'collect'"):
        emu.set_race_check("on")
    with pytest.raises(ValueError, match="cuda"):
        emu.memory_allocated("cuda")
    with pytest.raises(ValueError, match="there are 2"):
        emu.memory_allocated(7)
