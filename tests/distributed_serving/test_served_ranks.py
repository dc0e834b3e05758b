"""Ranks behind one queue: who serves, who dies, and what the others make of it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from served import BODY, PROMPT, ROUTE, Faults, Served, alive, drawn, serving, shared_memory, until

from greenroom import ConfigError, OffloadError, Omni
from greenroom.demo import checkpoint_path
from greenroom.engine import OmniRanks, QueueFull, Request, RequestRefused, WorkerDied
from greenroom.engine.sampling import OmniDiffusionSamplingParams
from greenroom.errors import GreenroomError
from greenroom.serving import ServerSettings

SMALL = 300_000
"""Bytes: less than any component of the demo has."""
LAYER = {"diffusion_offload_config": {"mode": "layer", "components": ["dit", "text_encoder"]}}


@pytest.fixture(scope="module")
def served(emu_module: Any, faults: Faults) -> Iterator[Served]:
    before = shared_memory()
    omni = OmniRanks(
        checkpoint_path(), data_parallel_size=2, device="emu", max_queue=8, rank_timeout=5, memory_budget="6MiB"
    )
    with serving(omni, ServerSettings(shutdown_timeout=10, request_timeout=30)) as found:
        yield found
        pids = found.pids()
    assert not any(alive(pid) for pid in pids)
    assert shared_memory() <= before


@pytest.fixture(autouse=True)
def _whole(served: Served, faults: Faults) -> Iterator[None]:
    """Each test finds two living ranks."""
    faults.clear()
    if not served.omni.status.alive:
        served.omni.restart()
    if served.omni.status.asleep:
        served.omni.wake()
    assert [r.alive for r in served.omni.status.ranks] == [True, True]
    yield


def health(served: Served) -> httpx.Response:
    with served.client() as client:
        return client.get("/health")


def test_each_request_goes_to_a_free_rank_and_the_bits_are_the_same(served: Served, expected: Any) -> None:
    before = [f.served for f in served.omni.figures()]
    posts = [served.post(seed=seed, num_inference_steps=3) for seed in (7, 8, 7, 9)]
    for post, seed in zip(posts, (7, 8, 7, 9), strict=True):
        assert np.array_equal(drawn(post.answer), expected(seed))
    after = [f.served for f in served.omni.figures()]
    assert sum(after) - sum(before) == 4 and all(a > b for a, b in zip(after, before, strict=True))


def test_python_callers_get_results_in_the_order_of_their_prompts(served: Served, expected: Any) -> None:
    results = served.omni.generate([PROMPT, "a handwritten two", PROMPT], {"seed": 7, "num_inference_steps": 3})
    assert [r.prompt for r in results] == [PROMPT, "a handwritten two", PROMPT]
    for place in (0, 2):
        assert np.array_equal(np.asarray(results[place].images[0]), expected(7))
    assert all(r.metrics.total_s > 0 and r.metrics.queue_s >= 0 for r in results)


def test_tensors_come_back_in_host_memory(served: Served) -> None:
    result = served.omni.generate(PROMPT, {"seed": 7, "num_inference_steps": 1, "output_type": "pt"})[0]
    assert result.images.device.type == "cpu" and result.images.shape[-2:] == (32, 32)


def test_progress_and_cancellation_cross_the_processes(served: Served, faults: Faults) -> None:
    faults.plant(0, "slow 0.02")
    faults.plant(1, "slow 0.02")
    with served.client() as client:
        with client.stream("POST", ROUTE, json={**BODY, "num_inference_steps": 200, "stream": True}) as answer:
            steps = 0
            for line in answer.iter_lines():
                steps += '"phase": "denoise"' in line
                if steps == 3:
                    break
        until(lambda: served.omni.status.running is None)
        with pytest.raises(httpx.ReadTimeout):
            client.post(ROUTE, json={**BODY, "num_inference_steps": 200}, timeout=0.5)
        until(lambda: served.omni.status.running is None)


def test_a_time_limit_counts_from_the_arrival(served: Served, faults: Faults) -> None:
    faults.plant(0, "slow 0.05")
    faults.plant(1, "slow 0.05")
    params = OmniDiffusionSamplingParams(num_inference_steps=200)
    jobs = [served.omni.submit(Request({"prompt": PROMPT}, params, timeout_s=0.5)) for _ in range(3)]
    for job in jobs:
        with pytest.raises(GreenroomError, match=r"longer than 0\.5 s"):
            job.future.result(30)


def test_what_is_refused_is_refused_by_name_and_harms_nobody(served: Served, expected: Any) -> None:
    with served.client() as client:
        for change, field in (
            ({"prompt": ""}, "prompt"),
            ({"size": "33x32"}, "size"),
            ({"num_frames": 3}, "num_frames"),
            ({"no_such_word": 1}, "no_such_word"),
        ):
            answer = client.post(ROUTE, json={**BODY, **change})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == field, answer.text
    with pytest.raises(RequestRefused, match="num_steps"):
        served.omni.generate(PROMPT, {"num_steps": 3})
    assert np.array_equal(drawn(served.post().answer), expected(7))


def test_the_queue_is_one_and_bounded(served: Served, faults: Faults) -> None:
    faults.plant(0, "slow 0.05")
    faults.plant(1, "slow 0.05")
    long = Request({"prompt": PROMPT}, OmniDiffusionSamplingParams(num_inference_steps=200))
    running = [served.omni.submit(Request(long.inputs, long.params)) for _ in range(2)]
    served.wait_for(2)
    waiting = [served.omni.submit(Request(long.inputs, long.params)) for _ in range(8)]
    with pytest.raises(QueueFull):
        served.omni.submit(long)
    assert served.omni.status.waiting == 8
    for job in [*waiting, *running]:
        job.cancel()
    served.omni.cancel_swept()
    for job in [*waiting, *running]:
        with pytest.raises(GreenroomError, match="cancelled"):
            job.future.result(30)
    assert served.omni.status.waiting == 0


def test_operators_see_and_steer_every_rank(served: Served, expected: Any) -> None:
    with served.client() as client:
        body = client.get("/health").json()
        assert [r["alive"] for r in body["ranks"]] == [True, True] and body["status"] == "ok"
        offload = client.get("/v1/offload").json()
        assert [r["device"] for r in offload["ranks"]] == ["emu:0", "emu:1"]
        assert all(r["report"]["pinned"] > 0 for r in offload["ranks"])
        for rank in (0, 1):
            assert client.get("/v1/offload/live", params={"rank": rank}).json()["device"] == f"emu:{rank}"
        assert client.get("/v1/offload/live", params={"rank": 2}).status_code == 404

        changed = client.post("/v1/offload/memory", json={"memory_budget": "5MiB"})
        assert changed.status_code == 200, changed.text
        budgets = [r["report"]["budget"] for r in client.get("/v1/offload").json()["ranks"]]
        assert budgets == [5 * 2**20] * 2
        refused = client.post("/v1/offload/memory", json={"memory_budget": "100kiB"})
        assert refused.status_code == 400, refused.text
        budgets = [r["report"]["budget"] for r in client.get("/v1/offload").json()["ranks"]]
        assert budgets == [5 * 2**20] * 2

        assert client.post("/v1/sleep").status_code == 200
        # A call's smallest leftovers may wait for the garbage collector; no weight may.
        assert all(f.allocated < SMALL for f in served.omni.figures())
        waiting = served.post()
        until(lambda: served.omni.status.waiting == 1)
        assert client.get("/health").json()["status"] == "asleep"
        assert client.post("/v1/wake").status_code == 200
        assert np.array_equal(drawn(waiting.answer), expected(7))

        lines = client.get("/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    for rank in (0, 1):
        assert float(values[f'greenroom_rank_alive{{rank="{rank}"}}']) == 1
        assert float(values[f'greenroom_pinned_bytes{{rank="{rank}"}}']) > 0
        assert float(values[f'greenroom_device_allocated_bytes{{rank="{rank}"}}']) > 0
    assert sum(float(values[f'greenroom_rank_requests_total{{rank="{r}"}}']) for r in (0, 1)) >= 1


def test_an_exception_in_a_block_fails_its_request_alone(served: Served, faults: Faults, expected: Any) -> None:
    for rank in (0, 1):
        faults.plant(rank, "raise")
    answer = served.post().answer
    assert answer.status_code == 500 and "a planted fault" in answer.text
    faults.clear()
    posts = [served.post() for _ in range(4)]
    assert all(np.array_equal(drawn(p.answer), expected(7)) for p in posts)
    assert health(served).status_code == 200


@pytest.mark.slow
def test_a_rank_that_is_killed_while_idle_turns_health_red_and_can_be_replaced(served: Served, expected: Any) -> None:
    pids = served.pids()
    os.kill(pids[1], signal.SIGKILL)
    until(lambda: health(served).status_code == 503)
    body = health(served).json()
    assert body["status"] == "degraded" and "killed by signal 9" in body["ranks"][1]["cause"]
    assert np.array_equal(drawn(served.post().answer), expected(7))  # the other serves on
    with served.client() as client:
        assert client.post("/v1/restart").json() == {"status": "ok"}
    assert health(served).status_code == 200
    assert served.pids()[0] == pids[0] and served.pids()[1] != pids[1]
    posts = [served.post() for _ in range(3)]
    assert all(np.array_equal(drawn(p.answer), expected(7)) for p in posts)


@pytest.mark.slow
def test_a_rank_that_dies_asleep_comes_back_asleep_with_the_budget_in_force(served: Served, expected: Any) -> None:
    served.omni.set_memory("5MiB")
    served.omni.sleep()
    os.kill(served.pids()[1], signal.SIGKILL)
    until(lambda: not served.omni.status.alive)
    with served.client() as client:
        assert client.post("/v1/restart").json() == {"status": "ok"}
        assert client.get("/health").json()["status"] == "asleep"
        assert all(f.allocated < SMALL for f in served.omni.figures())
        assert client.post("/v1/wake").status_code == 200
    assert [f.report.budget for f in served.omni.figures() if f.report is not None] == [5 * 2**20] * 2
    posts = [served.post() for _ in range(3)]
    assert all(np.array_equal(drawn(p.answer), expected(7)) for p in posts)


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_serves_fails_its_request_alone(
    served: Served, faults: Faults, expected: Any
) -> None:
    faults.plant(0, "slow 0.1")
    faults.plant(1, "slow 0.1")
    posts = {}
    for _ in (0, 1):
        posts[len(posts)] = served.post(seed=8)
        until(lambda: sum(r.running is not None for r in served.omni.status.ranks) == len(posts))
    os.kill(served.pids()[0], signal.SIGKILL)
    until(lambda: not served.omni.status.ranks[0].alive)
    faults.clear()
    answers = [p.answer for p in posts.values()]
    assert sorted(a.status_code for a in answers) == [200, 503]
    failed = next(a for a in answers if a.status_code == 503)
    assert failed.json()["error"]["code"] == "worker_dead" and "rank 0" in failed.text
    assert np.array_equal(drawn(next(a for a in answers if a.status_code == 200)), expected(8))


@pytest.mark.slow
def test_a_rank_that_stops_answering_is_given_up(served: Served) -> None:
    pid = served.pids()[1]
    os.kill(pid, signal.SIGSTOP)
    until(lambda: not served.omni.status.ranks[1].alive, 15)
    assert "no sign of life for 5 s" in str(served.omni.status.cause)
    until(lambda: not alive(pid))


def test_words_are_checked_before_anything_is_started(served: Served) -> None:
    with pytest.raises(ConfigError, match="mode"):
        OmniRanks("nowhere", data_parallel_size=2, diffusion_offload_config={"mode": "layers"}, device="emu")
    with pytest.raises(ConfigError, match="data_parallel_size"):
        OmniRanks("nowhere", data_parallel_size=0, device="emu")
    with pytest.raises(ConfigError, match=r"data_parallel_size.*OmniRanks"):
        Omni("nowhere", data_parallel_size=2, device="emu")
    with pytest.raises(ConfigError, match="rank_timeout"):
        OmniRanks("nowhere", data_parallel_size=2, device="emu", rank_timeout=0)
    with pytest.raises(OffloadError, match="emu:1"):
        OmniRanks("nowhere", data_parallel_size=2, device="emu:1")
    with pytest.raises(ConfigError, match="model"):
        OmniRanks(object(), data_parallel_size=2, device="emu")  # type: ignore[arg-type]


@pytest.mark.slow
def test_ranks_that_cannot_start_say_why_and_leave_nothing(served: Served) -> None:
    threads = threading.active_count()
    with pytest.raises(ConfigError, match="nowhere"):
        OmniRanks("/nowhere", data_parallel_size=2, device="emu", **LAYER)
    until(lambda: threading.active_count() <= threads)


@pytest.mark.slow
def test_a_rank_that_dies_while_it_starts_is_an_error(served: Served) -> None:
    found: list[BaseException] = []
    before = set(_children())

    def begin() -> None:
        try:
            OmniRanks(checkpoint_path(), data_parallel_size=2, device="emu", **LAYER)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=begin)
    thread.start()
    until(lambda: len(set(_children()) - before) == 2)
    started = set(_children()) - before
    os.kill(max(started), signal.SIGKILL)
    thread.join(30)
    assert isinstance(found[0], WorkerDied) and "signal 9" in str(found[0])
    assert not any(alive(pid) for pid in started)


def _children() -> list[int]:
    """Ranks that this process has started."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end meanwhile
            if "greenroom.engine.ranks" in child.cmdline() and alive(child.pid):
                found.append(child.pid)
    return found


@pytest.mark.slow
def test_shutdown_gives_running_requests_up_and_is_quick(emu: Any, faults: Faults) -> None:
    omni = OmniRanks(checkpoint_path(), data_parallel_size=1, device="emu", **LAYER)
    faults.plant(0, "slow 0.05")
    params = OmniDiffusionSamplingParams(num_inference_steps=200)
    jobs = [omni.submit(Request({"prompt": PROMPT}, params)) for _ in range(2)]
    until(lambda: omni.status.running is not None)
    assert omni.shutdown(timeout_s=20)  # by themselves, and none had to be killed
    for job in jobs:
        with pytest.raises(GreenroomError, match="shutting down"):
            job.future.result(0)
    with pytest.raises(WorkerDied):
        omni.submit(Request({"prompt": PROMPT}, params))
    assert omni.status.cause is None and omni.shutdown()
