"""Faults for ranks of a server, planted from outside: imported by each rank because this folder is on PYTHONPATH.

A transformer block looks for a file `<FAULTS>/<rank>` before it computes, and does what the file says:
"raise", "slow <seconds>", "hang", "exit <status>" or "kill". The file is taken away first, except for "slow".
"""

import os
import sys
from pathlib import Path


def _plant(folder: Path, rank: str) -> None:
    import signal
    import time

    from diffusers.models.transformers.transformer_flux import FluxTransformerBlock

    original = FluxTransformerBlock.forward
    file = folder / rank

    def forward(self, *args, **kwargs):
        try:
            word, _, value = file.read_text().partition(" ")
        except OSError:
            word, value = "", ""
        if word and word != "slow":
            file.unlink()
        if word == "raise":
            raise RuntimeError("a planted fault")
        if word == "slow":
            time.sleep(float(value))
        if word == "hang":
            time.sleep(3600)
        if word == "exit":
            os._exit(int(value))
        if word == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *args, **kwargs)

    FluxTransformerBlock.forward = forward


# Only in ranks: `multiprocessing` and compilers start Pythons too.
if "FAULTS" in os.environ and "RANK" in os.environ and "multiprocessing" not in " ".join(sys.argv):
    _plant(Path(os.environ["FAULTS"]), os.environ["RANK"])
