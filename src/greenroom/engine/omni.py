"""Omni: a checkpoint, loaded once, offloaded as configured, asked as often as one likes."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from greenroom.accelerator import Accelerator, find_device
from greenroom.api import offload
from greenroom.config import OffloadConfig
from greenroom.engine import group
from greenroom.engine.errors import DoesNotFit, WorkerDied
from greenroom.engine.facts import ModelFacts, facts_of, needed_components
from greenroom.engine.figures import Figures
from greenroom.engine.job import Job, OmniResult, Request
from greenroom.engine.prompts import Prompt, SamplingWords, generate_each
from greenroom.engine.runner import Runner
from greenroom.engine.status import EngineStatus
from greenroom.engine.together import Together, check_ranks
from greenroom.engine.view import LiveView
from greenroom.engine.words import configuration, with_budget
from greenroom.engine.worker import Worker
from greenroom.errors import ConfigError, GreenroomError, OffloadError
from greenroom.handle import Handle, Report
from greenroom.loading import LoadReport, check_dtype, load_checkpoint


class Omni:
    """Generates pictures and videos from a checkpoint.

        with Omni("Qwen/Qwen-Image", diffusion_offload_config={"mode": "layer", "components": ["dit"]}) as omni:
            omni.generate("a cup of coffee", OmniDiffusionSamplingParams(seed=7))[0].images[0].save("coffee.png")

    One thread owns the device and serves requests in the order in which they come; `generate` may be called from
    several threads. Without any word about offloading the pipeline lies on the device as it is.

    Args:
        model: a diffusers folder, a hub id, or a pipeline that is loaded already.
        diffusion_offload_config: as for `greenroom.offload`.
        memory_budget: device memory to use: "12GiB", bytes or "80%".
        device: where to compute; None means the accelerator that is present, else the CPU.
        dtype: None or "auto" keeps what the checkpoint stores; else "bfloat16", "float16", "float32" or a torch dtype.
        enable_cpu_offload, enable_layerwise_offload, enable_distributed_layerwise_offload, dlo_*: the legacy flags.
        variant, revision, local_files_only, trust_remote_code: as for `greenroom.loading.load_checkpoint`.
        max_queue: most requests that may wait; None for no limit.
        data_parallel_size: ranks of a torchrun job that serve requests of their own; said for clearness only.
        usp: ranks of a torchrun job that compute each request together, by Ulysses sequence parallelism; each of
            them has to be given the same requests, seeds included.
        tensor_parallel_size: accepted for those who write it; 1 is all that there is.

    Raises:
        ConfigError, TopologyError, NotSupportedError: as `greenroom.offload`; words are checked before anything is
            loaded.
        TypeError: a word that does not exist; lists those that do.
        CheckpointError: the checkpoint is not whole.
        OffloadError: the device is not there.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Any,
        *,
        diffusion_offload_config: Mapping[str, Any] | OffloadConfig | str | None = None,
        memory_budget: int | float | str | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | Mapping[str, str | torch.dtype] | None = None,
        enable_cpu_offload: bool = False,
        enable_layerwise_offload: bool = False,
        enable_distributed_layerwise_offload: bool = False,
        variant: str | None = None,
        revision: str | None = None,
        local_files_only: bool = False,
        trust_remote_code: bool = False,
        max_queue: int | None = None,
        data_parallel_size: int = 1,
        usp: int = 1,
        **legacy: Any,
    ) -> None:
        config = configuration(
            {
                "diffusion_offload_config": diffusion_offload_config,
                "memory_budget": memory_budget,
                "enable_cpu_offload": enable_cpu_offload,
                "enable_layerwise_offload": enable_layerwise_offload,
                "enable_distributed_layerwise_offload": enable_distributed_layerwise_offload,
                **legacy,
            }
        )
        check_dtype(dtype)
        check_ranks(data_parallel_size, usp)
        self._accelerator = Accelerator.of(group.local_device(find_device(device)))
        self._config: OffloadConfig | None = config
        group.join(self._config, self._accelerator, needed=usp > 1)
        self._together = Together(usp, self._accelerator) if usp > 1 else None
        self._max_queue = max_queue
        self._lock = threading.Lock()
        self._asleep = False
        self._closed = False
        self.model: str
        self.pipeline: Any
        self.load_report: LoadReport | None = None
        self._recommended: dict[str, Any] = {}
        with group.told_of_failures(self._config):
            self._take(
                model,
                dtype=dtype,
                variant=variant,
                revision=revision,
                local_files_only=local_files_only,
                trust_remote_code=trust_remote_code,
            )
            if self._together is not None:
                self._together.spread(self.pipeline)
        self.facts: ModelFacts = facts_of(self.pipeline, self._recommended)
        self._handle: Handle | None = None
        self._runner: Runner | None = None
        self._view: LiveView | None = None
        self._worker = self._start()

    def _take(self, model: str | os.PathLike[str] | Any, **how: Any) -> None:
        """Loads the model as `load_checkpoint` does, or takes a pipeline as it is."""
        if isinstance(model, str | os.PathLike):
            loaded = load_checkpoint(model, **how)
            self.pipeline, self.load_report, self._recommended = loaded.pipeline, loaded.report, loaded.recommended
            # A path of this machine is nobody else's business.
            self.model = Path(model).resolve().name if Path(model).is_dir() else os.fspath(model)
        elif callable(model) and hasattr(model, "components"):
            self.pipeline, self.model = model, type(model).__name__
        else:
            raise ConfigError("model", model, "a folder, a hub id or a diffusers pipeline")
        kind = type(self.pipeline)
        missing = [name for name in needed_components(kind) if getattr(self.pipeline, name, None) is None]
        if missing:
            has = ", ".join(missing)
            raise ConfigError("model", self.model, f"a pipeline with all that {kind.__name__} needs (it has no {has})")

    # ------------------------------------------------------------------ generating

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingWords = None,
        *,
        progress: bool = True,
    ) -> list[OmniResult]:
        """Generates from each prompt in turn.

        Args:
            prompts: text; a mapping with "prompt" and, where the pipeline takes them, "negative_prompt", "image",
                "mask_image", "last_image"; or a list of these. Images are PIL images, paths, bytes of a file, or
                pixels: (height, width, 3) arrays or (3, height, width) tensors, uint8 or floats from 0 to 1.
            sampling_params: how to sample; the same for all prompts.
            progress: show the pipeline's progress bar.

        Returns:
            One result for each prompt, in their order.

        Raises:
            RequestRefused: naming the field; nothing was generated for any prompt if a prompt itself is refused.
            DoesNotFit: the device has too little memory.
            WorkerDied, RequestCancelled: the engine went away.
        """
        return generate_each(self, prompts, sampling_params, progress=progress)

    def submit(self, request: Request) -> Job:
        """Puts a request into the queue and returns at once; `job.future` gives the result.

        Raises:
            QueueFull, WorkerDied: it was not taken.
        """
        return self.enqueue(Job(request))

    def enqueue(self, job: Job) -> Job:
        """As `submit`, for a job that somebody follows already."""
        job.agree = self._together.agree if self._together is not None else None
        return self._worker.submit(job)

    def cancel_swept(self) -> None:
        """Ends waiting jobs that were given up, so that they take no place in the queue."""
        self._worker.sweep()

    # ------------------------------------------------------------------ looking

    @property
    def status(self) -> EngineStatus:
        worker = self._worker
        current = worker.current
        return EngineStatus(
            alive=worker.alive,
            asleep=self._asleep,
            waiting=worker.waiting,
            running=current.id if current else None,
            cause=repr(worker.cause) if worker.cause else None,
        )

    @property
    def device(self) -> torch.device:
        return self._accelerator.device

    @property
    def config(self) -> OffloadConfig | None:
        """The configuration in force, or None where nothing is offloaded."""
        return self._config

    def can_take(self, name: str) -> bool:
        """Whether "image" or "mask_image" is taken, by the pipeline or by one that shares its weights."""
        return self.parameters(name) is not None

    def parameters(self, name: str | None = None) -> tuple[str, ...] | None:
        """Parameters that a request may set: of the pipeline, or of the one that takes "image" or "mask_image" as well.

        None where there is no pipeline that takes it.

        Raises:
            WorkerDied: the engine was shut down.
        """
        runner = self._runner
        if runner is None:
            raise WorkerDied("the engine was shut down")
        return runner.siblings.parameters(name)

    @property
    def gathers(self) -> bool:
        """Whether this process and others put weights together, and so cannot compute without each other."""
        ranks = self._handle.ranks if self._handle is not None else None
        return ranks is not None and "allgather" in ranks.transfers.values()

    def report(self) -> Report | None:
        """What the offload keeps where; None where nothing is offloaded."""
        handle = self._handle
        return handle.report() if handle is not None and handle.enabled else None

    def figures(self) -> list[Figures]:
        """What is measured, for each rank; here there is one."""
        try:
            report = self.report()
        except GreenroomError:  # an offload that is undone at this very moment
            report = None
        return [
            Figures(
                rank=None,
                device=str(self.device),
                alive=self._worker.alive,
                allocated=self._accelerator.allocated(),
                report=report,
            )
        ]

    def live(self, since: int = 0) -> dict[str, Any]:
        """What lies on the device at this moment; see `LiveView.snapshot`."""
        view = self._view
        if view is None:
            return {"budget": None, "components": [], "events": [], "last_event": since}
        return view.snapshot(since)

    # ------------------------------------------------------------------ operating

    def set_memory(self, memory_budget: int | float | str) -> Report | None:
        """Changes the memory budget between two requests; results stay the same.

        Raises:
            ConfigError: not an amount of memory, or a pipeline that is not offloaded.
            GreenroomError: nothing fits into it; the budget in force stays.
        """
        renewed = with_budget(self._config, memory_budget)
        report: Report | None = self._worker.order(lambda: self._change_to(renewed)).result()
        return report

    def restore(self, config: OffloadConfig) -> None:
        """Goes back to a configuration that was in force before `set_memory`; nothing to do where it is still.

        Raises:
            GreenroomError: as `set_memory`.
        """
        self._worker.order(lambda: None if config == self._config else self._change_to(config)).result()

    def sleep(self) -> None:
        """Frees the device after the running request; the weights keep their values on the host.

        Requests that come meanwhile wait for `wake`. Of an offloaded pipeline nothing is copied for that; one that
        lies on the device as it is goes back to the host. Ranks that gather weights from each other have to sleep and
        wake together.
        """
        self._worker.order(self._fall_asleep).result()

    def wake(self) -> None:
        """Brings back what `sleep` freed; the next request gives the same bits as before.

        Raises:
            DoesNotFit: others have taken the memory; the engine sleeps on.
        """
        self._worker.order(self._wake_up).result()

    def restart(self) -> None:
        """Starts a new worker in place of one that has ended; requests that it had were failed with it."""
        with self._lock:
            if self._closed:
                raise WorkerDied("the engine was shut down")
            if self._worker.alive:
                return
            self._worker.stop(timeout_s=30)
            self._worker = self._start()

    def shutdown(self, timeout_s: float | None = None, *, cancel: bool = True) -> bool:
        """Ends the worker and frees the device; True if it ended in time. Harmless when done already.

        Args:
            timeout_s: how long to wait for the running request; None for as long as it takes.
            cancel: give requests up at their next step, rather than finish them within `timeout_s`.
        """
        with self._lock:
            if self._closed and self._runner is None:
                return True
            self._closed = True
        ended = self._worker.stop(timeout_s, cancel=cancel)
        if ended:
            try:
                self._unplace()
            except Exception:
                # A device that has failed says so again to whoever frees it.
                if self._worker.cause is None:
                    raise
            # What the pipeline made for itself, such as timesteps, is on the device still.
            self._runner = self.pipeline = None
            self._accelerator.empty_cache()
        return ended

    def __enter__(self) -> Omni:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    # ------------------------------------------------------------------ on the worker's thread

    def _start(self) -> Worker:
        worker = Worker(self._set_up, self._run, self._unplace, self._max_queue)
        try:
            worker.ready.result()
        except BaseException:
            worker.stop(timeout_s=30)
            raise
        return worker

    def _set_up(self) -> None:
        if self._together is not None:
            self._together.thread = threading.current_thread()
        self._unplace()
        self._place(self._config)
        self._asleep = False

    def _run(self, job: Job) -> OmniResult:
        assert self._runner is not None
        return self._runner.run(job)

    def _place(self, config: OffloadConfig | None) -> None:
        device = self._accelerator.device
        if config is None:
            try:
                self.pipeline.to(device)
            except BaseException:
                # A pipeline of the caller's must not be left with one half here and the other there.
                self.pipeline.to("cpu")
                raise
            self._handle = None
        else:
            try:
                self._handle = offload(self.pipeline, config, device=device)
                self._handle.refuse_excess()
            except Exception:
                if self._handle is not None:
                    self._look()  # at the earlier offload, which goes on under its handle
                raise
        self._look()

    def _change_to(self, config: OffloadConfig) -> Report | None:
        """From the configuration in force to one that differs in its budget."""
        if self._asleep or self._handle is None:
            raise OffloadError("the engine sleeps; wake it first")
        budget = config.memory_budget
        if self._config is not None and self._config.keeps_budget and config.keeps_budget:
            # Blocks move out or in, nothing is loaded anew.
            self._handle.set_memory(budget.to_word() if budget is not None else None)
        else:
            self._place(config)
        self._config = config
        return self.report()

    def _look(self) -> None:
        if self._view is not None:
            self._view.remove()
        self._runner = Runner(self.pipeline, self._handle, self._accelerator, self._recommended)
        self._view = LiveView(self.pipeline, self._handle, self._accelerator)
        self._view.install()

    def _unplace(self) -> None:
        if self._view is not None:
            self._view.remove()
            self._view = None
        if self._handle is not None:
            self._handle.disable()
            self._handle = None
        elif self._config is None and not self._accelerator.is_cpu and not self._asleep:
            self.pipeline.to("cpu")

    def _fall_asleep(self) -> None:
        if self._asleep:
            return
        # Ranks that gather need each other's devices as long as any of them is offloaded: they all undo it.
        if self._handle is not None and not self.gathers:
            self._handle.sleep()
        else:
            self._unplace()
        self._asleep = self._worker.paused = True
        self._accelerator.empty_cache()

    def _wake_up(self) -> None:
        if not self._asleep:
            return
        try:
            if self._handle is not None:
                self._handle.wake()
            else:
                self._place(self._config)
        except torch.OutOfMemoryError as error:
            raise DoesNotFit(f"the device has too little memory to wake up ({error}); the engine sleeps on") from None
        self._asleep = self._worker.paused = False


__all__ = ["Omni"]
