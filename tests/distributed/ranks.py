"""One rank of the tests beside it: `python ranks.py SCENARIO`; the rendezvous is in the environment."""

from __future__ import annotations

import atexit
import copy
import ctypes
import faulthandler
import gc
import json
import os
import random
import re
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import toys
from torch import nn

import greenroom
import greenroom.emulator

emu: Any = torch.emu
faulthandler.enable()
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = f"emu:{RANK}"


def layer(transfer: str, *, encoder: str | None = None, residents: int = 0) -> dict[str, Any]:
    """The words for a transfer of the DiTs, and one of the encoders, if these are streamed too."""
    options: dict[str, Any] = {"dit": {"weight_transfer": transfer, "resident_layers": residents}}
    if encoder is not None:
        options["text_encoder"] = {"weight_transfer": encoder}
    return {"mode": "layer", "components": list(options), "layer_options": options}


WORDS = {
    "allgather": layer("allgather"),
    "allgather encoders": layer("allgather", encoder="allgather"),
    "allgather residents": layer("allgather", residents=3),
    "allgather one resident": layer("allgather", residents=1),
    "rank-local": layer("rank-local", encoder="rank-local"),
    "rank-local residents": layer("rank-local", residents=3),
    "mixed": layer("allgather", encoder="rank-local"),
    "mixed other": layer("rank-local", encoder="allgather"),
}


def same_bits() -> Any:
    """A pipeline of odd sizes and mixed dtypes, under every transfer; every rank with a seed of its own."""
    connect()
    pipe = toys.Pipeline()
    expected = [pipe(seed=RANK), pipe(seed=RANK + 10)]
    weights = {n: t.clone() for n, t in toys.tensors(pipe).items()}
    before = emu.memory_allocated()
    for name, words in WORDS.items():
        handle = greenroom.offload(pipe, words, device=DEVICE)
        for i in range(2):
            with torch.inference_mode(i == 1):
                assert torch.equal(pipe(DEVICE, seed=RANK + 10 * i), expected[i]), (name, i)
        assert all(torch.equal(t.cpu(), weights[n]) for n, t in toys.tensors(pipe).items()), name
        assert handle.ranks.broken is None
        handle.disable()
        assert torch.equal(pipe(seed=RANK), expected[0]), name
        assert emu.memory_allocated() == before, (name, emu.memory_allocated() - before)
    return True


def architecture(name: str, dtype: str) -> Any:
    """A tiny pipeline of one architecture under every transfer; every rank with a request of its own."""
    from greenroom import testing

    # Before the ranks meet: with a process group, transformers saves on its first rank only.
    pipe = testing.build_pipeline(name, dtype=getattr(torch, dtype))
    connect()
    expected = testing.run(pipe, name, seed=RANK)
    both = ("allgather encoders", "allgather one resident", "rank-local", "mixed", "mixed other")
    only_dit = ("allgather", "allgather one resident", "rank-local residents")
    for words_name in both if getattr(pipe, "text_encoder", None) is not None else only_dit:
        handle = greenroom.offload(pipe, WORDS[words_name], device=DEVICE)
        for i in range(2):
            assert torch.equal(testing.run(pipe, name, seed=RANK), expected), (words_name, i)
        standing = handle.ranks
        assert standing.broken is None
        assert (standing.passes > 0) == ("rank-local" not in words_name), words_name
        handle.disable()
    assert torch.equal(testing.run(pipe, name, seed=RANK), expected)
    return True


class Cancelled(Exception):
    pass


class Requests(toys.Pipeline):
    """A pipeline whose calls differ in everything that a request may choose."""

    @torch.no_grad()
    def __call__(
        self,
        device: Any = "cpu",
        steps: int = 4,
        seed: int = 0,
        guidance: bool = False,
        length: int = 6,
        fate: str = "",
    ) -> torch.Tensor:
        tokens = torch.arange(length)[None]
        embeds = self.text_encoder(tokens) + self.text_encoder_2(tokens)
        x = torch.randn(1, length, toys.WIDTH, generator=torch.Generator().manual_seed(seed)).to(device)
        for step in range(steps):
            dit = self.transformer if step < steps // 2 else self.transformer_2
            order = None
            if fate == "skips":
                order = [i for i in range(7) if (i + step + seed) % 3]
            elif fate == "shuffles":
                order = [2, 0, 1, 1, 6, 5, 3, 4]
            elif fate == "raises" and step == steps - 1:
                order = [0, 1, 99]
            made = dit(x, {"embeds": [embeds]}, order)
            if guidance:
                made = made + 0.5 * (made - dit(x, {"embeds": [embeds * 0]}, order))
            x = made
            if fate == "cancelled" and step == steps // 2:
                self.maybe_free_model_hooks()
                raise Cancelled
        image = self.vae.decode(x - self.vae.bn.running_mean).cpu()
        self.maybe_free_model_hooks()
        return image


