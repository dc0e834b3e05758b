"""Many clients at once: right pictures, wrong requests, clients that leave, and the server as quick as ever."""

from __future__ import annotations

import contextlib
import functools
import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from command_line import command
from live_server import STRATEGIES, serving
from test_http import ROUTE, drawn

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


# Its own process: in this one it would wait for the clients' threads, and not for the server.
_PROBE = """
import http.client, json, sys, threading, time
host, port = sys.argv[1].removeprefix("http://").split(":")
over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
times, waiting, bad = [], [], 0
while not over.wait(0.05):
    begun = time.monotonic()
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    connection.request("GET", "/health")
    answer = connection.getresponse()
    body = json.loads(answer.read())
    connection.close()
    times.append(time.monotonic() - begun)
    waiting.append(body["waiting"])
    bad += answer.status != 200
print(json.dumps({"times": times, "waiting": max(waiting, default=0), "bad": bad}))
"""


@contextlib.contextmanager
def probing(url: str) -> Iterator[dict[str, Any]]:
    """Asks for the server's health all the time; the dictionary is filled when the block ends."""
    found: dict[str, Any] = {}
    process = subprocess.Popen(
        [sys.executable, "-c", _PROBE, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield found
    finally:
        found.update(json.loads(process.communicate("", timeout=60)[0]))


def mixed(url: str, count: int, clients: int, rng: random.Random) -> tuple[Counter[str], dict[str, Any]]:
    """Sends `count` requests: a tenth malformed, a tenth over the limits, a tenth given up; counts what came."""
    connect = functools.partial(httpx.Client, base_url=url, timeout=60, trust_env=False)
    with connect() as client:
        expected = {seed: drawn(client.post(ROUTE, json=body(seed))) for seed in SEEDS}
    outcomes: Counter[str] = Counter()
    lock = threading.Lock()
    kinds = ["malformed", "over", "cancelled", *["good"] * 7] * (count // 10)
    rng.shuffle(kinds)

    def persistent(client: httpx.Client, words: dict[str, Any], **more: Any) -> httpx.Response:
        for _ in range(400):
            answer = client.post(ROUTE, json=words, **more)
            if answer.status_code != 429:
                break
            assert int(answer.headers["Retry-After"]) >= 1
            time.sleep(0.05)
        return answer

    def ask(i: int) -> None:
        seed = i % len(SEEDS)
        with connect() as client:
            if kinds[i] == "malformed":
                outcome = f"malformed {client.post(ROUTE, json=MALFORMED[i % len(MALFORMED)]).status_code}"
            elif kinds[i] == "over":
                outcome = f"over {client.post(ROUTE, json=OVER[i % len(OVER)]).status_code}"
            elif kinds[i] == "cancelled":
                try:
                    slow = body(seed, num_inference_steps=100)
                    outcome = f"cancelled {persistent(client, slow, timeout=0.3).status_code}"
                except httpx.TimeoutException:
                    outcome = "cancelled"
            else:
                answer = persistent(client, body(seed))
                right = answer.status_code == 200 and np.array_equal(drawn(answer), expected[seed])
                outcome = "right" if right else f"wrong {answer.status_code}"
        with lock:
            outcomes[outcome] += 1

    with probing(url) as health, ThreadPoolExecutor(clients) as pool:
        list(pool.map(ask, range(len(kinds))))
    return outcomes, health


def check(outcomes: Counter[str], health: dict[str, Any], count: int, bound: int) -> None:
    tenth = count // 10
    assert outcomes == Counter({"right": 7 * tenth, "malformed 400": tenth, "over 400": tenth, "cancelled": tenth})
    assert health["bad"] == 0 and health["times"] and health["waiting"] <= bound


def test_a_short_mix(emu: Any) -> None:
    omni = Omni(checkpoint_path(), device="emu", max_queue=4, **STRATEGIES["layer"])
    with serving(omni, ServerSettings(shutdown_timeout=5)) as live:
        outcomes, health = mixed(live.url, 40, 8, random.Random(1))
    check(outcomes, health, 40, 4)


WORDS: dict[str, tuple[str, ...]] = {
    "resident": (),
    "module": ("--enable-cpu-offload",),
    "layer": ("--diffusion-offload-config", '{"mode":"layer","components":["dit","text_encoder"]}'),
    "budget": ("--memory-budget", "6MiB"),
}


def own_bytes(process: psutil.Process) -> int:
    """Memory that a process has written. Unique pages (USS) count libraries as its own once no other maps them."""
    return sum(m.private_dirty for m in process.memory_maps(grouped=True))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", WORDS)
def test_a_long_mix(emu: Any, strategy: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = (str(checkpoint_path()), "--omni", "--device", "emu", "--max-queue", "8", "--log-level", "error")
    with command(*words, *WORDS[strategy]) as (url, process):
        mixed(url, 100, 16, random.Random(0))  # everything that is made once is made
        before = own_bytes(process)
        outcomes, health = mixed(url, 300, 16, random.Random(2))
        grown = own_bytes(process) - before
    times = sorted(health["times"])
    with capsys.disabled():
        print(f"\n{strategy}: {dict(outcomes)}; at most {health['waiting']} waiting; memory {grown / 1e6:+.1f} MB")
        print(f"/health {len(times)} times, 99 % within {times[int(0.99 * len(times))]:.3f} s, all {times[-1]:.3f} s")
    check(outcomes, health, 300, 8)
    assert grown < 8_000_000
