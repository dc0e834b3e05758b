"""One rank of a job whose first rank is told to load what is not there; prints how each ends."""

import os

import greenroom.emulator  # noqa: F401
from greenroom import Omni
from greenroom.demo import checkpoint_path

rank = int(os.environ["RANK"])
config = {"mode": "layer", "layer_options": {"dit": {"weight_transfer": "allgather"}}}
try:
    Omni("/nowhere" if rank == 0 else checkpoint_path(), device="emu", diffusion_offload_config=config)
except Exception as error:
    print(f"rank {rank} ended with {type(error).__name__}: {error}", flush=True)
