"""Starting the processes of ranks, with the environment that torch.distributed expects."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Launched:
    """The front's end of a connection to a rank, and its process where this one started it."""

    process: subprocess.Popen[bytes] | None
    connection: Connection


class Launcher(Protocol):
    """How ranks come to be."""

    restartable: bool
    """Whether `begin` may be called again, for other ranks in place of dead ones."""

    def begin(self) -> None:
        """Prepares a start."""

    def launch(self, rank: int) -> Launched:
        """Starts a rank, or finds it, after `begin`."""


class Processes:
    """Ranks as processes of this host, which this process starts.

    Args:
        devices: the device of each rank.
    """

    restartable = True

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = devices
        self._rendezvous: Rendezvous | None = None

    def begin(self) -> None:
        self._rendezvous = Rendezvous()

    def launch(self, rank: int) -> Launched:
        """Starts a rank. The caller's thread must outlive it: see Note [No orphans] in `rank.py`."""
        assert self._rendezvous is not None
        environment = self._rendezvous.environment(rank, len(self._devices))
        if self._devices[rank].startswith("emu"):
            # Each process has emulated devices of its own, as many as there are ranks.
            environment["EMU_DEVICE_COUNT"] = str(max(len(self._devices), int(os.environ.get("EMU_DEVICE_COUNT", "2"))))
        mine, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "greenroom.engine.ranks", str(theirs.fileno()), str(os.getpid())],
                env={**os.environ, **environment},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        return Launched(process, Connection(mine.detach()))


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
