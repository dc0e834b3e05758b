"""Replicas behind Ray Serve, on a Ray of this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from served import BODY, ROUTE, drawn, until

from greenroom import ConfigError
from greenroom.demo import checkpoint_path
from ports import free_port

ray = pytest.importorskip("ray", reason="needs greenroom[ray]")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url(emu_module: Any) -> Iterator[str]:
    from ray import serve

    from greenroom.serving.ray import application

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        serve.run(
            application(str(checkpoint_path()), num_replicas=2, device="emu", enable_layerwise_offload=True),
            route_prefix="/",
        )
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def test_replicas_draw_the_same_bits(url: str, expected: Any) -> None:
    answers: list[httpx.Response] = []

    def post() -> None:
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
            answers.append(client.post(ROUTE, json=BODY))

    threads = [threading.Thread(target=post) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(answers) == 6 and all(np.array_equal(drawn(a), expected(7)) for a in answers)


def test_errors_and_health_pass_through(url: str) -> None:
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        refused = client.post(ROUTE, json={**BODY, "prompt": ""})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt"
        assert client.get("/health").json()["status"] == "ok"
        with client.stream("POST", ROUTE, json={**BODY, "stream": True}) as answer:
            assert "image_generation.completed" in answer.read().decode()


def replicas() -> set[int]:
    """Processes of replicas: Ray names them after what they serve."""
    found = set()
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and b"ServeReplica:default:greenroom" in (folder / "cmdline").read_bytes():
                found.add(int(folder.name))
    return found


def test_a_replica_that_is_killed_is_replaced(url: str, expected: Any) -> None:
    before = replicas()
    assert len(before) == 2
    os.kill(min(before), signal.SIGKILL)
    until(lambda: len(replicas() - before) == 1 and min(before) not in replicas(), 60)
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        for _ in range(4):
            assert np.array_equal(drawn(client.post(ROUTE, json=BODY)), expected(7))


def test_ranks_need_devices() -> None:
    from greenroom.serving.ray import application

    with pytest.raises(ConfigError, match="num_gpus"):
        application("somewhere", num_gpus=1, data_parallel_size=2)
    with pytest.raises(ConfigError, match="at least 4"):
        application("somewhere", num_gpus=2, data_parallel_size=2, usp=2)
