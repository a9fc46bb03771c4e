"""The engine: one thread that owns the device, the model, the KV cache and the batch, and does one thing at a time.

Work is executed strictly in the order of submission. Other threads only submit and read counters, so a health check
never waits for a forward pass.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TypeVar

import torch

from millrace_shard.batch.step import (
    FailureKind,
    Filter,
    Forward,
    Open,
    Step,
    StepFailure,
    StepReply,
    StepResult,
    Unknown,
)
from millrace_shard.device.failures import clear_frames, is_lost, is_out_of_memory
from millrace_shard.device.process_group import CollectiveError
from millrace_shard.engine.epoch import Epoch
from millrace_shard.engine.kv_capacity import Capacity, WarmupRequest
from millrace_shard.engine.warmup import LoadedModel, MemoryLimits, WarmedUp, warm_up
from millrace_shard.errors import EngineEnded, StepInvalid
from millrace_shard.model_runner.decode_graphs import GraphSettings
from millrace_shard.model_runner.launched_step import LaunchedStep

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far the engine has come."""

    last_step: int
    """Number of the last step answered in the current epoch."""
    pending_steps: int
    idle_ns: int
    """Since the engine last answered a step, warmed up, or was given a step while it had none; 0 while it warms up."""
    warmed_up: bool
    """Whether there is a KV cache to run steps with."""


