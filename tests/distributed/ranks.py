"""One rank of the tests beside it: `python ranks.py SCENARIO`; the rendezvous is in the environment."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

faulthandler.enable()
sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

import torch
import torch.distributed as dist
import toys

import greenroom
import greenroom.emulator  # noqa: F401

emu: Any = torch.emu
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
    "rank-local": layer("rank-local", encoder="rank-local"),
    "rank-local residents": layer("rank-local", residents=3),
    "mixed": layer("allgather", encoder="rank-local"),
    "mixed other": layer("rank-local", encoder="allgather"),
}


def same_bits() -> Any:
    """A pipeline of odd sizes and mixed dtypes, under every transfer; every rank with a seed of its own."""
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


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error", RuntimeWarning)
    dist.init_process_group("cpu:gloo,emu:emu_gloo", rank=RANK, world_size=SIZE)
    emu.set_device(RANK)
    emu.set_poison(True)
    emu.set_race_check("raise")
    scenario = globals()[sys.argv[1]]
    result = scenario(*sys.argv[2:])
    emu.synchronize()
    assert emu.race_reports() == []
    Path(os.environ["RESULT"]).write_text(json.dumps(result))
    print("done", flush=True)


if __name__ == "__main__":
    main()
