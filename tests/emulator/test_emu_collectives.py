"""torch.distributed on emu tensors: two ranks over gloo, each with its own device."""

from pathlib import Path

import launch


def test_two_ranks(emu, tmp_path):
    launch.run(Path(__file__).with_name("gloo_rank.py"), 2, folder=tmp_path)
