"""One rank of the tests beside it: `python ranks.py SCENARIO`; the rendezvous is in the environment."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import re
import sys
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
from greenroom import testing

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
            assert torch.equal(pipe(DEVICE, seed=RANK + 10 * i), expected[i]), (name, i)
        assert all(torch.equal(t.cpu(), weights[n]) for n, t in toys.tensors(pipe).items()), name
        assert handle.ranks.broken is None
        handle.disable()
        assert torch.equal(pipe(seed=RANK), expected[0]), name
        assert emu.memory_allocated() == before, (name, emu.memory_allocated() - before)
    return True


def architecture(name: str, dtype: str) -> Any:
    """A tiny pipeline of one architecture under every transfer; every rank with a request of its own."""
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
    own_now, shared = host_bytes()
    device = emu.memory_allocated() - device
    first = pipe.transformer(x).cpu()
    dist.barrier()
    before, passes = handle.report().copied, handle.ranks.passes
    for _ in range(4):
        assert torch.equal(pipe.transformer(x).cpu(), first)
    report, passes = handle.report(), handle.ranks.passes - passes
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
        "arena": report.arena,
    }


def connect() -> None:
    dist.init_process_group("cpu:gloo,emu:emu_gloo", rank=RANK, world_size=SIZE)
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
