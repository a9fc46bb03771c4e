"""The engine: one thread that owns the device, the model, the KV cache and the batch.

Work runs strictly in the order of submission. Other threads only submit work and read counters, so that a health check
never waits for a forward pass.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import TypeVar

import torch

from millrace_shard.adapters.adapter_store import AdapterStore
from millrace_shard.batch.step import (
    Encode,
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
from millrace_shard.device.pulse import PULSE
from millrace_shard.engine.kv_capacity import Capacity, WarmupRequest
from millrace_shard.engine.loaded_model import LoadedModel
from millrace_shard.engine.threads import EngineThreads
from millrace_shard.engine.warmup import MemoryLimits, WarmedUp, warm_up
from millrace_shard.errors import EngineEnded, ImageInvalid, StepInvalid, WrongEpoch
from millrace_shard.kernels.kv_store import Directory
from millrace_shard.model_runner.graph_capture import GraphSettings, empty_cache
from millrace_shard.model_runner.launched_step import LaunchedStep
from millrace_shard.vision.encoder import ImageSize


class Epoch:
    """The open epoch, if any. `Open` starts the next one, even after a failure."""

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._number = 0
        self._has_failed = False
        self.last_answered = 0

    def is_current(self, epoch: int) -> bool:
        return self._epoch == epoch

    def refusal(self, step: Step) -> str | None:
        """The reason not to run `step`; None accepts the step and counts it."""
        if isinstance(step.work, Open):
            if step.number != 0 or step.epoch == self._epoch:
                return f"an epoch is opened once, by step 0, and not by step {step.number}"
            self._epoch, self._number, self._has_failed = step.epoch, 0, False
            return None
        if step.epoch != self._epoch:
            return f"epoch {step.epoch} is not open"
        if self._has_failed:
            return "an earlier step of this epoch failed"
        if step.number != self._number + 1:
            return f"step {step.number} came instead of step {self._number + 1}"
        self._number += 1
        return None

    def answered(self, step: Step) -> None:
        """Count the answer to `step`, if the step was accepted."""
        if step.epoch == self._epoch and step.number <= self._number:
            self.last_answered = step.number

    def fail(self, epoch: int) -> None:
        if epoch == self._epoch:
            self._has_failed = True

    def end(self) -> None:
        self._epoch = None
        self._has_failed = False


T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Counters of the engine for health checks."""

    last_step: int
    """Number of the last step answered in the current epoch."""
    pending_steps: int
    idle_ns: int
    """Time since the last answer, the warm-up, or a step that arrived while none was pending; 0 during a warm-up."""
    warmed_up: bool
    """Whether there is a KV cache, which steps need."""
    pulse: int
    """Changes with every part of a layer that is computed: within a step, the sign that it goes on."""


