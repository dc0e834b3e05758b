"""The server as people start it: a command, in a process of its own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import psutil

from ports import free_port

# Importing the emulator makes it the accelerator that is present, so that no command has to name it.
_PROGRAM = "import greenroom.emulator; from greenroom.cli import main; main()"


@contextlib.contextmanager
def command(*words: str) -> Iterator[tuple[str, psutil.Process]]:
    """`greenroom serve` with `words` behind it, where an emulated accelerator is present; always stopped.

    Yields:
        Its address, and the process.
    """
    port = free_port()
    program = [sys.executable, "-c", _PROGRAM, "serve", *words, "--port", str(port)]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    url = f"http://127.0.0.1:{port}"
    try:
        limit = time.monotonic() + 120
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                    break
            if process.poll() is not None or time.monotonic() > limit:
                raise AssertionError(f"the server did not start: {process.stdout.read() if process.stdout else ''}")
            time.sleep(0.1)
        yield url, psutil.Process(process.pid)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