def mixes(first: str, count: str) -> Any:
    """Random mixes of requests: nobody waits for anybody, and every result is right."""
    connect()
    pipe = Requests()
    plain = copy.deepcopy(pipe)
    choices = ["allgather encoders", "allgather residents", "mixed"]
    done, chosen = 0, ""
    for mix in range(int(first), int(first) + int(count)):
        dice = random.Random(mix)
        if mix % 10 == 0 or not chosen:
            chosen = choices[mix // 10 % len(choices)]
            handle = greenroom.offload(pipe, WORDS[chosen], device=DEVICE)
        for rank in range(SIZE):
            for _ in range(dice.choice([0, 1, 1, 2])):  # a rank may have nothing to do
                request = {
                    "steps": dice.choice([0, 1, 2, 3, 5]),
                    "seed": dice.randrange(100),
                    "guidance": dice.random() < 0.5,
                    "length": dice.choice([1, 6, 17]),
                    "fate": dice.choice(["", "", "", "skips", "shuffles", "raises", "cancelled"]),
                }
                pause = dice.choice([0, 0, 0.02])
                if rank != RANK:
                    continue
                time.sleep(pause)
                try:
                    made = pipe(DEVICE, **request)
                except (Cancelled, IndexError):
                    assert request["steps"] and request["fate"] in ("cancelled", "raises"), request
                else:
                    assert torch.equal(made, plain(**request)), (mix, request)
                done += 1
        assert handle.ranks.broken is None
    handle.disable()
    return done


def expect_error(kind: Any, words: str, call: Any) -> str:
    """The text of the error that `call` raises."""
    try:
        call()
    except kind as error:
        assert re.search(words, str(error)), str(error)
        return str(error)
    raise AssertionError(f"no {kind.__name__} that says {words!r}")


def failing_starts() -> Any:
    """One rank fails to enable, or has something else than the others: an error on each, and nothing is changed."""
    connect()
    culprit = RANK == SIZE - 1
    pipe = toys.Pipeline()
    expected = pipe()
    devices = {n: t.device for n, t in toys.tensors(pipe).items()}
    errors = []

    def fails(name: str, words: str, mine: Any, config: Any, other: Any = None) -> None:
        kind = greenroom.GreenroomError if not culprit else (greenroom.GreenroomError, RuntimeError)
        target = other if culprit and other is not None else pipe
        given = config if culprit or name != "words" else WORDS["allgather"]
        errors.append(
            expect_error(kind, mine if culprit else words, lambda: greenroom.offload(target, given, device=DEVICE))
        )
        for fault in (emu.fail_allocation, emu.fail_pin, emu.fail_copy):
            fault(None)
        assert not any(m._forward_hooks for c in pipe.components.values() for m in c.modules())
        assert {n: t.device for n, t in toys.tensors(pipe).items()} == devices
        assert torch.equal(pipe(), expected), name

    last = SIZE - 1
    fails(
        "words",
        f"rank {last} failed: ConfigError",
        "weight_transfer",
        {"mode": "layer", "layer_options": {"dit": {"weight_transfer": "al"}}},
    )
    fails("words", "disagree about config", "disagree about config", WORDS["allgather residents"])
    fails(
        "words",
        "disagree about .*weight_transfer",
        "disagree",
        WORDS["rank-local residents"] | {"layer_options": {"dit": {"weight_transfer": "rank-local"}}},
    )
    other = toys.Pipeline()
    with torch.no_grad():
        other.transformer.blocks[1].up.weight[3, 5] += 1
        other.transformer.blocks[1].up.weight.mul_(1.5)
    fails("weights", r"transformer.*blocks\.1", "disagree", WORDS["allgather"], other)
    fails("blocks", "disagree about components.transformer", "disagree", WORDS["allgather"], toys.Pipeline(blocks=3))
    other = toys.Pipeline()
    del other.transformer_2
    fails("component", "disagree about components.transformer_2", "disagree", WORDS["allgather"], other)
    fails(
        "component",
        f"rank {last} failed: TopologyError",
        "'dit' was asked for",
        WORDS["allgather encoders"],
        SimpleNamespace(text_encoder=other.text_encoder),
    )
    for k in (1, 4, 9):
        if culprit:
            emu.fail_allocation(k)
        fails("memory", f"rank {last} failed: OutOfMemoryError", "", WORDS["allgather residents"])
    for k in (1, 2, 3):
        if culprit:
            emu.fail_copy(k)
        fails("copy", f"rank {last} failed: RuntimeError", "injected", WORDS["allgather encoders"])
    for k in (1, 6):
        if culprit:
            emu.fail_pin(k)
        fails("pin", f"rank {last} failed: RuntimeError", "injected", WORDS["allgather encoders"])
    # After all this the ranks still find together.
    handle = greenroom.offload(pipe, WORDS["allgather encoders"], device=DEVICE)
    assert torch.equal(pipe(DEVICE), expected)
    handle.disable()
    return errors


def injected(count: str) -> Any:
    """A copy or an allocation fails on one rank, anywhere in a call: that call fails or recovers, and nothing else."""
    connect()
    pipe = Requests()
    expected = pipe(seed=RANK)
    outcomes = []
    dice = random.Random(7)
    for words in ({**WORDS["allgather encoders"]}, {**WORDS["allgather"], "memory_budget": "2MB"}):
        handle = greenroom.offload(pipe, words, device=DEVICE)
        assert torch.equal(pipe(DEVICE, seed=RANK), expected)
        for _ in range(int(count)):
            fault, k = dice.choice(["fail_copy", "fail_allocation"]), dice.randrange(1, 90)
            if RANK == SIZE - 1:
                getattr(emu, fault)(k)
            try:
                made = pipe(DEVICE, seed=RANK)
                outcomes.append("made")
            except RuntimeError as error:
                assert RANK == SIZE - 1 and "injected" in str(error), error
                outcomes.append("failed")
            else:
                assert torch.equal(made, expected), (fault, k)
            getattr(emu, fault)(None)
            assert handle.ranks.broken is None, (fault, k, handle.ranks.broken)
            assert torch.equal(pipe(DEVICE, seed=RANK), expected), (fault, k)
        handle.disable()
        assert torch.equal(pipe(seed=RANK), expected)
    return outcomes


def absent() -> Any:
    """One rank never comes."""
    connect()
    if RANK == SIZE - 1:
        time.sleep(1)
        return None
    pipe = toys.Pipeline()
    return expect_error(
        greenroom.OffloadError,
        f"rank {SIZE - 1} did not come",
        lambda: greenroom.offload(pipe, WORDS["allgather"], device=DEVICE),
    )


class LateFailure:
    """A gather of which it becomes known only after the forwards that it failed."""

    known = False

    def __init__(self, work: Any) -> None:
        self.work = work

    def wait(self) -> Any:
        if self.known:
            raise RuntimeError("planted: connection closed by peer")
        return self.work.wait()


def fails_late() -> Any:
    """What was computed with weights that did not arrive is not returned."""
    from greenroom.distributed import gather

    connect()
    pipe = toys.Pipeline()
    expected = pipe(seed=RANK)
    handle = greenroom.offload(pipe, WORDS["allgather"], device=DEVICE)
    assert torch.equal(pipe(DEVICE, seed=RANK), expected)
    if RANK == SIZE - 1:
        real = gather.all_gather
        gather.all_gather = lambda *args, **more: LateFailure(real(*args, **more))
        decode = pipe.vae.decode

        def then_known(x: torch.Tensor) -> torch.Tensor:
            LateFailure.known = True
            return decode(x)

        pipe.vae.decode = then_known
        text = expect_error(greenroom.OffloadError, "a gather failed", lambda: pipe(DEVICE, seed=RANK))
        gather.all_gather = real
        LateFailure.known = False
        del pipe.vae.decode
    else:
        assert torch.equal(pipe(DEVICE, seed=RANK), expected)
        text = "made"
    assert torch.equal(pipe(DEVICE, seed=RANK), expected)
    handle.disable()
    return text


def lost(how: str, after: str) -> Any:
    """The last rank ends in the middle of a forward; the others are told, and get their weights back."""
    connect()
    pipe = Requests()
    expected = pipe(steps=2)
    handle = greenroom.offload(pipe, WORDS["allgather encoders"], device=DEVICE)
    assert torch.equal(pipe(DEVICE, steps=2), expected)
    print("enabled", flush=True)
    if RANK == SIZE - 1:
        left = int(after)

        def end(module: Any, args: Any) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                print("ending", flush=True)
                if how == "exit":
                    os._exit(3)
                os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "segv": signal.SIGSEGV}[how])

        for block in (*pipe.transformer.blocks, *pipe.text_encoder.layers):
            block.up.register_forward_pre_hook(end)

    def serve() -> None:
        for _ in range(1000):
            assert torch.equal(pipe(DEVICE, steps=2), expected)

    text = expect_error(greenroom.OffloadError, "rank|gather", serve)
    expect_error(greenroom.OffloadError, "not in step", lambda: pipe(DEVICE))
    broken = handle.ranks.broken
    handle.disable()
    assert torch.equal(pipe(steps=2), expected)
    return [text, broken]