class Engine:
    """Runs the steps of a model on its own thread.

    The order of calls is `start`, `submit(load).result()`, `attach`, `warm_up`, then steps, then `close`.
    """

    def __init__(
        self,
        *,
        limits: MemoryLimits,
        device: torch.device,
        cpu_threads: int | None = None,
        overlap: bool = False,
        graphs: GraphSettings | None = None,
    ) -> None:
        """A second thread answers steps while the engine thread launches the next ones.

        With `overlap`, for CUDA, it answers a step as soon as this step is launched, while the device computes its
        tokens. Otherwise it answers when the forward pass of the next step begins, which releases the interpreter lock,
        or when the next step starts to draft, or when there is no next step.

        The warm-up captures `graphs`, which then run decodes.
        """
        self._limits = limits
        self._device = device
        self._overlap = overlap
        self._graphs = graphs
        self._threads = EngineThreads(device, cpu_threads=cpu_threads, on_end=self._hand_over)
        self._launched: Callable[[], None] | None = None
        """The call that answers the last step, if the other thread does not have it yet."""
        self._loaded: LoadedModel | None = None
        self._warmed_up: WarmedUp | None = None
        self._warmup_request: WarmupRequest | None = None
        self._is_warming_up = False
        self._epoch, self._lock = Epoch(), Lock()
        self.group_is_lost = False
        """Whether a collective failed, which ended the engine."""
        self._pending_steps = 0
        self._last_progress_ns = time.monotonic_ns()

    @property
    def loaded(self) -> LoadedModel:
        assert self._loaded is not None, "no model is attached"
        return self._loaded

    def start(self) -> None:
        self._threads.start()

    def attach(self, loaded: LoadedModel) -> None:
        """Set the model, which should be loaded by `submit`, on the thread that will run it."""
        self._loaded = loaded

    def close(self) -> None:
        """Finish the submitted work and end. Later work never runs."""
        self._threads.close()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run `call` on the engine thread, after all earlier work."""
        future: Future[T] = Future()
        self._threads.work(lambda: self._resolve(future, call))
        return future

    def warm_up(self, request: WarmupRequest) -> Future[Capacity]:
        """Warm up, which ends the current epoch; see `warmup.warm_up`.

        If all ranks are warmed up by an equal request, they keep their caches, drop all adapters and answer at once.
        The future raises CapacityError, EngineEnded if the device or the process group is lost, or any error of the
        model.
        """
        return self.submit(lambda: self._warm_up(request))

    def directory(self) -> Directory | None:
        """What the KV store holds; None without one. Runs on the engine thread, see `submit`."""
        store = self.loaded.kv_store
        return None if store is None or self._warmed_up is None else store.directory()

    def step(self, step: Step) -> Future[StepReply]:
        """Run a step. The reply reports failures and refusals; the future never raises."""
        future: Future[StepReply] = Future()
        with self._lock:
            if not self._pending_steps:
                self._last_progress_ns = time.monotonic_ns()
            self._pending_steps += 1
        self._threads.work(lambda: self._execute(step, future))
        return future

    def between_steps(self, epoch: int, call: Callable[[], T]) -> Future[T]:
        """Run `call` after all earlier work, if `epoch` is open then; else the future raises WrongEpoch."""

        def checked() -> T:
            self.check_epoch(epoch)
            return call()

        return self.submit(checked)

    def check_epoch(self, epoch: int) -> None:
        """Raise WrongEpoch unless `epoch` is open. Any thread may call this; another epoch may open meanwhile."""
        if not self._epoch.is_current(epoch):
            raise WrongEpoch(f"epoch {epoch} is not open")

    def put_image(self, epoch: int, size: ImageSize, parts: Iterable[bytes]) -> None:
        """Put an image of `parts` into its slot after all earlier work, and wait for that.

        Raises ImageInvalid, and WrongEpoch or EngineEnded.
        """
        self.check_epoch(epoch)
        if self.loaded.vision is None:
            raise ImageInvalid("the model reads no images")
        self.loaded.vision.check(size)
        pixels = size.filled(parts)

        def put() -> None:
            assert self._warmed_up is not None
            assert self._warmed_up.runner.images is not None
            self._warmed_up.runner.images.put(size, pixels)

        self.between_steps(epoch, put).result()

    def end_epoch(self, epoch: int) -> Future[None]:
        """Drop the sequences of `epoch`, unless another epoch has begun."""
        return self.submit(lambda: self._end_epoch(epoch))

    def progress(self) -> Progress:
        """Counters for health checks; any thread may read them at any time."""
        with self._lock:
            since = time.monotonic_ns() - self._last_progress_ns
            return Progress(
                last_step=self._epoch.last_answered,
                pending_steps=self._pending_steps,
                idle_ns=0 if self._is_warming_up else since,
                warmed_up=self._warmed_up is not None,
                pulse=PULSE.value,
            )

    def when_ended(self, call: Callable[[], None]) -> None:
        """Run `call` when a thread of the engine ends for any reason, or at once if one has ended."""
        self._threads.when_ended(call)

    def is_alive(self) -> bool:

        return self._threads.are_alive()

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
        # A rank that keeps its cache takes no part in the collectives of a rank that warms up again.
        all_keep = self.loaded.group.minimum(int(kept is not None))
        if kept is not None and all_keep:
            kept.runner.clear()
            self.loaded.drop_adapters()
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
        """Run a step; every error below this method becomes its answer."""
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
        if self._overlap or not self._threads.has_work():
            self._hand_over()

    def _hand_over(self) -> None:
        """Let the other thread answer the last step, if it does not have it yet."""
        launched, self._launched = self._launched, None
        if launched is not None:
            self._threads.answer(launched)

    def _resolve(self, future: Future[T], call: Callable[[], T]) -> None:
        """Run other work; every error becomes the error of `future`."""
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
            raise StepInvalid("no step can run before Warmup")
        runner, store = self._warmed_up.runner, self.loaded.kv_store
        if store is not None:
            store.generation = step.epoch + step.number
        match step.work:
            case Forward():
                return runner.launch(step.work, self._hand_over)
            case Encode():
                return runner.encode(step.work)
            case Filter(dropped_slots):
                runner.drop(dropped_slots)
            case Open(life):
                runner.clear()
                if store is not None:
                    store.begin(life)
            case Unknown():
                raise StepInvalid(
                    "the work of the step is unknown to this shard; the router may be newer"
                )
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
        is_other_rank = isinstance(error, CollectiveError)
        if self.loaded.kv_store is not None and kind is FailureKind.FAILED and not is_other_rank:
            # No later router may use it. A rank that failed drops its own; where one was killed, all keep theirs.
            self.loaded.kv_store.begin(0)
        if not self._end_if_lost(error) and kind is FailureKind.OUT_OF_MEMORY:
            empty_cache(self._device, self._graphs)
        return StepFailure(kind, str(error) or type(error).__name__)

    def _end_if_lost(self, error: Exception) -> bool:
        """End the engine, and so the process, if `error` would recur in every later epoch; returns whether it would."""
        self.group_is_lost = self.group_is_lost or isinstance(error, CollectiveError)
        if not self.group_is_lost and not is_lost(self._device):
            return False
        lost = "process group" if self.group_is_lost else "device"
        logger.critical("the engine ends: the %s is lost", lost)
        self._threads.end()
        return True

    def _answer(
        self, step: Step, future: Future[StepReply], outcome: StepResult | StepFailure
    ) -> None:
        with self._lock:
            self._pending_steps -= 1
            self._last_progress_ns = time.monotonic_ns()
            self._epoch.answered(step)
        future.set_result(StepReply(step.epoch, step.number, outcome))


class AdapterLoading:
    """Loads adapters into the slots of an engine's model. Methods raise WrongEpoch, and EngineEnded with the engine."""

    def __init__(self, engine: Engine, store: AdapterStore) -> None:
        self._engine = engine
        self._store = store

    def load(self, epoch: int, slot: int, digest: str) -> None:
        """Put the adapter `digest` into `slot`, in place of any other, and wait until it is there.

        Raises AdapterInvalid or AdapterMemoryFull, and leaves the slot as it was.
        """
        self._engine.check_epoch(epoch)
        with self._store.loading():
            if self._store.holds(slot, digest):
                return
            adapter = self._store.read(slot, digest, partial(self._between_steps, epoch))
            try:
                self._between_steps(epoch, partial(self._store.put, slot, adapter))
            except BaseException:
                self._store.discard(slot, adapter)
                raise

    def unload(self, epoch: int, slot: int) -> None:
        """Empty `slot`, and wait until it is empty."""
        self._between_steps(epoch, partial(self._store.remove, slot))

    def _between_steps(self, epoch: int, change: Callable[[], None]) -> None:
        """Run `change` on the engine thread, and wait for it."""
        self._engine.between_steps(epoch, change).result()