class Engine:
    """Life: `start`, `submit(load).result()`, `attach`, `warm_up`, then steps, `close`."""

    def __init__(
        self,
        *,
        limits: MemoryLimits,
        device: torch.device,
        cpu_threads: int | None = None,
        overlap: bool = False,
        graphs: GraphSettings | None = None,
    ) -> None:
        """Steps are answered on a thread beside the one that launches them.

        With `overlap`, for CUDA, as soon as they are launched, since their tokens are still on their way. Without, when
        the next step's forward pass begins, which leaves the interpreter to others, or when there is no next one, or
        one that is to guess.

        Warming up captures `graphs`, and decodes run by them.
        """
        self._limits = limits
        self._device = device
        self._cpu_threads = cpu_threads
        self._overlap = overlap
        self._graphs = graphs
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._answers: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = [
            Thread(target=self._run, args=(self._work,), name="engine", daemon=True),
            Thread(target=self._run, args=(self._answers,), name="answers", daemon=True),
        ]
        self._launched: Callable[[], None] | None = None
        """What answers the last step, if it is not handed over yet."""
        self._loaded: LoadedModel | None = None
        self._warmed_up: WarmedUp | None = None
        self._warmup_request: WarmupRequest | None = None
        self._is_warming_up = False
        self._epoch = Epoch()
        self._lock = Lock()
        self._pending_steps = 0
        self._last_progress_ns = time.monotonic_ns()
        self._has_ended = False
        self._when_ended: list[Callable[[], None]] = []

    @property
    def loaded(self) -> LoadedModel:
        """The model; there is one once `attach` was called."""
        assert self._loaded is not None, "no model is attached"
        return self._loaded

    def start(self) -> None:
        """Begin to execute."""
        for thread in self._threads:
            thread.start()

    def attach(self, loaded: LoadedModel) -> None:
        """Take over a model; it was best loaded by `submit`, in the thread that will run it."""
        self._loaded = loaded

    def close(self) -> None:
        """Finish what was submitted and end. Further work is never executed."""
        for thread, work in zip(self._threads, (self._work, self._answers), strict=True):
            work.put(None)
            thread.join()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Execute `call` on the engine thread, after all that was submitted before."""
        future: Future[T] = Future()
        self._work.put(lambda: self._resolve(future, call))
        return future

    def warm_up(self, request: WarmupRequest) -> Future[Capacity]:
        """Allocate the KV cache, and try the largest step unless in another rank's place; ends the current epoch.

        Raises CapacityError; EngineEnded when device or group are lost; whatever else the model raises.
        An engine that was warmed up by an equal request, as its peers were, keeps its cache and answers at once.
        """
        return self.submit(lambda: self._warm_up(request))

    def step(self, step: Step) -> Future[StepReply]:
        """Execute a step; its reply says if it failed or was refused, the future itself never raises."""
        future: Future[StepReply] = Future()
        with self._lock:
            if not self._pending_steps:
                self._last_progress_ns = time.monotonic_ns()
            self._pending_steps += 1
        self._work.put(lambda: self._execute(step, future))
        return future

    def end_epoch(self, epoch: int) -> Future[None]:
        """Drop the sequences of `epoch`, unless another one has begun since."""
        return self.submit(lambda: self._end_epoch(epoch))

    def progress(self) -> Progress:
        """For health checks; from any thread, at any time."""
        with self._lock:
            since = time.monotonic_ns() - self._last_progress_ns
            return Progress(
                last_step=self._epoch.last_answered,
                pending_steps=self._pending_steps,
                idle_ns=0 if self._is_warming_up else since,
                warmed_up=self._warmed_up is not None,
            )

    def when_ended(self, call: Callable[[], None]) -> None:
        """Call `call` once a thread of the engine ends, for whatever reason; at once if one has ended."""
        with self._lock:
            self._when_ended.append(call)
            has_ended = self._has_ended
        if has_ended:
            call()

    def is_alive(self) -> bool:
        """Whether the engine's threads run."""
        return all(thread.is_alive() for thread in self._threads)

    def _run(self, work: SimpleQueue[Callable[[], None] | None]) -> None:
        # The number of OpenMP threads and the current GPU are kept by thread: set elsewhere, they would not hold here.
        if self._cpu_threads is not None:
            torch.set_num_threads(self._cpu_threads)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        try:
            with torch.inference_mode():
                while (call := work.get()) is not None:
                    call()
                    # While the thread waits, nothing of a step, tensors among it, is to stay.
                    del call
        finally:
            self._hand_over()
            self._end()

    def _end(self) -> None:
        with self._lock:
            calls = [] if self._has_ended else tuple(self._when_ended)
            self._has_ended = True
        for call in calls:
            call()

    def _warm_up(self, request: WarmupRequest) -> Capacity:
        self._epoch.end()
        with self._lock:
            self._is_warming_up = True
        try:
            return self._warmed_up_by(request).capacity
        except Exception as error:
            if self._end_if_lost(error):
                raise EngineEnded(str(error)) from error
            raise
        finally:
            with self._lock:
                self._is_warming_up = False
                self._last_progress_ns = time.monotonic_ns()

    def _warmed_up_by(self, request: WarmupRequest) -> WarmedUp:
        kept = self._warmed_up if request == self._warmup_request else None
        # A rank that kept its cache while another one measures anew would be missed in the other's collectives.
        all_keep = self.loaded.group.minimum(int(kept is not None))
        if kept is not None and all_keep:
            kept.runner.clear()
            return kept
        kept = None
        self._warmed_up = None
        self._warmed_up = warm_up(self.loaded, request, self._limits, graphs=self._graphs)
        self._warmup_request = request
        return self._warmed_up

    def _end_epoch(self, epoch: int) -> None:
        if self._epoch.is_current(epoch):
            self._epoch.end()
            if self._warmed_up is not None:
                self._warmed_up.runner.clear()

    def _execute(self, step: Step, future: Future[StepReply]) -> None:
        """The process edge of a step: whatever is raised below becomes its answer."""
        outcome: LaunchedStep | StepResult | StepFailure
        refusal = self._epoch.refusal(step)
        if refusal is not None:
            outcome = StepFailure(FailureKind.REFUSED, refusal)
        else:
            try:
                outcome = self._perform(step)
            except Exception as error:  # noqa: BLE001
                outcome = self._failure(step, error)
        self._hand_over()
        if not isinstance(outcome, LaunchedStep):
            self._answer(step, future, outcome)
            return
        self._launched = partial(self._finish, step, future, outcome)
        if self._overlap or self._work.empty():
            self._hand_over()

    def _hand_over(self) -> None:
        """Have the last step answered by the other thread, if it is not yet."""
        launched, self._launched = self._launched, None
        if launched is not None:
            self._answers.put(launched)

    def _resolve(self, future: Future[T], call: Callable[[], T]) -> None:
        """The process edge of other work."""
        self._hand_over()
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001
            clear_frames(error)
            future.set_exception(error)
        else:
            future.set_result(result)

    def _perform(self, step: Step) -> StepResult | LaunchedStep:
        if self._warmed_up is None:
            raise StepInvalid("no step before Warmup")
        runner = self._warmed_up.runner
        match step.work:
            case Forward():
                return runner.launch(step.work, self._hand_over)
            case Filter(dropped_slots):
                runner.drop(dropped_slots)
            case Open():
                runner.clear()
            case Unknown():
                raise StepInvalid("the step asks for nothing this shard knows")
        return StepResult()

    def _finish(self, step: Step, future: Future[StepReply], launched: LaunchedStep) -> None:
        outcome: StepResult | StepFailure
        try:
            outcome = launched.finish()
        except Exception as error:  # noqa: BLE001
            outcome = self._failure(step, error)
        self._answer(step, future, outcome)

    def _failure(self, step: Step, error: Exception) -> StepFailure:
        self._epoch.fail(step.epoch)
        kind = FailureKind.OUT_OF_MEMORY if is_out_of_memory(error) else FailureKind.FAILED
        if isinstance(error, StepInvalid):
            logger.error("step %d is invalid: %s", step.number, error)
        else:
            logger.error("step %d failed", step.number, exc_info=error)
        clear_frames(error)
        if not self._end_if_lost(error) and kind is FailureKind.OUT_OF_MEMORY:
            torch.cuda.empty_cache()
        return StepFailure(kind, str(error) or type(error).__name__)

    def _end_if_lost(self, error: Exception) -> bool:
        """End, and the process with it, where `error` would come back in every later epoch; whether it would."""
        if isinstance(error, CollectiveError):
            lost = "the process group"
        elif is_lost(self._device):
            lost = "the device"
        else:
            return False
        logger.critical("%s cannot be used any more: the engine ends", lost)
        self._work.put(None)
        return True

    def _answer(
        self, step: Step, future: Future[StepReply], outcome: StepResult | StepFailure
    ) -> None:
        with self._lock:
            self._pending_steps -= 1
            self._last_progress_ns = time.monotonic_ns()
            self._epoch.answered(step)
        future.set_result(StepReply(step.epoch, step.number, outcome))
