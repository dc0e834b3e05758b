"""Processes of ranks: nothing of them stays, however the front or torchrun ends."""

from __future__ import annotations

import time
from typing import Any

import pytest
from served import PROMPT, alive, shared_memory

from greenroom.demo import checkpoint_path
from greenroom.engine import OmniRanks, WorkerDied

GATHER = {"enable_distributed_layerwise_offload": True}


@pytest.mark.slow
def test_ranks_start_and_stop_in_a_row_without_leaving_anything(emu: Any) -> None:
    before = shared_memory()
    for _ in range(2):
        omni = OmniRanks(checkpoint_path(), data_parallel_size=2, device="emu", **GATHER)
        pids = [link.process.pid for link in omni._links if link.process is not None]
        job = omni.generate(PROMPT, {"seed": 7, "num_inference_steps": 1})
        assert len(job) == 1
        began = time.monotonic()
        assert omni.shutdown(timeout_s=20) and time.monotonic() - began < 15
        assert not any(alive(pid) for pid in pids) and shared_memory() <= before
        with pytest.raises(WorkerDied):
            omni.generate(PROMPT)
