"""Ranks that share weights: where gathering pays, where copying whole blocks does; how close both come to the bound.

python benchmarks/distributed.py [--quick]
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch

from bench.clock import DEVICE, CostModel, emu, profile, seconds, start, virtual
from bench.report import INK, Gate, Result, Table, main, mb, tidy, yes
from bench.subjects import Subject, quieten, wan

COST = CostModel(flops=50e9, membw=400e9, launch=2e-6, kernel_latency=2e-6, copy_latency=10e-6)
SIZE = 2
RATIOS = (1.0, 2.0)
LINKS = {"fast link": 4.0, "slow link": 0.5}
"""Bytes a second on which blocks are gathered, in bandwidths of one rank's bus."""
TRANSFERS = ("rank-local", "allgather", "auto")
LIMIT = 1.08
FORWARDS = 4


def subject_of(quick: bool) -> tuple[Subject, CostModel]:
    if quick:
        return wan(12, 128, 4), dataclasses.replace(COST, flops=5e9)
    return wan(24, 384, 4), COST


# ---------------------------------------------------------------------- one rank


def rank_main(quick: bool) -> None:
    """What each rank does; the figures of all cases go to the file RESULT."""
    import torch.distributed as dist

    import greenroom

    torch.set_num_threads(1)
    quieten()
    subject, cost = subject_of(quick)
    dist.init_process_group("cpu:gloo,emu:emu_gloo")
    start(races=True, poison=quick)
    base = profile(subject, cost, forwards=FORWARDS)
    streamed = sum(subject.block_bytes())
    cases = []
    for ratio in RATIOS:
        for link in LINKS.values():
            for transfer in TRANSFERS:
                bus = streamed / base.compute / ratio
                pipeline = types.SimpleNamespace(transformer=subject.model())
                dist.barrier()
                virtual(cost)
                emu.set_bandwidth(bus, bus, link * bus)
                words = {"mode": "layer", "layer_options": {"dit": {"weight_transfer": transfer}}}
                handle = greenroom.offload(pipeline, words, device=DEVICE)
                for _ in range(10):
                    case = _steady(subject, pipeline.transformer, handle)
                    apart = torch.tensor([handle.ranks.joined - case.pop("joined")])
                    dist.all_reduce(apart)
                    if not apart.item():  # every pass was used by every rank
                        break
                chosen = handle.ranks.transfers["transformer"]
                dist.barrier()
                handle.disable()
                del handle, pipeline
                same = torch.equal(case.pop("latent"), base.reference)
                cases.append({**case, "chosen": chosen, "same": same, "shared": not apart.item()})
    summary = {"compute": base.compute, "streamed": streamed, "blocks": subject.block_bytes(), "cases": cases}
    Path(os.environ["RESULT"]).write_text(json.dumps(summary))


@torch.no_grad()
def _steady(subject: Subject, model: Any, handle: Any) -> dict[str, Any]:
    """Forwards after two others, all ranks beginning together."""
    import torch.distributed as dist

    latent = subject.latent.to(DEVICE)
    extras = {k: v.to(DEVICE) for k, v in subject.extras.items()}
    dist.barrier()
    joined = handle.ranks.joined
    for _ in range(2):
        latent = subject.step(model, latent, extras)
    dist.barrier()
    emu.race_reports()
    emu.reset_counters()
    began, ended = (torch.Event(DEVICE, enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(FORWARDS):
        latent = subject.step(model, latent, extras)
    ended.record()
    taken = began.elapsed_time(ended) / 1e3 if seconds() else 0.0
    dist.barrier()
    return {
        "seconds": taken / FORWARDS,
        "copied": emu.counters()["h2d_bytes"] / FORWARDS,
        "races": len(emu.race_reports()),
        "latent": latent.cpu(),
        "joined": joined,
    }


# ---------------------------------------------------------------------- all of them


def run(quick: bool = False) -> Result:
    ranks = _launch(quick)
    first = ranks[0]
    compute, streamed = first["compute"], first["streamed"]
    tables, gates, over, times = [], [], {}, {}
    i = 0
    for ratio in RATIOS:
        for name, link in LINKS.items():
            bus = streamed / compute / ratio
            table = Table(
                ["transfer", "ms a forward", "bound, ms", "over bound", "copied by each rank, MB", "same bits", "races"]
            )
            for transfer in TRANSFERS:
                both = [r["cases"][i] for r in ranks]
                i += 1
                chosen = both[0]["chosen"]
                taken = max(c["seconds"] for c in both)
                copied = streamed if chosen == "rank-local" else streamed / SIZE
                gather = 0.0 if chosen == "rank-local" else streamed / (link * bus)
                bound = max(compute, copied / bus, gather)
                over[ratio, name, transfer], times[ratio, name, transfer] = taken / bound, taken
                shown = transfer if transfer == chosen else f"{transfer}: {chosen}"
                table.rows.append(
                    [
                        shown,
                        f"{taken * 1e3:.2f}",
                        f"{bound * 1e3:.2f}",
                        f"{taken / bound:.3f}",
                        mb(max(c["copied"] for c in both)),
                        yes(all(c["same"] for c in both)),
                        str(sum(c["races"] for c in both)),
                    ]
                )
            tables.append(
                (f"Copy/compute {ratio:g} (bus {bus / 1e9:.2f} GB/s), {name} ({link * bus / 1e9:.2f} GB/s)", table)
            )
    best = {(r, n): min(times[r, n, t] for t in TRANSFERS[:2]) for r, n, _ in times}
    share = max(c["copied"] for r in ranks for c in r["cases"] if c["chosen"] == "allgather") / (streamed / SIZE)
    gates = [
        Gate("time of a forward over the bound, the worst case", max(over.values()), LIMIT),
        Gate(
            '"auto" over the faster of the two transfers, the worst case',
            max(times[r, n, "auto"] / best[r, n] for r, n in best),
            1.02,
        ),
        Gate("bytes that a rank copies when gathering, over its share of the weights", share, 1.01),
        Gate("wrong or different results", sum(not c["same"] for r in ranks for c in r["cases"]), 0),
        Gate(
            "cases in which not every pass was used by every rank", sum(not c["shared"] for c in ranks[0]["cases"]), 0
        ),
        Gate("races", sum(c["races"] for r in ranks for c in r["cases"]), 0),
    ]
    text = [
        f"{SIZE} ranks, each with an accelerator and a bus of its own; {subject_of(quick)[0].name} of "
        f"{mb(first['blocks'][0])} MB, all of them streamed; each rank computes a request of its own. The bus is "
        f"chosen so that one rank's copying of all blocks takes 1 and 2 times as long as computing a forward "
        f"({compute * 1e3:.2f} ms, measured with the model resident). The fast link gathers at 4 times the bus, the "
        "slow one at half of it; a gather of a block takes the block's bytes over the link.",
        "The bound is max(compute, copied bytes / bus, gathered bytes / link): copies, gathers and computing go on at "
        "the same time, and the slowest sets the pace. Rank-local copies all bytes of the blocks on every rank; "
        f"allgather 1/{SIZE} of them, and gathers all. Where the bus keeps up with computing, both are as fast as a "
        "resident model and gathering wins nothing but host bandwidth; where it does not, gathering wins if the link "
        'is faster than the bus, and loses if it is slower. "auto" measures copies and a gather when the offload is '
        "enabled, and takes what is faster.",
        f"Cost model: {COST if not quick else subject_of(True)[1]}.",
    ]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        colours = {"rank-local": INK["others"], "allgather": INK["Greenroom"], "auto": INK["head first"]}
        places = [(r, n) for r in RATIOS for n in LINKS]
        for j, transfer in enumerate(TRANSFERS):
            values = [times[r, n, transfer] * 1e3 for r, n in places]
            at = [k + (j - 1) * 0.27 for k in range(len(places))]
            axes.bar(at, values, 0.25, color=colours[transfer], label=transfer)
            for x, value in zip(at, values, strict=True):
                axes.annotate(f"{value:.1f}", (x, value), ha="center", va="bottom", fontsize=7)
        axes.axhline(compute * 1e3, color="black", linewidth=1, linestyle="--")
        axes.set_xticks(range(len(places)), [f"copy/compute {r:g},\n{n}" for r, n in places])
        axes.set_ylabel("ms a forward (virtual clock);\ndashed: computing alone")
        axes.legend(frameon=False)
        tidy(axes)

    return Result(
        "distributed",
        "Ranks that share weights",
        "virtual",
        "python benchmarks/distributed.py",
        text,
        tables,
        gates,
        draw,
        figures={"over": over, "times": times, "ranks": ranks},
    )


def _launch(quick: bool, timeout: float = 900) -> list[Any]:
    """The figures of each rank.

    Raises:
        RuntimeError: a rank failed; with what it printed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(SIZE):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(SIZE),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                "RESULT": f"{folder}/{rank}.json",
            }
            command = [sys.executable, __file__, "--rank", *(["--quick"] if quick else [])]
            processes.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
        try:
            outputs = [p.communicate(timeout=timeout)[0] for p in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(p.returncode for p in processes):
            raise RuntimeError("\n".join(outputs))
        return [json.loads(Path(f"{folder}/{rank}.json").read_text()) for rank in range(SIZE)]


if __name__ == "__main__":
    if "--rank" in sys.argv:
        rank_main("--quick" in sys.argv)
    else:
        main(run)
