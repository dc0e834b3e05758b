"""Many clients at once: right pictures, wrong requests, clients that leave, and the server as quick as ever."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from test_http import ROUTE, drawn

from conftest import STRATEGIES, Live, serving
from greenroom import Omni
from greenroom.demo import checkpoint_path
from greenroom.serving import ServerSettings

MALFORMED: list[dict[str, Any]] = [
    {"prompt": ""},
    {"prompt": "x", "seed": "y"},
    {"seed": 1},
    {"prompt": "x", "oops": 1},
    {"prompt": "x", "size": "big"},
]
OVER: list[dict[str, Any]] = [
    {"prompt": "x", "size": "8192x8192"}, {"prompt": "x", "num_inference_steps": 9999}, {"prompt": "x", "n": 99},
]  # fmt: skip
SEEDS = range(6)


def body(seed: int, **more: Any) -> dict[str, Any]:
    return {"prompt": f"a handwritten {'seven' if seed % 2 else 'two'}", "seed": seed, "num_inference_steps": 2, **more}


def mixed(live: Live, count: int, clients: int, rng: random.Random) -> tuple[Counter[str], list[float]]:
    """Sends `count` requests: a tenth malformed, a tenth over the limits, a tenth given up; counts what came."""
    expected = {}
    with live.client() as client:
        for seed in SEEDS:
            expected[seed] = drawn(client.post(ROUTE, json=body(seed)))
    outcomes: Counter[str] = Counter()
    lock = threading.Lock()
    over = threading.Event()
    health: list[float] = []
    waiting: list[int] = []

    def look() -> None:
        with live.client() as client:
            while not over.wait(0.05):
                begun = time.monotonic()
                answer = client.get("/health")
                health.append(time.monotonic() - begun)
                assert answer.status_code == 200
                waiting.append(answer.json()["waiting"])

    kinds = (["malformed"] + ["over"] + ["cancelled"] + ["good"] * 7) * (count // 10)
    rng.shuffle(kinds)

    def ask(i: int) -> None:
        seed = i % len(SEEDS)
        with live.client() as client:
            if kinds[i] == "malformed":
                answer = client.post(ROUTE, json=MALFORMED[i % len(MALFORMED)])
                outcome = f"malformed {answer.status_code}"
            elif kinds[i] == "over":
                outcome = f"over {client.post(ROUTE, json=OVER[i % len(OVER)]).status_code}"
            elif kinds[i] == "cancelled":
                try:
                    slow = body(seed, num_inference_steps=100)
                    outcome = f"cancelled {client.post(ROUTE, json=slow, timeout=0.15).status_code}"
                except httpx.TimeoutException:
                    outcome = "cancelled"
            else:
                for _ in range(200):
                    answer = client.post(ROUTE, json=body(seed))
                    if answer.status_code != 429:
                        break
                    time.sleep(0.05)
                right = answer.status_code == 200 and np.array_equal(drawn(answer), expected[seed])
                outcome = "right" if right else f"wrong {answer.status_code}"
        with lock:
            outcomes[outcome] += 1

    watcher = threading.Thread(target=look)
    watcher.start()
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(ask, range(len(kinds))))
    over.set()
    watcher.join()
    outcomes["most waiting"] = max(waiting, default=0)
    return outcomes, health


def check(outcomes: Counter[str], count: int, bound: int) -> None:
    tenth = count // 10
    assert outcomes.pop("most waiting") <= bound
    cancelled = outcomes.pop("cancelled", 0) + outcomes.pop("cancelled 429", 0)
    assert cancelled == tenth
    assert outcomes == Counter({"right": 7 * tenth, "malformed 400": tenth, "over 400": tenth})


def test_a_short_mix(emu: Any) -> None:
    omni = Omni(checkpoint_path(), device="emu", max_queue=4, **STRATEGIES["layer"])
    with serving(omni, ServerSettings(shutdown_timeout=5)) as live:
        outcomes, _ = mixed(live, 40, 8, random.Random(1))
    check(outcomes, 40, 4)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_long_mix(emu: Any, strategy: str, record_property: Any) -> None:
    omni = Omni(checkpoint_path(), device="emu", max_queue=8, **STRATEGIES[strategy])
    process = psutil.Process()
    with serving(omni, ServerSettings(shutdown_timeout=5)) as live:
        mixed(live, 100, 16, random.Random(0))  # everything that is made once is made
        gc.collect()
        before, device = process.memory_info().rss, emu.memory_allocated()
        outcomes, health = mixed(live, 300, 16, random.Random(2))
        gc.collect()
        grown, left = process.memory_info().rss - before, emu.memory_allocated() - device
    record_property("figures", f"slowest health {max(health):.4f} s, host memory +{grown} bytes, device +{left} bytes")
    check(outcomes, 300, 8)
    assert left <= 0
    assert grown < 20_000_000