@torch.no_grad()
def unpinned() -> Any:
    """Without page-locked masters the shares go through the staging ring; a rank that gathers cannot sleep."""
    connect()
    pipe = toys.Pipeline()
    expected = pipe(seed=RANK)
    for name in ("allgather encoders", "mixed", "rank-local"):
        for pin in (False, "1MiB"):
            handle = greenroom.offload(pipe, {**WORDS[name], "pin_memory": pin}, device=DEVICE)
            for _ in range(2):
                assert torch.equal(pipe(DEVICE, seed=RANK), expected), (name, pin)
            assert handle.ranks.broken is None
            if "rank-local" not in name:
                expect_error(greenroom.OffloadError, "sleep", handle.sleep)
            else:
                handle.sleep()
                handle.wake()
                assert torch.equal(pipe(DEVICE, seed=RANK), expected)
            handle.disable()
    # Copies are timed, to choose a transfer, from such memory as masters will have.
    emu.reset_counters()
    handle = greenroom.offload(pipe, {**layer("auto"), "pin_memory": False}, device=DEVICE)
    assert emu.counters()["pins"] == 2  # the buffers of the staging ring
    handle.disable()
    emu.fail_pin(1)
    handle = greenroom.offload(pipe, {**layer("auto"), "pin_failure_policy": "whole_block_fallback"}, device=DEVICE)
    assert torch.equal(pipe(DEVICE, seed=RANK), expected)
    handle.disable()
    return True


