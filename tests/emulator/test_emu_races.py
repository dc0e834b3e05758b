"""Each kind of synchronisation bug, planted: the checker names it, and the fixed version passes."""

import pytest
import torch

N = 1 << 12


@pytest.fixture
def side(emu):
    return emu.Stream()


@pytest.fixture
def pinned(emu):
    return torch.randn(N).pin_memory()


@pytest.mark.parametrize("virtual", [False, True])
def test_missing_wait_for_a_copy(emu, side, pinned, virtual):
    emu.set_virtual_time(virtual)
    with emu.stream(side):
        there = pinned.to("emu", non_blocking=True)
    with pytest.raises(RuntimeError, match=r"emu race: aten::add.Tensor .* reads bytes .* written by un-synchronised"):
        there + 1
    emu.current_stream().wait_stream(side)
    assert torch.equal((there + 0).cpu(), pinned)


def test_collect_reports_and_goes_on(emu, side, pinned):
    emu.set_race_check("collect")
    with emu.stream(side):
        there = pinned.to("emu", non_blocking=True)
    there + 1
    [report] = emu.race_reports()
    assert f"stream{side.stream_id}" in report
    assert emu.race_reports() == []
    emu.set_race_check("off")
    with emu.stream(side):
        there.copy_(pinned, non_blocking=True)
    there + 1
    assert emu.race_reports() == []


def test_switching_the_checker_on_later_invents_no_race(emu, side, pinned):
    with emu.stream(side):
        there = pinned.to("emu", non_blocking=True)
    emu.set_race_check("off")
    emu.current_stream().wait_stream(side)
    emu.set_race_check("raise")
    there + 1
    emu.synchronize()


def test_slot_refilled_while_it_is_still_read(emu, side, pinned):
    slot = torch.zeros(N, device="emu")
    side.wait_stream(emu.current_stream())
    slot + 1
    with pytest.raises(RuntimeError, match=r"overwrites|writes bytes .* still being read"), emu.stream(side):
        slot.copy_(pinned, non_blocking=True)
    side.wait_stream(emu.current_stream())
    with emu.stream(side):
        slot.copy_(pinned, non_blocking=True)
    emu.current_stream().wait_stream(side)
    assert torch.equal((slot + 0).cpu(), pinned)


