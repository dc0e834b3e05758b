"""Keeping the ranks in step: which pass comes next, and who takes part in it while its own work is elsewhere.

Every rank has a thread that votes. A vote says which component this rank is about to run, if any; when all votes are
in, every rank draws the same conclusion from them: a pass of the component that has been waited for longest. Ranks
that are about to run it do so; on the others the thread takes part in the gathers alone. Nobody else decides, and
nothing depends on what a rank does next, so requests with different numbers of steps, guidance or shapes, ranks
without a request, and requests that fail need no treatment of their own.

Note [Waiting for those who come soon]
    A rank between two forwards of one call comes back in a moment, and a pass that it misses is one more pass for
    everybody. Its thread therefore holds its vote back until it is there, or has gone elsewhere (another component,
    the end of the call), or has been away for as long as the last pass took: by then, waiting has cost as much as
    it could have saved.

Note [Ranks that compute together]
    Ranks that share a request (context parallel) wait for each other inside a forward. A pass of their component
    begins only when all of them want it; half of them inside and half of them outside would wait for ever.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from greenroom.distributed.errors import RanksError, in_short
from greenroom.distributed.gather import Gatherer, all_gather
from greenroom.distributed.ranks import HEARTBEAT, Ranks
from greenroom.streaming import Track

# Seconds: the shortest and the longest time to wait for a rank that comes soon, and that before the first pass.
_SHORT, _LONG, _FIRST = 0.03, 5.0, 0.25
# Seconds that a process which ends with an error helps the others.
_AFTER_ERROR = 5.0
# The first pause between two votes when nobody wants anything; it grows to a heartbeat.
_PAUSE = 0.002
_NOTHING = -1
# What a vote consists of.
_WANT, _WAITED, _LEAVING, _ISSUED, _ORDER, _NEED, _LIMIT = range(7)


class Groups:
    """Two process groups of the same ranks, for votes (on the host) and for gathers (on the device), each for nothing
    else. All ranks make them at the same time.
    """

    def __init__(self, ranks: Ranks) -> None:
        members = dist.get_process_group_ranks(ranks.group)
        limit = timedelta(seconds=ranks.timeout)
        apart = len(members) < dist.get_world_size()
        self.votes: Any = dist.new_group(members, timeout=limit, backend="gloo", use_local_synchronization=apart)
        self.gathers: Any = dist.new_group(members, timeout=limit, use_local_synchronization=apart)

    def let_go(self) -> None:
        """Forgets them; whoever destroys all process groups destroys them too."""
        self.votes = self.gathers = None

    def close(self) -> None:
        """Ends them on this rank, with their threads, sockets and device memory; when nothing is under way in them."""
        for group in (self.votes, self.gathers):
            if group is not None:
                with contextlib.suppress(ValueError):  # destroyed already, with all others
                    dist.destroy_process_group(group)
        self.let_go()


class Budget(Protocol):
    """One rank's side of a memory budget that all ranks keep alike."""

    def figures(self) -> tuple[int, int]:
        """Bytes that forwards need beside the weights, as far as it is known, and bytes that they and blocks that stay
        may take together."""

    def settle(self, need: int, limit: int) -> None:
        """The largest need and the smallest limit of all ranks; called between two passes, on every rank alike."""


