"""One rank as the front sees it."""

from __future__ import annotations

import contextlib
import itertools
import queue
import subprocess
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from greenroom.engine.errors import WorkerDied
from greenroom.engine.job import Job
from greenroom.engine.ranks.wire import Answer, Ask, Outcome, Wire

STARTING, READY, GONE = "starting", "ready", "gone"
_NUMBERS = itertools.count(1)


class Link:
    """A rank, its process where the front started it, and what it is doing.

    Messages arrive in `inbox` as (link, message); (link, None) says that the rank is gone.

    Note [An answer belongs to its question]
        Whatever a rank says carries the number or the id of what it was told. What arrives for a request that is
        over, or from a rank that was given up, is dropped, so that a late answer is never read as the next one's.
    """

    def __init__(
        self,
        rank: int,
        connection: Connection,
        inbox: queue.SimpleQueue[Any],
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.rank = rank
        self.process = process
        self.wire = Wire(connection, f"greenroom-rank-{rank}")
        self.state = STARTING
        self.error: BaseException | None = None
        self.cause: str | None = None
        self.job: Job | None = None
        self.told_to_cancel: float | None = None
        self.progress_at = 0.0
        self.longest_step = 0.0
        self.seen_at = time.monotonic()
        self.heard = False
        self.kill_at: float | None = None
        self.end_by: float | None = None
        """When the request has to have ended: another rank that computes it has failed."""
        self.outcome: Outcome | None = None
        self.killed = False
        self.closed = False
        self._asked: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._inbox = inbox
        threading.Thread(target=self._read, name=f"greenroom-rank-{rank}-reader", daemon=True).start()

    @property
    def name(self) -> str:
        return f"rank {self.rank}"

    def begin(self, job: Job) -> None:
        """Notes that the rank serves `job` from now on."""
        self.job, self.told_to_cancel, self.progress_at = job, None, time.monotonic()
        self.outcome, self.end_by = None, None

    def progress(self, changes: Mapping[str, Any], *, tell: bool) -> None:
        """Notes that a step is done, and tells the job so."""
        now = time.monotonic()
        self.longest_step = max(self.longest_step, now - self.progress_at)
        self.progress_at = now
        if self.job is not None and tell:
            self.job.tell(**changes)

    def stuck_for(self, timeout_s: float) -> float | None:
        """Seconds after which a request that was given up should have ended, where it has not; else None.

        It ends at its next step. How long a step takes is known from those before; before the first, nothing is.
        """
        if self.told_to_cancel is None or self.job is None:
            return None
        patience = max(timeout_s, 4 * self.longest_step) if self.longest_step else 10 * timeout_s
        silent = time.monotonic() - max(self.told_to_cancel, self.progress_at)
        return patience if silent > patience else None

    def ask(self, what: str, words: Mapping[str, Any] | None = None) -> Future[Any]:
        """Has a method of the rank's engine called; the future fails with WorkerDied where the rank is gone."""
        future: Future[Any] = Future()
        number = next(_NUMBERS)
        with self._lock:
            if self.state != GONE:
                self._asked[number] = future
                self.wire.send(Ask(number, what, words or {}))
                return future
        future.set_exception(WorkerDied(f"{self.name} is gone"))
        return future

    def answered(self, answer: Answer) -> None:
        with self._lock:
            future = self._asked.pop(answer.number, None)
        if future is None:
            return
        if answer.error is not None:
            future.set_exception(answer.error)
        else:
            future.set_result(answer.value)

    def gone(self, cause: str | None) -> None:
        """Marks the rank as gone and fails what it was asked; `cause` is None where that was wanted."""
        with self._lock:
            self.state, self.cause = GONE, cause
            asked, self._asked = list(self._asked.values()), {}
        for future in asked:
            future.set_exception(WorkerDied(f"{self.name}: {cause or 'it was shut down'}"))

    def kill(self) -> None:
        """Ends the process at once; for one that nobody here started, the connection."""
        self.killed = True
        if self.process is None:
            self.wire.cut()
        elif self.process.poll() is None:
            self.process.kill()

    @property
    def ended(self) -> bool:
        """Whether nothing of the rank is left on this host."""
        return self.state == GONE and (self.process is None or self.process.poll() is not None)

    def exit_words(self) -> str:
        """How the process ended."""
        if self.process is None:
            return "its connection was closed"
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self.process.wait(1.0)
            return f"killed by signal {-status}" if status < 0 else f"its process ended with status {status}"
        return "its connection was closed"

    def _read(self) -> None:
        try:
            while True:
                self._inbox.put((self, self.wire.receive()))
        except Exception:
            # Also what cannot be unpickled: a rank that talks nonsense is as good as gone.
            self._inbox.put((self, None))
        self.wire.cut()
