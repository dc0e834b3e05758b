"""torch.distributed on emu tensors: two ranks over gloo, each with its own device."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

SECONDS = 120  # a rank that waits for the other one for ever must not hang the suite


def test_two_ranks(emu):
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(2):
            env = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "RENDEZVOUS": f"file://{folder}/store",
            }
            ranks.append(
                subprocess.Popen(
                    [sys.executable, str(Path(__file__).with_name("gloo_rank.py"))],
                    env=env,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        outputs = []
        try:
            for process in ranks:
                outputs.append(process.communicate(timeout=SECONDS)[0])
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    for process, output in zip(ranks, outputs, strict=True):
        assert process.returncode == 0 and output.rstrip().endswith("done"), output
