"""One rank: an engine of its own, told what to do by the front."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from greenroom.engine.errors import RequestRefused
from greenroom.engine.job import Job, OmniResult
from greenroom.engine.omni import Omni
from greenroom.engine.ranks.wire import (
    BEAT,
    Answer,
    Ask,
    Beat,
    Begin,
    Cancel,
    Dying,
    NotStarted,
    Outcome,
    Progress,
    Ready,
    Stop,
    Submit,
    Wire,
    portable,
    unpacked,
)

# Seconds that the last messages get on their way out.
_FLUSH = 10.0
# What the front may ask for: those that only look, and those that change something and take their time.
_LOOKING = ("figures", "live")
_CHANGING = ("set_memory", "restore", "sleep", "wake")
_PR_SET_PDEATHSIG = 1


class Rank:
    """Serves one engine to the front at the other end of a wire.

    Args:
        wire: the connection to the front.
        begin: what to load.
    """

    def __init__(self, wire: Wire, begin: Begin) -> None:
        self._wire = wire
        self._begin = begin
        self._jobs: dict[str, Job] = {}
        self._over = threading.Event()
        self._omni: Omni | None = None
        self._changes = ThreadPoolExecutor(1, "greenroom-changes")

    def run(self) -> int:
        """Loads, serves until told to stop or the front is gone, and returns the exit status of the process."""
        threading.Thread(target=self._beat, name="greenroom-beat", daemon=True).start()
        try:
            omni = self._omni = Omni(self._begin.model, **self._begin.words)
        except Exception as error:
            self._wire.send(NotStarted(portable(error)))
            self._end()
            return 2
        inputs = {name: omni.parameters(name) for name in (None, "image", "mask_image")}
        figures = omni.figures()[0]
        self._wire.send(
            Ready(omni.model, omni.facts, inputs, str(omni.device), omni.load_report, omni.gathers, figures)
        )
        try:
            return self._serve(omni)
        finally:
            self._end()

    def _serve(self, omni: Omni) -> int:
        while True:
            try:
                message = self._wire.receive()
            except EOFError:
                # Nobody is there to read a result, and nobody else will end this process.
                return 0 if omni.shutdown(timeout_s=_FLUSH) else 1
            if isinstance(message, Submit):
                self._submit(omni, message)
            elif isinstance(message, Cancel):
                self._cancel(message)
            elif isinstance(message, Ask):
                if message.what in _CHANGING:
                    self._changes.submit(self._answer, omni, message)
                else:
                    self._answer(omni, message)
            elif isinstance(message, Stop):
                broken = omni.status.cause is not None
                return 0 if omni.shutdown(message.timeout_s) and not broken else 1

    def _submit(self, omni: Omni, message: Submit) -> None:
        request_id = message.request_id
        try:
            job = Job(unpacked(message.request))
        except RequestRefused as error:
            self._wire.send(Outcome(request_id, None, error))
            return
        self._jobs[request_id] = job
        told: dict[str, Any] = {}
        with_result = message.with_result

        def tell(job: Job) -> None:
            now = {"state": job.state, "phase": job.phase, "step": job.step, "steps": job.steps}
            if now != told and not job.future.done():
                told.update(now)
                self._wire.send(Progress(request_id, now))

        def done(future: Future[OmniResult]) -> None:
            # Names neither the job nor its error: a cycle would keep what the failed call had on the device.
            self._jobs.pop(request_id, None)
            try:
                self._wire.send(_outcome(request_id, future, with_result))
            except Exception as error:  # whatever the parts of a result say that cannot be pickled
                told = RuntimeError(f"what the pipeline made cannot be sent to the front: {error}")
                self._wire.send(Outcome(request_id, None, told))

        job.listen(tell)
        job.future.add_done_callback(done)
        try:
            omni.enqueue(job)
        except Exception as error:
            job.finish(None, error)

    def _cancel(self, message: Cancel) -> None:
        job = self._jobs.get(message.request_id)
        if job is not None:
            job.cancel(message.reason)

    def _answer(self, omni: Omni, ask: Ask) -> None:
        value, error = None, None
        try:
            if ask.what not in _LOOKING + _CHANGING:
                raise ValueError(f"{ask.what!r} is not a question")
            value = getattr(omni, ask.what)(**ask.words)
        except Exception as caught:
            error = portable(caught)
        self._wire.send(Answer(ask.number, value, error))

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            status = self._omni.status if self._omni is not None else None
            if status is not None and status.cause is not None:
                self._wire.send(Dying(status.cause))
                return
            self._wire.send(Beat())

    def _end(self) -> None:
        self._over.set()
        self._changes.shutdown(wait=False, cancel_futures=True)
        self._wire.flush(_FLUSH)


def _outcome(request_id: str, future: Future[OmniResult], with_result: bool) -> Outcome:
    error = future.exception()
    if error is not None:
        return Outcome(request_id, None, portable(error))
    result = future.result()
    result = _on_host(result) if with_result else replace(result, images=[], videos=[], audio=None)
    return Outcome(request_id, result, None)


def _on_host(result: OmniResult) -> OmniResult:
    """The result with tensors in host memory: the front has no device."""
    return replace(result, images=_moved(result.images), videos=_moved(result.videos), audio=_moved(result.audio))


def _moved(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, list | tuple):
        return type(value)(_moved(v) for v in value)
    return value


def _die_with(parent: int) -> None:
    """Has the kernel kill this process when the front is gone, however it went, even while this one is stopped.

    Note [No orphans]
        A front that ends closes its end of the wire, and a rank that reads it ends too. One that hangs or is stopped
        would stay; the kernel's signal reaches it. It is bound to the thread that started this process, which is why
        the front starts its ranks on a thread that lives as long as they do.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main(arguments: list[str]) -> int:
    """The process of a rank: `arguments` are the descriptor of its wire and the front's process id."""
    _die_with(int(arguments[1]))
    # An interrupt from the keyboard reaches all; the front decides what becomes of the requests.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor = int(arguments[0])
    os.set_inheritable(descriptor, False)
    wire = Wire(Connection(descriptor), "greenroom-rank")
    try:
        begin = wire.receive()
    except EOFError:
        return 1
    return Rank(wire, begin).run()
