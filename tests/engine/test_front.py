"""The front of several ranks by itself, with ranks that are threads of the test and compute nothing."""

from __future__ import annotations

import contextlib
import queue
import threading
from dataclasses import replace
from multiprocessing import Pipe
from typing import Any

import pytest

from greenroom import ConfigError
from greenroom.config import OffloadConfig
from greenroom.demo import checkpoint_path
from greenroom.engine import Figures, OmniRanks, Request, RequestRefused
from greenroom.engine.facts import ModelFacts
from greenroom.engine.job import Job
from greenroom.engine.ranks.launch import Launched
from greenroom.engine.ranks.rank import Rank
from greenroom.engine.ranks.wire import Answer, Ask, Begin, Outcome, Progress, Ready, Stop, Submit, Wire
from greenroom.engine.runner import Runner
from greenroom.engine.sampling import OmniDiffusionSamplingParams

LAYER = {"mode": "layer", "components": ["dit"]}


class Threads:
    """Launches ranks that say they are ready once `loaded` is set, and do what they are asked without a word.

    Attributes:
        begins: what each rank was told first, in the order of the starts.
        asked: (rank, what, words) of each question.
        refuses: ranks that do not accept a budget.
        fails: ranks that cannot be launched.
        ended: ranks whose connection was closed, or that were told to stop.
    """

    restartable = True

    def __init__(self) -> None:
        self.loaded = threading.Event()
        self.wires: list[Wire] = []
        self.begun = threading.Semaphore(0)
        self.begins: list[Begin] = []
        self.asked: list[tuple[int, str, Any]] = []
        self.refuses: set[int] = set()
        self.fails: set[int] = set()
        self.ended: queue.SimpleQueue[int] = queue.SimpleQueue()

    def begin(self) -> None:
        self.wires = []

    def launch(self, rank: int) -> Launched:
        if rank in self.fails:
            raise OSError("too many processes")
        mine, theirs = Pipe()
        wire = Wire(theirs, f"pretended-rank-{rank}")
        self.wires.append(wire)
        threading.Thread(target=self._serve, args=(wire, rank), daemon=True).start()
        return Launched(None, mine)

    def _serve(self, wire: Wire, rank: int) -> None:
        with contextlib.suppress(EOFError):
            self._follow(wire, rank)
        wire.cut()
        self.ended.put(rank)

    def _follow(self, wire: Wire, rank: int) -> None:
        self.begins.append(wire.receive())
        self.begun.release()
        self.loaded.wait()
        device = f"place:{rank}"
        facts = ModelFacts("Pretended", 16, 4, True, {}, {})
        figures = Figures(rank=None, device=device, alive=True)
        wire.send(Ready("a model", facts, {None: (), "image": (), "mask_image": None}, device, None, False, figures))
        while not isinstance(message := wire.receive(), Stop):
            if isinstance(message, Ask):
                wire.send(Answer(message.number, None, self._do(rank, message)))
            elif isinstance(message, Submit):
                wire.send(Progress(message.request_id, {"step": 1, "steps": 2}))
                wire.send(Outcome(message.request_id, None, RequestRefused("prompt", "drawn by nobody")))

    def _do(self, rank: int, ask: Ask) -> Exception | None:
        self.asked.append((rank, ask.what, ask.words))
        if ask.what == "set_memory" and rank in self.refuses:
            return ConfigError("memory_budget", ask.words["memory_budget"], "more")
        return None


class Real:
    """Launches ranks that load the demo, as threads of this process."""

    restartable = True

    def begin(self) -> None:
        pass

    def launch(self, rank: int) -> Launched:
        mine, theirs = Pipe()
        threading.Thread(target=self._serve, args=(Wire(theirs, "rank"),), daemon=True).start()
        return Launched(None, mine)

    def _serve(self, wire: Wire) -> None:
        Rank(wire, wire.receive()).run()
        wire.cut()


class Unreadable:
    """Can be sent, and not be read."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise LookupError("not known here")


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


def test_a_request_that_cannot_be_sent_is_refused_and_the_next_one_is_served() -> None:
    ranks = Threads()
    ranks.loaded.set()
    with OmniRanks("a model", data_parallel_size=1, device="cpu", launcher=ranks) as omni:
        with pytest.raises(RequestRefused, match="cannot be sent to a rank"):
            omni.generate("a cube", {"callback": lambda: None})
        with pytest.raises(RequestRefused, match="drawn by nobody"):
            omni.generate("a cube")
        assert omni.status.alive


def test_a_request_that_a_rank_cannot_read_and_a_result_that_cannot_be_sent_concern_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with OmniRanks(checkpoint_path(), data_parallel_size=1, device="cpu", launcher=Real()) as omni:
        with pytest.raises(RequestRefused, match="a rank cannot read: not known here"):
            omni.generate("a digit", {"callback": Unreadable()})
        with monkeypatch.context() as patch:
            run = Runner.run
            patch.setattr(Runner, "run", lambda *a: replace(run(*a), images=[lambda: None]))
            with pytest.raises(RuntimeError, match="cannot be sent to the front"):
                omni.generate("a digit", {"num_inference_steps": 1})
        assert omni.generate("a digit", {"num_inference_steps": 1})[0].images[0].size == (32, 32)
        assert omni.status.alive


def test_a_listener_that_raises_ends_neither_its_request_nor_the_front() -> None:
    ranks = Threads()
    ranks.loaded.set()
    heard: list[int] = []

    def listen(job: Job) -> None:
        heard.append(job.step)
        raise ValueError("not interested")

    with OmniRanks("a model", data_parallel_size=1, device="cpu", launcher=ranks) as omni:
        omni.sleep()
        job = omni.submit(Request({"prompt": "a cube"}, OmniDiffusionSamplingParams()))
        job.listen(listen)
        omni.wake()
        with pytest.raises(RequestRefused, match="drawn by nobody"):
            job.future.result(30)
        assert omni.status.alive and len(heard) == 1


def test_ranks_that_were_launched_before_one_that_cannot_be_are_ended() -> None:
    ranks = Threads()
    ranks.loaded.set()
    ranks.fails = {1}
    with pytest.raises(OSError, match="too many processes"):
        OmniRanks("a model", data_parallel_size=2, device="cpu", launcher=ranks)
    assert ranks.ended.get(timeout=10) == 0


def test_the_end_of_a_request_may_shut_everything_down() -> None:
    ranks = Threads()
    ranks.loaded.set()
    told: queue.SimpleQueue[bool] = queue.SimpleQueue()
    omni = OmniRanks("a model", data_parallel_size=1, device="cpu", launcher=ranks)
    omni.sleep()
    job = omni.submit(Request({"prompt": "a cube"}, OmniDiffusionSamplingParams()))
    job.future.add_done_callback(lambda _: told.put(omni.shutdown()))
    omni.wake()
    assert told.get(timeout=30) is False
    assert omni.shutdown(timeout_s=30)