@torch.no_grad()
def another_order() -> Any:
    """Blocks that run in another order than declared: learned once, by all ranks."""
    connect()
    pipe = toys.Pipeline()
    x, context = torch.randn(1, 4, toys.WIDTH), {"embeds": [torch.zeros(1, 4, toys.WIDTH)]}
    order = [0, 4, 1, 5, 2, 6, 3]
    expected = pipe.transformer(x, context, order)
    handle = greenroom.offload(pipe, WORDS["allgather"], device=DEVICE)
    misses = []
    if RANK == 0:  # the others learn it without ever having computed
        assert torch.equal(pipe.transformer(x, context, order).cpu(), expected)
    dist.barrier()
    for _ in range(4):
        misses.append(handle.report().misses)
        assert torch.equal(pipe.transformer(x, context, order).cpu(), expected)
    misses.append(handle.report().misses)
    handle.disable()
    return misses


def hosts(kind: str) -> Any:
    """Ranks that are not all on one host, or cannot share its memory: some keep a copy of their own."""
    connect()
    if kind == "two":
        greenroom.distributed.ranks._host = lambda: f"host {RANK % 2}"
    else:
        greenroom.distributed.shared._own_pages = lambda memory: None
        if RANK == 0:
            del os.memfd_create
    pipe = Requests()
    plain = copy.deepcopy(pipe)
    weight = pipe.transformer.blocks[1].up.weight.detach().clone()
    held = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for words in ("allgather encoders", "rank-local"):
            handle = greenroom.offload(pipe, WORDS[words], device=DEVICE)
            assert torch.equal(pipe(DEVICE, seed=RANK), plain(seed=RANK)), words
            held.append(len(handle._runtime().sharing.masters.ranks_here))
            if RANK == SIZE - 1:
                for each in (pipe, plain):
                    each.transformer.blocks[1].up.weight.data += 0.25
            assert torch.equal(pipe(DEVICE, seed=RANK), plain(seed=RANK)), words
            assert handle.ranks.broken is None
            dist.barrier()
            handle.disable()
            with torch.no_grad():
                for each in (pipe, plain):
                    each.transformer.blocks[1].up.weight.copy_(weight)
    return [held, sum("cannot share memory" in str(w.message) for w in caught)]


