"""The same comparison on a real accelerator: resident, Greenroom at several resident shares, diffusers.

    python benchmarks/on_gpu.py [--device cuda] [--blocks 30 --width 1536 --side 64] [--dtype bfloat16]

Needs torch and Greenroom; measures diffusers' group offload too where diffusers is installed. `--device emu` runs the
same lines on the emulated accelerator's real clock, to try the script out.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from typing import Any

import torch

from bench import offloaders as o
from bench.report import Table, mb, yes
from bench.subjects import Subject, nbytes, plain, quieten, wan
from greenroom.accelerator import Accelerator
from greenroom.errors import OffloadError

SHARES = (0.0, 0.25, 0.5, 0.75)


def has_diffusers() -> bool:
    try:
        import diffusers  # noqa: F401
    except ImportError:
        return False
    return True


def bandwidth(accelerator: Accelerator, nbytes: int = 1 << 28) -> float:
    """Measured bytes per second of one large copy from pinned memory; 0 on the CPU."""
    if accelerator.is_cpu:
        return 0.0
    host, device = accelerator.host_buffer(nbytes, pin=True), accelerator.empty(nbytes)
    seconds = []
    for _ in range(4):
        accelerator.synchronize()
        began = time.perf_counter()
        device.copy_(host, non_blocking=True)
        accelerator.synchronize()
        seconds.append(time.perf_counter() - began)
    return nbytes / min(seconds)


def measure(
    subject: Subject, offloader: o.Offloader, accelerator: Accelerator, forwards: int
) -> tuple[float, int, torch.Tensor]:
    """Seconds a forward (best of three rounds), peak bytes, and the last latent."""
    device = accelerator.device
    extras = {k: v.to(device) for k, v in subject.extras.items()}
    seconds = []
    with offloader(subject, device) as running, torch.inference_mode():
        for round_ in range(4):
            latent = subject.latent.to(device)
            accelerator.synchronize()
            accelerator.reset_peak()
            began = time.perf_counter()
            for _ in range(forwards):
                latent = subject.step(running.model, latent, extras)
            accelerator.synchronize()
            if round_:  # the first one warms up
                seconds.append((time.perf_counter() - began) / forwards)
        peak, result = accelerator.peak(), latent.cpu()
        del running
    gc.collect()
    accelerator.empty_cache()
    return min(seconds), peak, result


def run(accelerator: Accelerator, subject: Subject, forwards: int) -> tuple[Table, bool]:
    """The table, and whether all outputs were equal."""
    count, weights = len(subject.blocks()), sum(subject.block_bytes())
    link = bandwidth(accelerator)
    cases: dict[str, tuple[o.Offloader, int]] = {"resident": (o.resident, 0)}  # and how many blocks are streamed
    for share in SHARES:
        stay = round(count * share)
        cases[f"Greenroom, {stay} of {count} blocks resident"] = (o.greenroom_layerwise(stay), count - stay)
    if has_diffusers() and hasattr(subject.template, "enable_group_offload") and not accelerator.is_cpu:
        cases["diffusers group, block, stream"] = (o.group_offload("block_level", stream=True), count)
        cases["diffusers group, block, stream, record_stream"] = (
            o.group_offload("block_level", stream=True, record=True),
            count,
        )
        cases["diffusers group, leaf, stream, record_stream"] = (
            o.group_offload("leaf_level", stream=True, record=True),
            count,
        )
    table = Table(["offloader", "ms a forward", "over resident", "over bound", "peak, MB", "same bits"])
    base, reference, equal = 0.0, None, True
    for name, (offloader, streamed) in cases.items():
        seconds, peak, latent = measure(subject, offloader, accelerator, forwards)
        if reference is None:
            base, reference = seconds, latent
        same = torch.equal(latent, reference)
        equal = equal and same
        bound = max(base, streamed / count * weights / link) if link else base
        table.rows.append(
            [
                name,
                f"{seconds * 1e3:.1f}",
                f"{seconds / base:.3f}",
                f"{seconds / bound:.3f}",
                mb(peak),
                yes(same),
            ]
        )
        print(" | ".join(table.rows[-1]), flush=True)
    ratio = weights / link / base if link else 0.0
    print(f"\nlink {link / 1e9:.1f} GB/s, copy/compute {ratio:.2f} with everything streamed (real)\n")
    return table, equal


def build(arguments: argparse.Namespace) -> Subject:
    dtype: Any = getattr(torch, arguments.dtype)
    if has_diffusers() and not arguments.plain:
        return wan(arguments.blocks, arguments.width, arguments.side, dtype, tokens=arguments.text)
    return plain(arguments.blocks, arguments.width, arguments.side**2, dtype)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cuda, xpu, npu, emu or cpu; by default the accelerator that is present")
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--width", type=int, default=1536, help="a multiple of 64")
    parser.add_argument("--side", type=int, default=64, help="side x side tokens")
    parser.add_argument("--text", type=int, default=512, help="text tokens")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--forwards", type=int, default=5)
    parser.add_argument("--plain", action="store_true", help="a DiT of torch alone, also where diffusers is installed")
    arguments = parser.parse_args(argv)
    if arguments.device == "emu":
        import greenroom.emulator  # noqa: F401
    try:
        accelerator = Accelerator.of(arguments.device)
    except OffloadError as error:
        print(
            f"on_gpu.py: nothing to measure on with torch {torch.__version__}: {error}. To try the script out: "
            "--device emu --blocks 4 --width 128 --side 4 --text 16 --dtype float32"
        )
        return 2
    quieten()
    subject = build(arguments)
    name = str(accelerator.device)
    if accelerator.device.type == "cuda":
        name += f" ({torch.cuda.get_device_name(accelerator.device)})"
    size = nbytes(subject.template) / 1e9
    print(f"{subject.name}, {size:.2f} GB, {arguments.dtype}, on {name}; torch {torch.__version__}\n")
    table, equal = run(accelerator, subject, arguments.forwards)
    print(table.markdown())
    if not equal:
        print("\noutputs differ")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
