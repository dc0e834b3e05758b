"""The virtual clock: the documented cost model, overlap and stalls, and runs that agree to the last digit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

MB = 1 << 20


def elapsed(emu, work) -> float:
    emu.synchronize()
    before = emu.virtual_time()
    work()
    emu.synchronize()
    return emu.virtual_time() - before


@pytest.fixture
def free_launches(emu):
    """Only flops, bytes and copies cost."""
    emu.set_virtual_time(True, flops=1e9, membw=1e15, launch=0, kernel_latency=0)


@pytest.mark.parametrize(
    ("work", "flops"),
    [
        (lambda r: r(32, 48) @ r(48, 16), 2 * 32 * 48 * 16),
        (lambda r: F.linear(r(2, 5, 48), r(16, 48), r(16)), 2 * 10 * 48 * 16),
        (lambda r: r(3, 8, 4) @ r(3, 4, 9), 2 * 3 * 8 * 4 * 9),
        (lambda r: F.conv2d(r(2, 8, 9, 9), r(4, 8, 3, 3)), 2 * 2 * 4 * 7 * 7 * 8 * 9),
        (lambda r: F.conv2d(r(1, 8, 9, 9), r(8, 2, 3, 3), groups=4), 2 * 8 * 7 * 7 * 2 * 9),
        (lambda r: F.scaled_dot_product_attention(r(2, 3, 9, 8), r(2, 3, 5, 8), r(2, 3, 5, 8)), 4 * 2 * 3 * 9 * 5 * 8),
    ],
)
def test_arithmetic_costs_its_operations(emu, free_launches, work, flops):
    made = []

    def take(*shape):
        return made.pop(0) if made else torch.zeros(*shape, device="emu")

    inputs = []

    def remember(*shape):
        inputs.append(torch.zeros(*shape, device="emu"))
        return inputs[-1]

    work(remember)
    made.extend(inputs)
    assert elapsed(emu, lambda: work(take)) == pytest.approx(flops / 1e9, rel=1e-4)


def test_other_operations_cost_the_bytes_they_touch(emu):
    emu.set_virtual_time(True, flops=1e15, membw=1e9, launch=0, kernel_latency=3e-6)
    x = torch.zeros(MB, device="emu")
    assert elapsed(emu, lambda: x + x) == pytest.approx(8 * MB / 1e9 + 3e-6)  # one argument twice is read once
    assert elapsed(emu, lambda: x.mul_(2)) == pytest.approx(8 * MB / 1e9 + 3e-6)
    assert elapsed(emu, lambda: x.to(torch.bfloat16)) == pytest.approx(6 * MB / 1e9 + 3e-6)


def test_the_host_issues_ahead_of_the_device(emu):
    emu.set_virtual_time(True, membw=1e6, launch=1e-3, kernel_latency=0)
    x = torch.zeros(1000, device="emu")
    emu.synchronize()
    before = emu.virtual_time()
    for _ in range(3):
        x.add_(1)
    assert emu.virtual_time() - before == pytest.approx(3e-3)
    emu.synchronize()
    assert emu.virtual_time() - before == pytest.approx(3 * 8000 / 1e6)


def test_copies_cost_latency_and_bytes_and_queue_by_direction(emu, free_launches):
    emu.set_bandwidth(1e6, 2e6)
    emu.set_latency(1e-3)
    emu.set_pageable_factor(0.5)
    pinned, device = torch.zeros(1000).pin_memory(), torch.zeros(1000, device="emu")
    assert elapsed(emu, lambda: device.copy_(pinned)) == pytest.approx(1e-3 + 4000 / 1e6)
    assert elapsed(emu, lambda: device.copy_(torch.zeros(1000))) == pytest.approx(1e-3 + 4000 / 0.5e6)
    assert elapsed(emu, device.cpu) == pytest.approx(1e-3 + 4000 / 1e6)
    a, b = emu.Stream(), emu.Stream()
    back, other = torch.zeros(1000).pin_memory(), torch.zeros(1000, device="emu")
    emu.synchronize()

    def both(first, second):
        with emu.stream(a):
            first()
        with emu.stream(b):
            second()

    up = lambda x: lambda: x.copy_(pinned, non_blocking=True)  # noqa: E731
    assert elapsed(emu, lambda: both(up(device), up(other))) == pytest.approx(2 * 5e-3)
    down = lambda: back.copy_(other, non_blocking=True)  # noqa: E731
    assert elapsed(emu, lambda: both(up(device), down)) == pytest.approx(5e-3)


def test_a_copy_hides_behind_work_and_what_does_not_hide_is_a_stall(emu, free_launches):
    emu.set_bandwidth(4e6)
    side, main = emu.Stream(), emu.current_stream()
    pinned, slot = torch.zeros(1000).pin_memory(), torch.zeros(1000, device="emu")
    x = torch.zeros(100, 100, device="emu")  # x @ x takes 2 ms, the copy 1 ms
    emu.synchronize()

    def step(work):
        with emu.stream(side):
            slot.copy_(pinned, non_blocking=True)
        work()
        main.wait_stream(side)
        slot + 1

    emu.reset_counters()
    assert elapsed(emu, lambda: step(lambda: x @ x)) == pytest.approx(2e-3, rel=1e-3)
    assert emu.counters()["stall_s"]["emu:0/stream0"] == 0
    side.wait_stream(main)
    emu.set_timeline(True)
    assert elapsed(emu, lambda: step(lambda: None)) == pytest.approx(1e-3, rel=1e-3)
    assert emu.counters()["stall_s"]["emu:0/stream0"] == pytest.approx(1e-3, rel=1e-3)
    spans = emu.take_timeline()
    waits = [t1 - t0 for name, stream, t0, t1, _ in spans if (name, stream) == ("wait", "emu:0/stream0")]
    assert waits == pytest.approx([1e-3], rel=1e-3)


def test_events_measure_virtual_time(emu, free_launches):
    a, b = emu.Event(enable_timing=True), emu.Event(enable_timing=True)
    x = torch.zeros(100, 100, device="emu")
    a.record()
    x @ x
    b.record()
    assert not b.query()
    b.synchronize()
    assert a.elapsed_time(b) == pytest.approx(2.0, rel=1e-3)  # ms


def test_polling_ends(emu, free_launches):
    x = torch.zeros(100, 100, device="emu")
    x @ x
    done = emu.current_stream().record_event()
    polls = 0
    while not done.query():
        polls += 1
        assert polls < 10_000
    assert polls > 0


def test_switching_starts_at_zero(emu):
    emu.set_virtual_time(True)
    torch.zeros(10, device="emu")
    old = emu.current_stream().record_event()
    emu.synchronize()
    assert emu.virtual_time() > 0
    emu.set_virtual_time(True)
    assert emu.virtual_time() == 0
    emu.current_stream().wait_event(old)  # of another era: long past
    assert old.query()
    emu.synchronize()
    assert emu.virtual_time() == 0


def test_overlap_approaches_the_bound(emu):
    from diffusers.hooks import apply_group_offloading

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(64, 64)
            self.blocks = torch.nn.ModuleList([torch.nn.Linear(64, 64) for _ in range(12)])

        def forward(self, x):
            x = self.head(x)
            for block in self.blocks:
                x = x + block(x)
            return x

    x = torch.zeros(256, 64)
    nbytes = sum(p.numel() * 4 for p in Net().parameters())

    def forward_time(prepare) -> float:
        emu.set_virtual_time(True, flops=1e10)
        emu.set_bandwidth(1e8)
        net = Net().eval()
        prepare(net)
        on_device = x.to("emu")
        with torch.no_grad():
            net(on_device)
            return elapsed(emu, lambda: net(on_device))

    def grouped(**kwargs):
        return lambda net: apply_group_offloading(
            net, onload_device=torch.device("emu"), offload_type="block_level", num_blocks_per_group=1, **kwargs
        )

    compute, copies = forward_time(lambda net: net.to("emu")), nbytes / 1e8
    overlapped = forward_time(grouped(use_stream=True, record_stream=True))
    assert max(compute, copies) <= overlapped < 1.25 * max(compute, copies)
    assert forward_time(grouped()) >= compute + copies - 1e-3
    assert forward_time(grouped(use_stream=True, record_stream=True)) == overlapped  # exactly


def test_two_fresh_processes_agree_to_the_last_digit(emu):
    script = Path(__file__).with_name("virtual_run.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "random"}
    command = [sys.executable, str(script)]
    runs = [
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout for _ in range(2)
    ]
    assert runs[0] == runs[1]
    figures = json.loads(runs[0])
    assert figures["seconds"] > 0 and len(figures["timeline"]) > 50 and figures["stalls"]["emu:0/stream0"] > 0
    assert max(n for _, n in figures["memory"]) == figures["peak"]
