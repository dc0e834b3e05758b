"""Videos from ranks: made by whichever is free, fetched from the one front."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import numpy as np
import pytest
from PIL import Image
from served import Faults, serving, until

from greenroom import Omni, OmniRanks

pytestmark = pytest.mark.slow
WORDS = {"height": 32, "width": 32, "num_frames": 9, "num_inference_steps": 3}


def test_videos_of_all_ranks_are_fetched_from_the_front(emu: Any, faults: Faults, checkpoints: Any) -> None:
    with Omni(checkpoints["wan22_t2v"], device="emu") as omni:
        result = omni.generate("a red cube rolls", {**WORDS, "seed": 7}, progress=False)[0]
    expected = np.stack([np.asarray(frame) for frame in result.frames])
    words = {"device": "emu", "enable_distributed_layerwise_offload": True, "max_queue": 4}
    ranks = OmniRanks(checkpoints["wan22_t2v"], data_parallel_size=2, **words)
    with serving(ranks) as served, served.client() as client:
        body = {"prompt": "a red cube rolls", "seed": 7, "size": "32x32", "num_frames": 9, "num_inference_steps": 3}
        ids = []
        for _ in range(3):
            answer = client.post("/v1/videos", json=body)
            assert answer.status_code == 200, answer.text
            ids.append(answer.json()["id"])
        until(lambda: all(client.get(f"/v1/videos/{i}").json()["status"] == "completed" for i in ids), 60)
        for i in ids:
            archive = zipfile.ZipFile(io.BytesIO(client.get(f"/v1/videos/{i}/content?variant=frames").content))
            frames = np.stack([np.asarray(Image.open(archive.open(name))) for name in sorted(archive.namelist())])
            assert np.array_equal(frames, expected)
        assert all(f.served for f in ranks.figures())