class Conductor:
    """One rank's part in deciding, and its thread.

    Args:
        ranks: all of them make one at the same time.
        groups: what to vote and gather in; ended when all ranks have left.
        gatherer: what runs the passes; it has its slots.
        together: for the index of a component, the sets of ranks that compute it together.
        budget: what may stay on the device, where a memory budget says.
    """

    def __init__(
        self,
        ranks: Ranks,
        groups: Groups,
        gatherer: Gatherer,
        together: Mapping[int, Sequence[Sequence[int]]] | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.ranks = ranks
        self.gatherer = gatherer
        self.broken: str | None = None
        self.passes = 0
        self.joined = 0
        self._groups = groups
        gatherer.group = groups.gathers
        self._budget = budget
        self._together = dict(together or {})
        self._changed = threading.Condition()
        self._want = _NOTHING
        self._waited = 0
        self._granted = False
        self._ended = False
        self._leaving = False
        self._over = False  # no more passes
        self._dead = False  # the thread has ended
        self._then: Callable[[], None] | None = None
        self._soon = time.monotonic() + _FIRST
        self._pause = _PAUSE
        self.thread = threading.Thread(target=self._run, name="greenroom-ranks", daemon=True)
        _finish_at_exit(self)
        self.thread.start()

    # ------------------------------------------------------------------ what the computing thread says

    def ask(self, track: Track) -> None:
        """Waits until a pass of `track` begins, and takes part in it from then on; `end` has to follow.

        Raises:
            RanksError: the ranks are not together any more.
        """
        with self._changed:
            self._require_whole()
            self._want = self.gatherer.tracks.index(track)
            self._waited = 0
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._granted or self._over)
            except BaseException:
                self._want = _NOTHING
                if self._granted:
                    self._end_pass()
                raise
            if not self._granted:
                self._want = _NOTHING
                self._require_whole()

    def _require_whole(self) -> None:
        if self._over or self._leaving:
            raise RanksError(
                f"{self.broken or 'the offload was disabled on this rank'}; the weights that are gathered can be had "
                "again with handle.disable(), and greenroom.offload in a process group that is whole"
            )

    def end(self, track: Track) -> None:
        """The forward is over, one way or the other.

        Raises:
            RanksError: a gather failed, so that what was computed is not right.
        """
        try:
            self.gatherer.finish()
        except RuntimeError as error:
            with self._changed:
                self._break(error)
            raise
        finally:
            with self._changed:
                self._end_pass()

    def _end_pass(self) -> None:
        self._granted, self._ended, self._want = False, True, _NOTHING
        self._changed.notify_all()

    def expect(self) -> None:
        """A call begins on this rank, which will want a pass before long."""
        with self._changed:
            self._soon = time.monotonic() + _FIRST
            self._changed.notify_all()

    def elsewhere(self) -> None:
        """This rank is not about to run another forward of the component that it ran last."""
        if self._soon:
            with self._changed:
                self._soon = 0.0
                self._changed.notify_all()

    def leave(self, then: Callable[[], None] | None = None) -> None:
        """This rank wants no more passes; its thread goes on until the others do not either.

        Args:
            then: called when it is over, on whichever thread.
        """
        with self._changed:
            self._leaving, self._soon = True, 0.0
            self._changed.notify_all()
            if not self._dead:
                self._then, then = then or self._then, None
        if then is not None:
            then()

    def wait(self, seconds: float) -> bool:
        """Waits until all ranks have left; False if they did not in time."""
        self.thread.join(seconds)
        return not self.thread.is_alive()

    def let_go(self) -> None:
        """Drops the process groups, which must not outlive the interpreter."""
        self.gatherer.let_go()
        self._groups.let_go()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            self.gatherer.accelerator.make_current()
            with torch.inference_mode(False), torch.no_grad():
                while self._round():
                    pass
            if self.broken is None:
                self.gatherer.stream.synchronize()  # it ends: all ranks have begun the same gathers
        except BaseException as error:
            with self._changed:
                self._break(error)
        finally:
            with self._changed:
                self._over = self._dead = True
                then, self._then = self._then, None
                self._changed.notify_all()
            if then is not None:
                then()
            if self.broken is None:
                self.gatherer.let_go()
                self._groups.close()

    def _break(self, error: BaseException) -> None:
        if self.broken is None:
            self.broken = f"the ranks are not in step any more: {in_short(error)}"
        self._over = True
        self._changed.notify_all()

    def _round(self) -> bool:
        """One vote and what follows from it; False when all ranks have left."""
        votes = self._exchange(self._vote())
        if len({v[_ISSUED] for v in votes}) > 1:
            raise RanksError(f"they have gathered different numbers of blocks: {[v[_ISSUED] for v in votes]}")
        if all(v[_LEAVING] for v in votes):
            return False
        if any(v[_ORDER] for v in votes):
            self._learn_order()
        if self._budget is not None:
            self._budget.settle(max(v[_NEED] for v in votes), min(v[_LIMIT] for v in votes))
        chosen = self._choose(votes)
        if chosen == _NOTHING:
            return True
        self._pause = _PAUSE
        began = time.monotonic()
        try:
            self.gatherer.begin(self.gatherer.tracks[chosen])
        except RanksError:
            raise
        except RuntimeError:
            pass  # a copy that failed is made again when its block is due, and that is where it is told
        if self.ranks.rank in self._takers(votes, chosen) and self._grant():
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._over)
                self._ended = False
                if self._over:
                    return False
                self._soon = time.monotonic() + min(max(time.monotonic() - began, _SHORT), _LONG)
        else:
            self.gatherer.finish()
            self.joined += 1
        self.passes += 1
        return True

    def _learn_order(self) -> None:
        """Some rank ran a component's blocks in another order: that of the first such rank is everybody's from now."""
        size = self.gatherer.longest
        seen = self.gatherer.order_seen
        mine = [_NOTHING] * (size + 1) if seen is None else [seen[0], *seen[1], *[_NOTHING] * (size - len(seen[1]))]
        for track, *order in self._exchange(mine):
            if track != _NOTHING:
                self.gatherer.reorder(self.gatherer.tracks[track], [i for i in order if i != _NOTHING])
                return

    def _grant(self) -> bool:
        """Lets the computing thread go, unless it has given up waiting."""
        with self._changed:
            if self._want == _NOTHING:
                return False
            self._granted, self._ended = True, False
            self._changed.notify_all()
            return True

    def _vote(self) -> list[int]:
        with self._changed:
            if self._want == _NOTHING and not self._leaving:
                self._changed.wait_for(self._known, timeout=max(0.0, self._soon - time.monotonic()))
                self._soon = 0.0
            if self._want == _NOTHING and self._pause > _PAUSE:
                self._changed.wait_for(lambda: self._want != _NOTHING, timeout=self._pause)
            self._pause = min(HEARTBEAT, 1.5 * self._pause)
            self._waited += self._want != _NOTHING
            figures = self._budget.figures() if self._budget is not None else (0, 0)
            return [
                self._want,
                self._waited,
                int(self._leaving),
                self.gatherer.issued,
                int(self.gatherer.order_seen is not None),
                *figures,
            ]

    def _known(self) -> bool:
        return self._want != _NOTHING or self._leaving or not self._soon

    def _exchange(self, vote: list[int]) -> list[list[int]]:
        mine = torch.tensor(vote, dtype=torch.int64)
        everybody = torch.empty(self.ranks.size * len(vote), dtype=torch.int64)
        try:
            all_gather(everybody, mine, group=self._groups.votes)
        except (RuntimeError, ValueError) as error:
            raise RanksError(
                f"a rank is gone, or did not answer within {self.ranks.timeout:g} s ({in_short(error)})"
            ) from error
        return everybody.view(self.ranks.size, len(vote)).tolist()

    def _takers(self, votes: list[list[int]], component: int) -> set[int]:
        """The ranks that run a component in a pass of it that begins now; see Note [Ranks that compute together]."""
        wanting = {r for r, v in enumerate(votes) if v[_WANT] == component}
        for members in self._together.get(component, ()):
            if not wanting.issuperset(members):
                wanting -= set(members)
        return wanting

    def _choose(self, votes: list[list[int]]) -> int:
        """The component that was waited for longest, then the one that most want, then the first."""
        best, score = _NOTHING, (0, 0)
        for i in range(len(self.gatherer.tracks)):
            wanting = self._takers(votes, i)
            if wanting:
                found = (max(votes[r][_WAITED] for r in wanting), len(wanting))
                if found > score:
                    best, score = i, found
        return best


def _finish_at_exit(conductor: Conductor) -> None:
    """Lets a process that reaches its end first help the others to theirs, for as long as they gather anything.

    Of a process that ends with an error nobody expects that, and whoever started the ranks is waiting to hear of it.

    Note [No thread of a group outlives the interpreter]
        A thread that needs the interpreter's lock once the interpreter is at its end aborts the process if there is
        C++ beneath it. Ours is inside a collective most of the time, and gloo's take the lock to let go of the
        tensors of a vote, after its result was seen. So the groups are ended (which joins gloo's threads) by our
        thread, and our thread is waited for, even where nothing else is left of its conductor.
    """
    reference, thread_reference = weakref.ref(conductor), weakref.ref(conductor.thread)

    def finish() -> None:
        failed = hasattr(sys, "last_type")
        found = reference()
        if found is not None:
            found.leave()
            passes = -1
            while not found.wait(_AFTER_ERROR if failed else found.ranks.timeout):
                if failed or found.passes == passes:
                    return
                passes = found.passes
            found.let_go()
        thread = thread_reference()
        if thread is not None:
            thread.join(_AFTER_ERROR)

    atexit.register(finish)
