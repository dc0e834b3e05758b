"""Ranks that share the weights, behind one queue: partial waves, requests of any shape, and deaths."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from served import BODY, PROMPT, Faults, Served, alive, drawn, serving, shared_memory, until

from greenroom.demo import checkpoint_path
from greenroom.engine import OmniRanks
from greenroom.serving import ServerSettings

STREAMED = 4_687_872
"""Bytes of the demo's streamed blocks."""


def start(transfer: str, ranks: int = 2) -> OmniRanks:
    return OmniRanks(
        checkpoint_path(),
        data_parallel_size=ranks,
        device="emu",
        rank_timeout=20,
        diffusion_offload_config={
            "mode": "layer",
            "components": ["dit"],
            "layer_options": {"dit": {"weight_transfer": transfer}},
        },
    )


@pytest.fixture(scope="module", params=["allgather", pytest.param("rank-local", marks=pytest.mark.slow)])
def served(request: Any, emu_module: Any, faults: Faults) -> Iterator[Served]:
    before = shared_memory()
    omni = start(request.param)
    with serving(omni, ServerSettings(shutdown_timeout=10, request_timeout=60)) as found:
        yield found
        pids = found.pids()
    assert not any(alive(pid) for pid in pids)
    assert shared_memory() <= before


@pytest.fixture
def gathers(served: Served) -> bool:
    assert served.omni.config is not None
    return served.omni.config.options_of("dit").weight_transfer == "allgather"


@pytest.fixture(autouse=True)
def _whole(served: Served, faults: Faults) -> None:
    faults.clear()
    if not served.omni.status.alive:
        served.omni.restart()
    assert served.omni.status.alive


def test_partial_waves_and_unlike_requests_never_wait_for_each_other(served: Served, expected: Any) -> None:
    assert np.array_equal(drawn(served.post().answer), expected(7))  # one rank has nothing to do
    posts = [
        served.post(),
        served.post(num_inference_steps=9),
        served.post(prompt="a handwritten two", num_inference_steps=1),
        served.post(num_inference_steps=None),
        served.post(num_inference_steps=5, n=2),
        served.post(true_cfg_scale=3.0, negative_prompt="a handwritten one"),
        served.post(prompt=""),
        served.post(seed=8),
    ]
    answers = [p.answer for p in posts]
    assert [a.status_code for a in answers] == [200] * 6 + [400, 200]
    assert np.array_equal(drawn(answers[0]), expected(7)) and np.array_equal(drawn(answers[7]), expected(8))


def test_gathering_ranks_copy_their_share(served: Served, gathers: bool) -> None:
    result = served.omni.generate(PROMPT, {"seed": 7, "num_inference_steps": 8})[0]
    share = STREAMED // (2 if gathers else 1)
    assert 7 * share < result.metrics.bytes_to_device <= 9.5 * share


def test_sleep_wake_and_cancellation_reach_all(served: Served, faults: Faults, expected: Any) -> None:
    served.omni.sleep()
    assert served.omni.status.asleep and all(f.allocated < 300_000 for f in served.omni.figures())
    served.omni.wake()
    for rank in (0, 1):
        faults.plant(rank, "slow 0.02")
    with served.client() as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/images/generations", json={**BODY, "num_inference_steps": 200}, timeout=0.5)
    until(lambda: served.omni.status.running is None)
    faults.clear()
    assert np.array_equal(drawn(served.post().answer), expected(7))


def test_an_exception_in_a_block_of_one_rank_harms_nobody_else(served: Served, faults: Faults, expected: Any) -> None:
    faults.plant(0, "slow 0.02")
    faults.plant(1, "slow 0.02")
    posts = [served.post(seed=8), served.post(seed=8)]
    served.wait_for(2)
    faults.plant(1, "raise")
    answers = [p.answer for p in posts]
    assert sorted(a.status_code for a in answers) == [200, 500]
    assert np.array_equal(drawn(next(a for a in answers if a.status_code == 200)), expected(8))
    faults.clear()
    # No answer of the failed one is left to be taken for that of a later request.
    for post in [served.post() for _ in range(3)]:
        assert np.array_equal(drawn(post.answer), expected(7))
    assert served.omni.status.alive


@pytest.mark.parametrize(
    "busy", [pytest.param(False, id="idle", marks=pytest.mark.slow), pytest.param(True, id="busy")]
)
def test_a_killed_rank_ends_what_depends_on_it_and_nothing_else(
    served: Served, faults: Faults, expected: Any, gathers: bool, busy: bool
) -> None:
    posts = []
    if busy:
        faults.plant(0, "slow 0.05")
        faults.plant(1, "slow 0.05")
        posts = [served.post(seed=8), served.post(seed=8)]
        served.wait_for(2)
    os.kill(served.pids()[1], signal.SIGKILL)
    until(lambda: not served.omni.status.ranks[1].alive)
    faults.clear()
    statuses = sorted(p.answer.status_code for p in posts)
    if busy:
        assert statuses == ([503, 503] if gathers else [200, 503])
    with served.client() as client:
        assert client.get("/health").status_code == 503
    if gathers:
        until(lambda: not any(r.alive for r in served.omni.status.ranks))
        assert served.post().answer.status_code == 503
    else:
        assert np.array_equal(drawn(served.post().answer), expected(7))
    with served.client() as client:
        assert client.post("/v1/restart").json() == {"status": "ok"}
    for post in [served.post() for _ in range(3)]:
        assert np.array_equal(drawn(post.answer), expected(7))


@pytest.mark.slow
def test_a_stopped_rank_is_given_up(served: Served, gathers: bool) -> None:
    pids = served.pids()
    os.kill(pids[1], signal.SIGSTOP)
    posts = [served.post(), served.post()]
    assert [p.answer.status_code for p in posts].count(503) >= 1
    until(lambda: not alive(pids[1]))
    if gathers:
        until(lambda: not alive(pids[0]))
