"""Ranks that torchrun has started, on one machine or several: the first of them is the front."""

from __future__ import annotations

import datetime
import json
import os
import secrets
import socket
import threading
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import torch.distributed as dist

from greenroom.engine import group
from greenroom.engine.errors import WorkerDied
from greenroom.engine.ranks.launch import Launched
from greenroom.engine.ranks.rank import Rank
from greenroom.engine.ranks.wire import Wire

_KEY = "greenroom/front"
# Seconds for all machines to be there: some may still be fetching what they need.
_PATIENCE = 600.0


class Torchrun:
    """The connections of the front, in rank 0 of a torchrun job, to all its ranks; itself is one of them.

    Ranks of other processes connect by TCP to MASTER_ADDR, with a key that they read from the job's store: whoever
    reaches the store is trusted, as torch.distributed trusts it.

    Raises:
        WorkerDied: a rank did not come.
    """

    restartable = False

    def __init__(self) -> None:
        self.size = group.world_size()
        self._connections: dict[int, Connection] = {}

    def begin(self) -> None:
        """Waits for all ranks."""
        store = _store()
        key = secrets.token_bytes(32)
        with _listen(key) as listener:
            host, port = listener.address
            told = os.environ["MASTER_ADDR"] if host == "0.0.0.0" else host
            store.set(_KEY, json.dumps({"host": told, "port": port, "key": key.hex()}))
            watchdog = threading.Timer(_PATIENCE, _knock, ((host, port),))
            watchdog.daemon = True
            watchdog.start()
            try:
                while len(self._connections) < self.size - 1:
                    try:
                        connection: Any = listener.accept()
                        self._connections[int(connection.recv_bytes(16))] = connection
                    except Exception as error:  # a wrong key, a port scan, or the watchdog
                        if not watchdog.is_alive():
                            missing = sorted(set(range(1, self.size)) - set(self._connections))
                            raise WorkerDied(f"ranks {missing} did not come within {_PATIENCE:g} s") from error
            finally:
                watchdog.cancel()

    def launch(self, rank: int) -> Launched:
        """The connection to a rank; rank 0 is started, on a thread of this process."""
        if rank in self._connections:
            return Launched(None, self._connections[rank])
        mine, theirs = socket.socketpair()
        wire = Wire(Connection(theirs.detach()), "greenroom-rank-0")
        threading.Thread(target=_serve, args=(wire,), name="greenroom-rank-0", daemon=True).start()
        return Launched(None, Connection(mine.detach()))


def serve_rank() -> int:
    """Serves this process, a rank of a torchrun job other than 0, to the front; returns its exit status."""
    store = _store()
    found = json.loads(store.get(_KEY))
    connection: Any = Client((found["host"], found["port"]), authkey=bytes.fromhex(found["key"]))
    connection.send_bytes(str(group.rank()).encode())
    return _serve(Wire(connection, "greenroom-rank"))


def _serve(wire: Wire) -> int:
    try:
        return Rank(wire, wire.receive()).run()
    except EOFError:
        return 1
    finally:
        wire.cut()


def _store() -> Any:
    store, _, _ = next(dist.rendezvous("env://", group.rank(), group.world_size()))
    store.set_timeout(datetime.timedelta(seconds=_PATIENCE))
    return dist.PrefixStore("greenroom-serving", store)


def _listen(key: bytes) -> Listener:
    """Listens where the others find this machine, and nowhere else if that can be."""
    address = os.environ["MASTER_ADDR"]
    try:
        return Listener((address, 0), backlog=group.world_size(), authkey=key)
    except OSError:
        # The name belongs to a router or another interface; rank 0 is on the machine that it leads to.
        return Listener(("0.0.0.0", 0), backlog=group.world_size(), authkey=key)


def _knock(address: Any) -> None:
    """Wakes whoever waits in accept()."""
    with socket.create_connection(address, timeout=5):
        pass
