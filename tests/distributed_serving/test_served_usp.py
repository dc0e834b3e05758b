"""Ranks that compute each request together: the same bits with and without offloading, and nobody waits for ever."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from served import BODY, PROMPT, ROUTE, Faults, Served, alive, drawn, serving, shared_memory, until

from greenroom import ConfigError, NotSupportedError, Omni
from greenroom.demo import checkpoint_path
from greenroom.engine import OmniRanks, Request, RequestRefused
from greenroom.engine.sampling import OmniDiffusionSamplingParams
from greenroom.errors import GreenroomError
from greenroom.serving import ServerSettings

pytestmark = pytest.mark.slow
STEPS = {"seed": 7, "num_inference_steps": 3}
WAYS: dict[str, dict[str, Any]] = {
    "layer": {"enable_layerwise_offload": True},
    "allgather": {"enable_distributed_layerwise_offload": True},
}


def start(**words: Any) -> OmniRanks:
    return OmniRanks(checkpoint_path(), device="emu", rank_timeout=8, **{"usp": 2, **words})


@pytest.fixture(scope="module")
def together(emu_module: Any) -> Any:
    """Pictures of two ranks together, nothing offloaded."""
    with start() as omni:
        return [np.asarray(omni.generate(PROMPT, {**STEPS, "seed": seed})[0].images[0]) for seed in (7, 8)]


@pytest.fixture(scope="module", params=WAYS)
def served(request: Any, together: Any, faults: Faults) -> Iterator[Served]:
    before = shared_memory()
    with serving(start(**WAYS[request.param]), ServerSettings(shutdown_timeout=10, request_timeout=60)) as found:
        yield found
        pids = found.pids()
    assert not any(alive(pid) for pid in pids) and shared_memory() <= before


@pytest.fixture(autouse=True)
def _whole(request: Any, faults: Faults) -> None:
    faults.clear()
    if "served" in request.fixturenames:
        served = request.getfixturevalue("served")
        if not served.omni.status.alive:
            served.omni.restart()


def test_all_ranks_serve_each_request_with_the_same_bits(served: Served, together: Any, expected: Any) -> None:
    before = [f.served for f in served.omni.figures()]
    posts = [served.post(seed=seed) for seed in (7, 8, 7)]
    for post, seed in zip(posts, (7, 8, 7), strict=True):
        assert np.array_equal(drawn(post.answer), together[seed - 7])
    assert [f.served for f in served.omni.figures()] == [b + 3 for b in before]
    # Sums in another order; the picture is that of one rank all the same.
    assert np.abs(together[0].astype(int) - expected(7)).max() <= 8


def test_without_a_seed_the_ranks_draw_the_same_noise(served: Served) -> None:
    first = served.omni.generate(PROMPT, {"num_inference_steps": 3})[0]
    again = served.omni.generate(PROMPT, {"num_inference_steps": 3, "seed": first.seed})[0]
    assert np.array_equal(np.asarray(first.images[0]), np.asarray(again.images[0]))


def test_they_stop_together(served: Served, together: Any, faults: Faults) -> None:
    for delays in (("0.02", "0.02"), ("0.002", "0.03")):
        for rank, delay in enumerate(delays):
            faults.plant(rank, f"slow {delay}")
        params = OmniDiffusionSamplingParams(num_inference_steps=200)
        for wait in (0.0, 0.003, 0.02, 0.05, 0.1, 0.15, 0.2, 0.37):
            job = served.omni.submit(Request({"prompt": PROMPT}, params))
            time.sleep(wait)
            job.cancel()
            with pytest.raises(GreenroomError, match="cancelled"):
                job.future.result(30)
    with pytest.raises(RequestRefused, match="num_steps"):
        served.omni.generate(PROMPT, {"num_steps": 3})
    faults.clear()
    until(lambda: served.omni.status.running is None)
    assert np.array_equal(drawn(served.post().answer), together[0])
    assert served.omni.status.alive


@pytest.mark.parametrize("word", ["raise", "kill"])
def test_a_rank_that_fails_leaves_no_other_waiting(served: Served, together: Any, faults: Faults, word: str) -> None:
    faults.plant(1, word)
    answer = served.post().answer
    assert answer.status_code in (500, 503)
    until(lambda: not any(r.alive for r in served.omni.status.ranks))
    with served.client() as client:
        assert client.get("/health").status_code == 503
        assert client.post("/v1/restart").json() == {"status": "ok"}
        assert np.array_equal(drawn(client.post(ROUTE, json=BODY)), together[0])


def test_two_times_two(together: Any) -> None:
    with start(data_parallel_size=2, enable_distributed_layerwise_offload=True) as omni:
        results = omni.generate([PROMPT] * 6, STEPS)
        assert all(np.array_equal(np.asarray(r.images[0]), together[0]) for r in results)
        served = [f.served for f in omni.figures()]
        assert served[0] == served[1] and served[2] == served[3] and sum(served) == 12


def test_what_cannot_be_split_is_refused_by_name(checkpoints: Any) -> None:
    with pytest.raises(ConfigError, match="usp"):
        Omni(checkpoint_path(), device="emu", usp=2)  # one process
    with pytest.raises(ConfigError, match="usp"):
        OmniRanks(checkpoint_path(), device="emu", usp=0)
    with pytest.raises(NotSupportedError, match="StableDiffusion3Pipeline"):
        OmniRanks(checkpoints["sd3"], device="emu", usp=2)