def groups_of_two() -> Any:
    """Of four ranks, the first two share and gather, and the last two; each pair knows nothing of the other."""
    connect()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pipe = toys.Pipeline()
    if RANK > 1:  # other weights than the first pair
        with torch.no_grad():
            pipe.transformer.scale.mul_(2)
    expected = pipe(seed=RANK)
    handle = greenroom.offload(pipe, WORDS["allgather encoders"], device=DEVICE, group=pairs[RANK // 2])
    for _ in range(1 + RANK // 2):
        assert torch.equal(pipe(DEVICE, seed=RANK), expected)
    standing = handle.ranks
    handle.disable()
    return [standing.rank, standing.size]


def forgets_to_disable() -> Any:
    """The process group goes before the offload, which is still there when the program ends."""
    connect()
    pipe = toys.Pipeline()
    expected = pipe(seed=RANK)
    greenroom.offload(pipe, WORDS["allgather"], device=DEVICE)
    assert torch.equal(pipe(DEVICE, seed=RANK), expected)
    dist.barrier()
    dist.destroy_process_group()
    return True


def one_alone() -> Any:
    """The last rank has nothing to do, and is at the end of its program at once."""
    connect()
    pipe = Requests()
    expected = pipe(steps=3)
    handle = greenroom.offload(pipe, WORDS["allgather encoders"], device=DEVICE)
    if RANK < SIZE - 1:
        for _ in range(3):
            assert torch.equal(pipe(DEVICE, steps=3), expected)
    conductor = handle._runtime().sharing.conductor
    handle.disable()
    while not conductor.wait(0.1):
        pass
    assert torch.equal(pipe(steps=3), expected)
    return {"passes": conductor.passes, "joined": conductor.joined}


def come_and_go() -> Any:
    """Gloo's threads and the open files of this process after each of a row of offloads that were disabled."""
    connect()
    pipe = toys.Pipeline()
    expected = pipe(seed=RANK)
    seen = []
    for words in (*["allgather encoders", "mixed", "rank-local"] * 2, "auto"):
        handle = greenroom.offload(pipe, WORDS.get(words, layer("auto")), device=DEVICE)
        assert torch.equal(pipe(DEVICE, seed=RANK), expected)
        conductor = handle._runtime().sharing.conductor
        handle.disable()
        while conductor is not None and not conductor.wait(0.1):
            pass
        threads = [name.read_text() for name in Path("/proc/self/task").glob("*/comm")]
        seen.append([threads.count("pt_gloo_runloop\n"), len(os.listdir("/proc/self/fd"))])
    return seen


class Wide(nn.Module):
    """Blocks of a mebibyte or so, of two sizes, neither divisible by the number of ranks."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.transformer_blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width + 1 + i % 2), nn.Linear(width + 1 + i % 2, width))
            for i in range(blocks)
        )

    _layerwise_offload_blocks_attrs: ClassVar = ["transformer_blocks"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.transformer_blocks:
            x = x + block(x)
        return x


def wide(width: int = 1024, blocks: int = 16) -> Any:
    torch.manual_seed(0)
    return SimpleNamespace(transformer=Wide(width, blocks).eval())


def host_bytes() -> tuple[int, int]:
    """Bytes of this process's own memory, the emulated device's left out, and of shared memory, its part of it."""
    gc.collect()
    emu.synchronize()
    emu.empty_cache()
    ctypes.CDLL(None).malloc_trim(0)
    text = Path("/proc/self/smaps_rollup").read_text()
    own, shared = (int(re.search(rf"{name}:\s+(\d+) kB", text)[1]) * 1024 for name in ("Pss_Anon", "Pss_Shmem"))
    return own - emu.memory_reserved(), shared


@torch.no_grad()
def counters(transfer: str, residents: str) -> Any:
    """What a step copies, what is on the device, what the host keeps; all in bytes."""
    connect()
    words = layer(transfer, residents=int(residents)) if transfer != "alone" else {"mode": "layer"}
    x = torch.randn(1, 8, 1024)
    small = wide(blocks=3)  # what the libraries need for themselves is there after one offload
    handle = greenroom.offload(small, {"mode": "layer"} if transfer == "alone" else layer(transfer), device=DEVICE)
    small.transformer(x)
    handle.disable()
    del small, handle
    dist.barrier()
    own, _ = host_bytes()
    device = emu.memory_allocated()
    pipe = wide(blocks=24)
    handle = greenroom.offload(pipe, words, device=DEVICE)
    dist.barrier()
    own_now, _ = host_bytes()  # before gloo takes host memory for its gathers, as no library of a device does
    device = emu.memory_allocated() - device
    first = pipe.transformer(x).cpu()
    dist.barrier()
    _, shared = host_bytes()  # a rank's part of it is what it has touched: all, once it was copied
    dist.barrier()
    ranks = lambda: handle.ranks.passes if handle.ranks is not None else 0  # noqa: E731
    before, passes = handle.report().copied, ranks()
    for _ in range(4):
        assert torch.equal(pipe.transformer(x).cpu(), first)
    dist.barrier()
    time.sleep(0.5)  # the thread of the rank that was done first takes part in the last pass
    report, passes = handle.report(), ranks() - passes
    dist.barrier()
    handle.disable()
    assert torch.equal(pipe.transformer(x), first)
    return {
        "weights": toys.nbytes(pipe.transformer),
        "blocks": [toys.nbytes(b) for b in pipe.transformer.transformer_blocks],
        "copied": report.copied - before,
        "passes": passes,
        "device": device,
        "own": own_now - own,
        "shared": shared,
        "misses": report.misses,
        "pinned": report.pinned,
        "moved": report.components[0].moved,
        "pageable": report.components[0].pageable,
    }


@torch.no_grad()
def budget(fraction: str) -> Any:
    """Blocks that stay, the same on every rank, within a budget, whatever each rank computes."""
    connect()
    pipe = wide(256, 12)
    plain = copy.deepcopy(pipe.transformer)
    weights = toys.nbytes(plain)
    limit = int(weights * float(fraction))
    words = {**layer("allgather"), "memory_budget": limit}
    before = emu.memory_allocated()
    handle = greenroom.offload(pipe, words, device=DEVICE)
    stays = []
    for batch in (8, 8, 32 if RANK else 8, 8, 512 if RANK else 8, 8):
        emu.reset_peak_memory_stats()
        x = torch.randn(1, batch, 256, generator=torch.Generator().manual_seed(RANK + batch))
        assert torch.equal(pipe.transformer(x).cpu(), plain(x)), batch
        assert emu.max_memory_allocated() - before <= limit, (batch, emu.max_memory_allocated() - before, limit)
        del x
        dist.barrier()
        component = handle.report().components[0]
        stays.append(component.blocks - component.streamed_blocks)
    # A budget that one rank lowers holds on all of them.
    if RANK == 0:
        handle.set_memory(int(limit * 0.9))
    dist.barrier()
    x = torch.ones(1, 8, 256)
    for _ in range(2):
        assert torch.equal(pipe.transformer(x).cpu(), plain(x))
        dist.barrier()
    component = handle.report().components[0]
    stays.append(component.blocks - component.streamed_blocks)
    assert handle.ranks.broken is None
    dist.barrier()
    handle.disable()
    assert torch.equal(pipe.transformer(torch.ones(1, 8, 256)), plain(torch.ones(1, 8, 256)))
    return {"stays": stays}


@torch.no_grad()
def edits() -> Any:
    """A rank may edit its weights, in every way: what it computes follows, and what the others compute does not."""
    connect()
    for words in ("allgather encoders", "rank-local"):
        pipe = Requests()
        plain = copy.deepcopy(pipe)
        handle = greenroom.offload(pipe, WORDS[words], device=DEVICE)
        assert torch.equal(pipe(DEVICE), plain())
        before = handle.report().misses
        assert torch.equal(pipe(DEVICE), plain())
        assert words == "rank-local" or handle.report().misses == before
        if RANK == 0:
            for each in (pipe, plain):
                each.transformer.blocks[1].up.weight.data += 0.25  # as an adapter is fused
                each.transformer.single_blocks[0].scale_shift_table.mul_(2)
                each.transformer_2.scale.data = each.transformer_2.scale.data * 3
                each.text_encoder.layers[1].down.weight.copy_(each.text_encoder.layers[0].down.weight)
        for _ in range(2):
            assert torch.equal(pipe(DEVICE), plain()), words
        assert all(torch.equal(t.cpu(), toys.tensors(plain)[n]) for n, t in toys.tensors(pipe).items())
        with handle.materialized(pipe.transformer):
            pipe.transformer.blocks[2].offset.add_(RANK)
        plain.transformer.blocks[2].offset.add_(RANK)
        assert torch.equal(pipe(DEVICE), plain()), words
        if RANK == SIZE - 1:
            # Larger, and of another dtype: replaced on this rank alone.
            for each in (pipe, plain):
                each.transformer.blocks[0].up = nn.Linear(toys.WIDTH, 4 * toys.WIDTH).to(torch.bfloat16)
            plain.transformer.blocks[0].up.load_state_dict(pipe.transformer.blocks[0].up.state_dict())
        assert torch.equal(pipe(DEVICE), plain()), words
        assert handle.ranks.broken is None
        dist.barrier()
        handle.disable()
        assert torch.equal(pipe(), plain()), words
    return True


@torch.no_grad()
def sharded_already() -> Any:
    """Weights that others have sharded are never sharded a second time."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    connect()
    mesh = init_device_mesh("emu", (SIZE,))
    errors = []
    x = torch.randn(1, 8, 64, generator=torch.Generator().manual_seed(0))
    pipe = SimpleNamespace(transformer=toys_with_even_blocks())
    expected = pipe.transformer(x)
    for block in pipe.transformer.transformer_blocks:
        fully_shard(block, mesh=mesh)
    for words in ("allgather", "rank-local"):
        errors.append(
            expect_error(
                greenroom.GreenroomError, "FSDP", lambda w=words: greenroom.offload(pipe, layer(w), device=DEVICE)
            )
        )
    pipe = SimpleNamespace(transformer=toys_with_even_blocks())
    for block in pipe.transformer.transformer_blocks:
        parallelize_module(block.to(DEVICE), mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    pipe.transformer.embed.to(DEVICE)
    split = pipe.transformer(x.to(DEVICE)).cpu()
    assert torch.allclose(split, expected, atol=1e-5)
    errors.append(
        expect_error(
            greenroom.GreenroomError, "DTensor", lambda: greenroom.offload(pipe, layer("allgather"), device=DEVICE)
        )
    )
    handle = greenroom.offload(pipe, layer("rank-local"), device=DEVICE)
    assert handle.report().components[0].streamed_blocks == 4
    for _ in range(2):
        assert torch.equal(pipe.transformer(x.to(DEVICE)).cpu(), split)
    handle.disable()
    assert torch.equal(pipe.transformer(x.to(DEVICE)).cpu(), split)
    return errors


def toys_with_even_blocks() -> nn.Module:
    torch.manual_seed(0)
    model = Wide(64, 0)
    model.transformer_blocks.extend(nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64)) for _ in range(4))
    return model.eval()


def context_parallel(name: str) -> Any:
    """One request on all ranks: each computes its part of the sequence, and blocks are gathered as well."""
    from diffusers import ContextParallelConfig

    from greenroom import testing

    pipe = testing.build_pipeline(name)
    alone = testing.run(pipe, name)
    connect()
    pipe.to(DEVICE)
    for dit in ("transformer", "transformer_2"):
        if getattr(pipe, dit, None) is not None:
            getattr(pipe, dit).enable_parallelism(config=ContextParallelConfig(ulysses_degree=SIZE))
    expected = testing.run(pipe, name)
    assert torch.allclose(expected, alone, atol=1e-4), (expected - alone).abs().max()
    pipe.to("cpu")
    result = {}
    for words in ("allgather", "rank-local"):
        handle = greenroom.offload(pipe, layer(words), device=DEVICE)
        for delay in (0.0, 0.3):
            time.sleep(delay * RANK)  # the last comes late, and the others wait for it
            assert torch.equal(testing.run(pipe, name), expected), words
        result[words] = [handle.ranks.passes, handle.ranks.joined, handle.ranks.broken]
        handle.disable()
    return result


def pairs_that_compute_together(name: str) -> Any:
    """Two requests at a time, each on two ranks; all four gather from each other."""
    from diffusers import ContextParallelConfig
    from torch.distributed.device_mesh import init_device_mesh

    from greenroom import testing

    pipe = testing.build_pipeline(name)
    connect()
    mesh = init_device_mesh("emu", (2, 1, 2), mesh_dim_names=("request", "ring", "ulysses"))
    pipe.to(DEVICE)
    for dit in ("transformer", "transformer_2"):
        if getattr(pipe, dit, None) is not None:
            config = ContextParallelConfig(ulysses_degree=2, mesh=mesh["ring", "ulysses"])
            getattr(pipe, dit).enable_parallelism(config=config)
    pair = RANK // 2
    expected = testing.run(pipe, name, seed=pair)
    pipe.to("cpu")
    handle = greenroom.offload(pipe, layer("allgather"), device=DEVICE)
    for _ in range(1 + pair):  # one pair is done before the other
        time.sleep(0.1 * RANK)
        assert torch.equal(testing.run(pipe, name, seed=pair), expected)
    standing = handle.ranks
    conductor = handle._runtime().sharing.conductor
    handle.disable()
    while not conductor.wait(0.1):
        pass
    return [standing.broken, conductor.passes, conductor.joined]


def loading(folder: str, transfer: str) -> Any:
    """A checkpoint that each rank maps: host memory at its peak, and how much of the files was read; bytes."""
    from greenroom import loading, testing

    connect()
    small = testing.build_pipeline("wan22_t2v")  # what the libraries need for themselves
    greenroom.offload(small, layer(transfer, encoder=transfer), device=DEVICE).disable()
    del small
    dist.barrier()
    start, over = host_bytes()[0], threading.Event()
    held = []

    def watch() -> None:
        while not over.wait(0.02):
            text = Path("/proc/self/smaps_rollup").read_text()
            own = int(re.search(r"Pss_Anon:\s+(\d+) kB", text)[1]) * 1024
            held.append(own - emu.memory_reserved(RANK) - start)

    def of_files() -> int:
        return int(re.search(r"RssFile:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

    watcher = threading.Thread(target=watch)
    watcher.start()
    pipe = loading.load_checkpoint(folder).pipeline
    pipe.set_progress_bar_config(disable=True)
    modules = [m for m in pipe.components.values() if isinstance(m, nn.Module)]
    weights = sum(toys.nbytes(m) for m in modules)
    before, read = of_files(), [0]
    take = greenroom.host.HostUnit.take

    def noted(unit: Any, *args: Any, **more: Any) -> None:
        read.append(of_files() - before)
        take(unit, *args, **more)

    greenroom.host.HostUnit.take = noted
    handle = greenroom.offload(pipe, layer(transfer, encoder=transfer), device=DEVICE)
    dist.barrier()
    _, shared = host_bytes()
    dist.barrier()
    over.set()
    watcher.join()
    made = testing.run(pipe, "wan22_t2v")
    handle.disable()
    plain = testing.run(pipe, "wan22_t2v")
    assert torch.equal(made, plain)
    return {"weights": weights, "own": max(held), "shared": shared, "read": max(read)}


def every_architecture(dtype: str) -> Any:
    """Which architectures have the same bits on every rank: all that can be gathered is, and one block stays."""
    from greenroom import testing

    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    pipes = {name: testing.build_pipeline(name, dtype=kind) for name in testing.ARCHITECTURES}
    connect()
    found = {}
    for name, pipe in pipes.items():
        expected = testing.run(pipe, name, seed=RANK)
        encoders = getattr(pipe, "text_encoder", None) is not None
        words = layer("allgather", encoder="allgather" if encoders else None, residents=1)
        handle = greenroom.offload(pipe, words, device=DEVICE)
        same = all(torch.equal(testing.run(pipe, name, seed=RANK), expected) for _ in range(2))
        assert handle.ranks.passes > 0 and handle.ranks.broken is None
        assert set(handle.ranks.transfers.values()) == {"allgather"}, handle.ranks.transfers
        handle.disable()
        same = same and torch.equal(testing.run(pipe, name, seed=RANK), expected)
        found[name] = "exact" if same else "failed"
    return found


def connect() -> None:
    dist.init_process_group("cpu:gloo,emu:emu_gloo", rank=RANK, world_size=SIZE)
    # After what Greenroom does at exit, and before the interpreter ends: gloo's threads must not outlive that.
    atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
    emu.set_device(RANK)
    emu.set_poison(True)
    emu.set_race_check("raise")


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error", RuntimeWarning)
    scenario = globals()[sys.argv[1]]
    result = scenario(*sys.argv[2:])
    emu.synchronize()
    assert emu.race_reports() == []
    Path(os.environ["RESULT"]).write_text(json.dumps(result))
    print("done", flush=True)


if __name__ == "__main__":
    main()
