"""Who is inside which component. One thread computes at a time; others wait at the door.

The threads would share one set of device buffers otherwise, and each would overwrite what the other reads.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from greenroom.strategies.entry import Door

_CALLS = frozenset({nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__})
# Seconds between two looks whether the thread that is waited for still lives.
_LOOK = 1.0


class Owned:
    """A lock of a thread, which may take it several times. A thread that has ended owns nothing any more.

    SystemExit and the like run no forward hooks, so that a thread may end inside a component.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._owner: threading.Thread | None = None
        self._count = 0

    def acquire(self) -> None:
        me = threading.current_thread()
        with self._changed:
            while self._owner is not None and self._owner is not me:
                if not self._owner.is_alive():
                    self._count = 0
                    break
                self._changed.wait(_LOOK)
            self._owner = me
            self._count += 1

    def release(self) -> None:
        with self._changed:
            if self._owner is not threading.current_thread():
                raise RuntimeError("the lock is another thread's")
            self._count -= 1
            if self._count == 0:
                self._owner = None
                self._changed.notify()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Occupancy:
    """The components that are computing, and the lock of the thread that computes."""

    def __init__(self) -> None:
        self.lock = Owned()
        self.inside: list[Door] = []
        self._thread: threading.Thread | None = None  # whose components are inside

    def enter(self, door: Door) -> None:
        self.lock.acquire()
        if self.inside:
            self._heal()
        self._thread = threading.current_thread()
        self.inside.append(door)

    def leave(self, door: Door) -> bool:
        """False if `door` was never entered: its component could not be brought in."""
        if door not in self.inside:
            return False
        while self.inside:
            last = self.inside.pop()
            self.lock.release()
            if last is door:
                break
        return True

    def busy(self) -> bool:
        """Whether a component is computing, on this thread or, if the lock was taken by the caller, on any."""
        if self.inside:
            self._heal()
        return bool(self.inside)

    def _heal(self) -> None:
        """Forgets those who left without a word: KeyboardInterrupt and the like run no forward hooks."""
        if self._thread is not threading.current_thread():  # it has ended, and its locks with it
            for door in self.inside:
                door.serving = 0
            self.inside.clear()
            return
        live = set()
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            # Asking a frame for its locals makes it keep them; in these frames the arguments live as long anyway.
            if frame.f_code in _CALLS:
                live.add(id(frame.f_locals["self"]))
            frame = frame.f_back
        kept = [d for d in self.inside if id(d.module()) in live or d.serving]
        for _ in range(len(self.inside) - len(kept)):
            self.lock.release()
        self.inside[:] = kept
