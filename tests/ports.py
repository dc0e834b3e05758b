"""Ports for servers and process groups of tests."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now; another process may take it before its use."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