def test_slots_of_one_arena_are_independent(emu, side, pinned):
    arena = torch.zeros(2 * 4 * N, dtype=torch.uint8, device="emu")
    a, b = (arena[i * 4 * N : (i + 1) * 4 * N].view(torch.float32) for i in range(2))
    side.wait_stream(emu.current_stream())
    for _ in range(3):
        with emu.stream(side):
            b.copy_(pinned, non_blocking=True)
        a.as_strided((N // 4, 4), (4, 1)) + 1  # the compute stream reads slot a meanwhile
    # One float across the border is enough.
    with pytest.raises(RuntimeError, match=rf"bytes \[{4 * N}, {4 * N + 4}\)"):
        arena.view(torch.float32)[N - 1 : N + 1] + 1
    emu.current_stream().wait_stream(side)
    arena.view(torch.float32)[N - 1 : N + 1] + 1


def test_a_write_over_part_of_a_range_hides_no_race_on_the_rest(emu, side, pinned):
    slot = torch.zeros(N, device="emu")
    side.wait_stream(emu.current_stream())
    with emu.stream(side):
        slot.copy_(pinned, non_blocking=True)
        done_with_half = slot[: N // 2].zero_()
        early = side.record_event()
    with emu.stream(side):
        slot[N // 2 :].copy_(pinned[N // 2 :], non_blocking=True)
    emu.current_stream().wait_event(early)
    done_with_half + 1  # ordered by the event
    with pytest.raises(RuntimeError, match=rf"bytes \[{2 * N}, {4 * N}\)"):
        slot + 1
    emu.current_stream().wait_stream(side)
    slot + 1


def test_a_read_does_not_hide_an_earlier_write(emu, side, pinned):
    third = emu.Stream()
    with emu.stream(side):
        there = pinned.to("emu", non_blocking=True)
    emu.current_stream().wait_stream(side)
    there + 1
    with emu.stream(third), pytest.raises(RuntimeError, match="un-synchronised"):
        there + 1
    emu.synchronize()


def test_block_freed_while_a_copy_still_writes_it(emu, side, pinned):
    block = torch.empty(N, device="emu")
    with emu.stream(side):
        block.copy_(pinned, non_blocking=True)
    del block
    [report] = emu.race_reports()
    assert "freed while work on" in report and "record_stream" in report


def test_block_allocated_on_a_side_stream_and_freed_while_computed_with(emu, side, pinned):
    with emu.stream(side):
        there = pinned.to("emu", non_blocking=True)
    emu.current_stream().wait_stream(side)
    there + 1
    del there
    assert "record_stream" in emu.race_reports()[0]


@pytest.mark.parametrize("cure", ["record_stream", "host", "stream"])
def test_freeing_in_order_is_no_race(emu, side, pinned, cure):
    with emu.stream(side):
        there = pinned.to("emu", non_blocking=True)
    emu.current_stream().wait_stream(side)
    there + 1
    if cure == "record_stream":
        there.record_stream(emu.current_stream())
    elif cure == "host":
        emu.current_stream().synchronize()
    else:
        side.wait_stream(emu.current_stream())
    del there
    assert emu.race_reports() == []


@pytest.mark.parametrize("ask", ["stream", "event"])
def test_a_host_that_has_seen_the_end_by_polling_may_rely_on_it(emu, side, pinned, ask):
    emu.set_bandwidth(1e6)
    with emu.stream(side):
        there = pinned.to("emu", non_blocking=True)
        event = side.record_event()
    while not (side if ask == "stream" else event).query():
        pass
    assert torch.equal((there + 0).cpu(), pinned)


def test_a_sound_ring_of_two_slots_passes(emu, side):
    blocks = [torch.randn(N).pin_memory() for _ in range(6)]
    slots = [torch.empty(N, device="emu") for _ in range(2)]
    ready, free = [emu.Event() for _ in slots], [emu.Event() for _ in slots]
    main = emu.current_stream()
    for event in free:
        event.record(main)
    for i, block in enumerate(blocks):
        with emu.stream(side):
            free[i % 2].wait(side)
            slots[i % 2].copy_(block, non_blocking=True)
            ready[i % 2].record(side)
        ready[i % 2].wait(main)
        assert torch.equal((slots[i % 2] * 2).cpu(), block * 2)
        free[i % 2].record(main)


@pytest.mark.parametrize("virtual", [False, True])
def test_host_reads_a_pinned_destination_too_early(emu, side, pinned, virtual):
    emu.set_virtual_time(virtual)
    device = pinned.to("emu")
    with emu.check_host_accesses():
        back = device.to("cpu", non_blocking=True)
        with pytest.raises(RuntimeError, match=r"on the host reads bytes .* may still write"):
            back + 1
        emu.synchronize()
        assert torch.equal(back, pinned)


def test_host_overwrites_a_pinned_source_too_early(emu, side, pinned):
    with emu.check_host_accesses():
        with emu.stream(side):
            there = pinned.to("emu", non_blocking=True)
        pinned[0].item()  # reading it is fine
        with pytest.raises(RuntimeError, match=r"on the host writes bytes .* may still read"):
            pinned.zero_()
        side.synchronize()
        pinned.zero_()
    del there


def test_two_copies_into_one_pinned_buffer(emu, side):
    a, b = torch.zeros(N, device="emu"), torch.zeros(N, device="emu")
    emu.synchronize()
    buffer = torch.empty(N, pin_memory=True)
    with emu.stream(side):
        buffer.copy_(a, non_blocking=True)
    with pytest.raises(RuntimeError, match="emu race"):
        buffer.copy_(b, non_blocking=True)
    emu.synchronize()
