"""A rank as a user writes it: nothing is ended by hand, and the process ends right after its last use of the ranks."""

from __future__ import annotations

import os
import sys

import torch.distributed as dist
import toys

import greenroom
import greenroom.emulator

device = f"emu:{os.environ['RANK']}"
dist.init_process_group("cpu:gloo,emu:emu_gloo")
pipe = toys.Pipeline()
words = {"mode": "layer", "layer_options": {"dit": {"weight_transfer": "allgather"}}}
handle = greenroom.offload(pipe, words, device=device)
pipe(device)
if sys.argv[1] == "disabled":
    handle.disable()
