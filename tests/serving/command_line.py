"""The server as people start it: a command, in a process of its own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil

from ports import free_port

# Importing the emulator makes it the accelerator that is present, so that no command has to name it.
_PROGRAM = "import greenroom.emulator; from greenroom.cli import main; main()"


@contextlib.contextmanager
def command(*words: str, output: Path | None = None) -> Iterator[tuple[str, psutil.Process]]:
    """`greenroom serve` with `words` behind it, where an emulated accelerator is present; always stopped.

    Args:
        *words: of the command line.
        output: a file for what it prints; None where nobody needs it.

    Yields:
        Its address, and the process.
    """
    port = free_port()
    program = [sys.executable, "-c", _PROGRAM, "serve", *words, "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with contextlib.ExitStack() as stack:
        # A file, because a pipe that nobody reads blocks who writes when it is full.
        file = output.open("w+") if output is not None else tempfile.TemporaryFile("w+")  # noqa: SIM115
        told = stack.enter_context(file)
        process = subprocess.Popen(program, stdout=told, stderr=subprocess.STDOUT, text=True)
        stack.callback(_stop, process)
        limit = time.monotonic() + 120
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                    break
            if process.poll() is not None or time.monotonic() > limit:
                told.seek(0)
                raise AssertionError(f"the server did not start: {told.read()}")
            time.sleep(0.1)
        yield url, psutil.Process(process.pid)


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise
