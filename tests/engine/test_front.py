"""The front of several ranks by itself, with ranks that are threads of the test and compute nothing."""

from __future__ import annotations

import contextlib
import threading
from multiprocessing import Pipe
from typing import Any

import pytest

from greenroom import ConfigError
from greenroom.config import OffloadConfig
from greenroom.engine import Figures, OmniRanks
from greenroom.engine.facts import ModelFacts
from greenroom.engine.ranks.launch import Launched
from greenroom.engine.ranks.wire import Answer, Ask, Begin, Ready, Stop, Wire

LAYER = {"mode": "layer", "components": ["dit"]}


class Threads:
    """Launches ranks that say they are ready once `loaded` is set, and do what they are asked without a word.

    Attributes:
        begins: what each rank was told first, in the order of the starts.
        asked: (rank, what, words) of each question.
        refuses: ranks that do not accept a budget.
    """

    restartable = True

    def __init__(self) -> None:
        self.loaded = threading.Event()
        self.wires: list[Wire] = []
        self.begun = threading.Semaphore(0)
        self.begins: list[Begin] = []
        self.asked: list[tuple[int, str, Any]] = []
        self.refuses: set[int] = set()

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
            self.begins.append(wire.receive())
            self.begun.release()
            self.loaded.wait()
            device = f"place:{rank}"
            facts = ModelFacts("Pretended", 16, True, {}, {})
            figures = Figures(rank=None, device=device, alive=True)
            wire.send(Ready("a model", facts, frozenset({"image"}), device, None, False, figures))
            with contextlib.suppress(EOFError):
                while not isinstance(message := wire.receive(), Stop):
                    if isinstance(message, Ask):
                        wire.send(Answer(message.number, None, self._do(rank, message)))
        finally:
            wire.cut()

    def _do(self, rank: int, ask: Ask) -> Exception | None:
        self.asked.append((rank, ask.what, ask.words))
        if ask.what == "set_memory" and rank in self.refuses:
            return ConfigError("memory_budget", ask.words["memory_budget"], "more")
        return None


def lose(omni: OmniRanks, ranks: Threads, rank: int) -> None:
    ranks.wires[rank].cut()
    lost = threading.Event()
    while omni.status.ranks[rank].alive:
        lost.wait(0.01)


def test_what_ranks_have_said_of_the_model_is_known_while_they_start_anew() -> None:
    ranks = Threads()
    ranks.loaded.set()
    with OmniRanks("a model", usp=2, device="cpu", launcher=ranks) as omni:
        for _ in range(2):
            ranks.begun.acquire()
        ranks.loaded.clear()
        lose(omni, ranks, 1)
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


def test_a_rank_that_is_started_anew_begins_with_the_budget_in_force_even_where_all_sleep() -> None:
    ranks = Threads()
    ranks.loaded.set()
    words = {"diffusion_offload_config": LAYER, "memory_budget": "6MiB"}
    with OmniRanks("a model", data_parallel_size=2, device="cpu", launcher=ranks, **words) as omni:
        assert omni.config == OffloadConfig(**LAYER, memory_budget="6MiB")
        omni.set_memory("5MiB")
        assert omni.config == OffloadConfig(**LAYER, memory_budget="5MiB")
        omni.sleep()
        lose(omni, ranks, 1)
        ranks.asked.clear()
        omni.restart()
        assert ranks.begins[-1].words["diffusion_offload_config"] == omni.config
        # One that sleeps would refuse any other question.
        assert {what for _, what, _ in ranks.asked} == {"sleep"}
        assert omni.status.alive and omni.status.asleep


def test_ranks_that_took_a_budget_which_another_refused_go_back_to_none() -> None:
    ranks = Threads()
    ranks.loaded.set()
    with OmniRanks(
        "a model", data_parallel_size=2, device="cpu", launcher=ranks, diffusion_offload_config=LAYER
    ) as omni:
        ranks.refuses = {1}
        with pytest.raises(ConfigError, match="5MiB"):
            omni.set_memory("5MiB")
        assert omni.config == OffloadConfig(**LAYER)
        restored = {rank: words["config"] for rank, what, words in ranks.asked if what == "restore"}
        assert restored == {0: omni.config, 1: omni.config}
