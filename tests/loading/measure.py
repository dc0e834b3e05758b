"""What loading takes, measured on a checkpoint of more than 2 GB made for the purpose: anonymous memory and time.

    python tests/loading/measure.py FOLDER     # makes the checkpoint there, once

Each way runs in a process of its own. Anonymous bytes are those that the kernel cannot drop, read from
/proc/self/status a hundred times a second; what the emulated device holds (host memory here, device memory
anywhere else) and what the process held before loading are taken off. The files are in the page cache for all.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WAYS = ("greenroom", "greenroom, converted", "from_pretrained + pin", "read and copy once")


def make(folder: Path) -> None:
    """A Wan pipeline with a DiT of 2.1 GB and a text encoder of 0.4 GB, in bfloat16, in shards."""
    import torch
    from diffusers import WanTransformer3DModel

    from greenroom import testing

    if (folder / "model_index.json").is_file():
        return
    with testing.quiet():
        pipe: Any = testing.build_pipeline("wan22_t2v", dtype=torch.bfloat16)
        pipe.save_pretrained(folder)
        pipe.save_pretrained(tiny(folder))
        torch.set_default_dtype(torch.bfloat16)
        width = pipe.text_encoder.config.d_model
        model: Any = WanTransformer3DModel(
            num_attention_heads=12, attention_head_dim=128, num_layers=24, ffn_dim=8960, in_channels=16,
            out_channels=16, text_dim=width,
        )  # fmt: skip
        model.save_pretrained(folder / "transformer", max_shard_size="700MB")
        model.save_pretrained(folder / "transformer_2", max_shard_size="700MB")
    for name in ("transformer", "transformer_2"):
        (folder / name / "diffusion_pytorch_model.safetensors").unlink(missing_ok=True)


def tiny(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-tiny")


def anonymous() -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


class Peak:
    """The most anonymous bytes since it was made, without the emulated device's."""

    def __init__(self) -> None:
        self.start = anonymous()
        self.most = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def look(self) -> None:
        import torch

        self.most = max(self.most, anonymous() - self.start - torch.accelerator.memory_allocated())

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            self.look()

    def stop(self) -> int:
        self._over.set()
        self._thread.join()
        self.look()
        return self.most


def run(way: str, folder: Path) -> dict[str, Any]:
    """One way of loading; bytes and seconds."""
    import torch

    import greenroom
    import greenroom.emulator
    from greenroom.loading import component_files, load_checkpoint
    from greenroom.loading.quiet import quiet

    torch.empty(1, device="emu")
    files = [f for n in ("transformer", "transformer_2", "text_encoder", "vae") if (f := component_files(folder, n))]
    # The libraries' own imports are nobody's loading time, and nobody's memory.
    load_checkpoint(tiny(folder), dtype="float16")
    kept: Any = None

    def greenroom_way(dtype: Any) -> Callable[[], Any]:
        def load() -> Any:
            pipe = load_checkpoint(folder, dtype=dtype).pipeline
            return pipe, greenroom.offload(pipe, {"mode": "layer", "components": ["dit", "text_encoder"]}, device="emu")

        return load

    def pinned() -> Any:
        from diffusers import DiffusionPipeline

        with quiet():
            pipe: Any = DiffusionPipeline.from_pretrained(folder, dtype=torch.bfloat16)
        for module in pipe.components.values():
            if isinstance(module, torch.nn.Module):
                for tensor in (*module.parameters(), *module.buffers()):
                    tensor.data = tensor.data.pin_memory()
        return pipe

    def copied() -> Any:
        from safetensors.torch import load_file

        held = []
        for part in files:
            for file in part.files:
                tensors = load_file(file)
                slab = torch.empty(sum(t.nbytes for t in tensors.values()), dtype=torch.uint8, pin_memory=True)
                at = 0
                for tensor in tensors.values():
                    slab[at : at + tensor.nbytes].copy_(tensor.reshape(-1).view(torch.uint8))
                    at += tensor.nbytes
                held.append(slab)
        return held

    loaders = {
        "greenroom": greenroom_way(None),
        "greenroom, converted": greenroom_way("float16"),
        "from_pretrained + pin": pinned,
        "read and copy once": copied,
    }
    peak = Peak()
    begun = time.monotonic()
    kept = loaders[way]()
    seconds = time.monotonic() - begun
    most = peak.stop()
    assert kept is not None
    return {"way": way, "weights": sum(f.nbytes for f in files), "peak": most, "seconds": seconds}


def measure(folder: Path, rounds: int = 2) -> list[dict[str, Any]]:
    """All ways, each in a process of its own, after the files were read once: highest peaks, shortest times."""
    folder.mkdir(parents=True, exist_ok=True)
    make(folder)
    for file in folder.rglob("*.safetensors"):
        with open(file, "rb") as stream:
            while stream.read(1 << 24):
                pass
    results: dict[str, dict[str, Any]] = {}
    for way in WAYS * rounds:
        done = subprocess.run(
            [sys.executable, __file__, str(folder), way], capture_output=True, text=True, check=False, timeout=600
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found = json.loads(done.stdout.splitlines()[-1])
        before = results.setdefault(way, found)
        before["peak"] = max(before["peak"], found["peak"])
        before["seconds"] = min(before["seconds"], found["seconds"])
    return list(results.values())


def table(results: list[dict[str, Any]]) -> str:
    weights = results[0]["weights"]
    lines = [f"weights {weights / 1e9:.2f} GB", "| way | peak anonymous / weights | seconds |", "|---|---|---|"]
    lines += [f"| {r['way']} | {r['peak'] / weights:.3f} | {r['seconds']:.2f} |" for r in results]
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        print(json.dumps(run(sys.argv[2], Path(sys.argv[1]))))
    else:
        print(table(measure(Path(sys.argv[1]))))
