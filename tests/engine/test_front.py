"""The front of several ranks by itself, with ranks that are threads of the test and compute nothing."""

from __future__ import annotations

import contextlib
import threading
from multiprocessing import Pipe

from greenroom.engine import Figures, OmniRanks
from greenroom.engine.facts import ModelFacts
from greenroom.engine.ranks.launch import Launched
from greenroom.engine.ranks.wire import Ready, Stop, Wire


class Threads:
    """Launches ranks that say they are ready once `loaded` is set."""

    restartable = True

    def __init__(self) -> None:
        self.loaded = threading.Event()
        self.wires: list[Wire] = []
        self.begun = threading.Semaphore(0)

    def begin(self) -> None:
        self.wires = []

    def launch(self, rank: int) -> Launched:
        mine, theirs = Pipe()
        wire = Wire(theirs, f"pretended-rank-{rank}")
        self.wires.append(wire)
        threading.Thread(target=self._serve, args=(wire, rank), daemon=True).start()
        return Launched(None, mine)

    def _serve(self, wire: Wire, rank: int) -> None:
        try:
            wire.receive()
            self.begun.release()
            self.loaded.wait()
            device = f"place:{rank}"
            facts = ModelFacts("Pretended", 16, True, {}, {})
            figures = Figures(rank=None, device=device, alive=True)
            wire.send(Ready("a model", facts, frozenset({"image"}), device, None, False, figures))
            with contextlib.suppress(EOFError):
                while not isinstance(wire.receive(), Stop):
                    pass
        finally:
            wire.cut()


def test_what_ranks_have_said_of_the_model_is_known_while_they_start_anew() -> None:
    ranks = Threads()
    ranks.loaded.set()
    with OmniRanks("a model", usp=2, device="cpu", launcher=ranks) as omni:
        for _ in range(2):
            ranks.begun.acquire()
        ranks.loaded.clear()
        lost = threading.Event()
        ranks.wires[1].cut()
        while all(rank.alive for rank in omni.status.ranks):
            lost.wait(0.01)
        renewing = threading.Thread(target=omni.restart)
        renewing.start()
        for _ in range(2):
            assert ranks.begun.acquire(timeout=30)
        assert not any(rank.alive for rank in omni.status.ranks)
        assert (omni.model, omni.device) == ("a model", "place:0, place:1")
        assert omni.facts.makes_videos and omni.can_take("image") and omni.load_report is None
        ranks.loaded.set()
        renewing.join(30)
        assert not renewing.is_alive() and omni.status.alive
