"""What `greenroom serve` refuses before it loads anything, in the words of a command line; how it sets itself up."""

from __future__ import annotations

import gc
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from greenroom.cli import app
from greenroom.demo import checkpoint_path
from greenroom.serving import main
from ports import free_port


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--memory-budget", "much"], "--memory-budget = 'much' is not accepted; accepted: a positive number"),
        (["--memory-budget", "1kB"], "--memory-budget = '1kB' is not accepted; accepted: at least"),
        (["--memory-budget", "9999TiB"], "--memory-budget = '9999TiB' is not accepted; accepted: at most"),
        (["--dtype", "float8"], "--dtype = 'float8' is not accepted"),
        (["--dtype", "[/x]"], "--dtype = '[/x]' is not accepted"),
        (["--log-level", "loud"], "--log-level = 'loud' is not accepted; accepted: critical"),
        (["--diffusion-offload-config", '{"mode": "layers"}'], "mode = 'layers' is not accepted"),
        (["--diffusion-offload-config", "{"], "diffusion_offload_config"),
        (["--api-key", ""], "--api-key = '' is not accepted; accepted: printable ASCII"),
        (["--api-key", "schlüssel"], "--api-key = '9 characters' is not accepted"),
        (["--host", "203.0.113.7"], "cannot listen on 203.0.113.7"),
        (["--device", "cuda"], "'cuda' is not available here"),
        (["--enable-distributed-layerwise-offload", "--dlo-pin-failure-policy", "maybe"], "--dlo-pin-failure-policy"),
    ],
)
def test_wrong_words_are_refused_by_flag(emu: Any, words: list[str], told: str) -> None:
    line = ["serve", str(checkpoint_path()), "--omni", "--device", "emu", "--port", str(free_port()), *words]
    run = CliRunner().invoke(app, line)
    assert run.exit_code == 2 and told in run.output, run.output


@pytest.mark.parametrize("key", ["", "schlüssel"])
def test_a_key_in_the_environment_is_checked_as_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: str) -> None:
    monkeypatch.setenv("GREENROOM_API_KEY", key)
    run = CliRunner().invoke(app, ["serve", str(tmp_path / "nothing"), "--port", str(free_port())])
    assert run.exit_code == 2 and "GREENROOM_API_KEY = '" in run.output, run.output


def test_an_address_in_use_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        run = CliRunner().invoke(app, ["serve", str(tmp_path / "nothing"), "--port", str(port)])
    assert run.exit_code == 2 and f"cannot listen on 127.0.0.1:{port}" in run.output


@pytest.fixture
def as_before() -> Iterator[None]:
    interval = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval)
    gc.unfreeze()


def test_no_thread_of_a_server_keeps_the_interpreter_for_long(as_before: None) -> None:
    before = len(gc.get_objects())
    main.yield_often()
    # What a full collection, which stops every thread, has to walk through.
    assert len(gc.get_objects()) < 0.01 * before and gc.get_freeze_count() > 0.9 * before
    assert sys.getswitchinterval() < 0.001
