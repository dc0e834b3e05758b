"""Starting the processes of ranks, with the environment that torch.distributed expects."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Launched:
    """A process that was started, and the front's end of the connection to it."""

    process: subprocess.Popen[bytes]
    connection: Connection


class Rendezvous:
    """Where the ranks of one start find each other.

    The store lives in the front's process: its port is chosen by the system, without a race, and it outlives any
    rank. Each start has a store of its own, so that nothing of a group that broke is ever read.
    """

    def __init__(self) -> None:
        self.store: Any = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)

    def environment(self, rank: int, world: int) -> dict[str, str]:
        """What rank `rank` of `world` finds in its environment, as torchrun would set it."""
        found = {
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(self.store.port),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "GROUP_RANK": "0",
            # "The store is there already; be a client of it."
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        if "GLOO_SOCKET_IFNAME" not in os.environ:
            # All are on this host, whose own name may not resolve.
            found["GLOO_SOCKET_IFNAME"] = "lo"
        return found


def start(environment: Mapping[str, str]) -> Launched:
    """Starts a rank. The caller's thread must outlive it: see Note [No orphans] in `rank.py`."""
    mine, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "greenroom.engine.ranks.rank", str(theirs.fileno()), str(os.getpid())],
            env={**os.environ, **environment},
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
        )
    return Launched(process, Connection(mine.detach()))
