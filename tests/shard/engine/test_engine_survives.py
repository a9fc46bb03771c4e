"""An engine in which one step fails, wherever and however, serves the next epoch as a fresh one does."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from threading import Event
from typing import Any

import pytest
import torch

from millrace_shard.batch.batch import Batch
from millrace_shard.batch.sequence_table import SequenceTable
from millrace_shard.batch.step import FailureKind
from millrace_shard.device.process_group import CollectiveError, ProcessGroup
from millrace_shard.engine.engine import Engine
from millrace_shard.engine.kv_capacity import CapacityError
from millrace_shard.errors import EngineEnded
from millrace_shard.model_runner.launched_step import LaunchedStep
from millrace_shard.model_runner.runner import StepRunner
from millrace_shard.sampling.sampler import Sampler
from millrace_testing.engines.engine_driver import PROMPT, WARMUP, Driver, forward, generate, tokens
from millrace_testing.engines.fake_engine import greedy

OTHER = [7, 1, 1, 60, 80, 33, 21, 2, 2, 90]
STAGES: dict[str, tuple[Any, str]] = {
    "apply": (Batch, "apply"),
    "admit": (Batch, "_admit"),
    "clear": (StepRunner, "_clear_blocks"),
    "lay_out": (SequenceTable, "lay_out"),
    "ragged": (Batch, "ragged"),
    "forward": (StepRunner, "_forward"),
    "sample": (Sampler, "sample"),
    "put": (Batch, "put"),
    "commit": (SequenceTable, "commit"),
    "download": (LaunchedStep, "__init__"),
    "copy": (LaunchedStep, "finish"),
}
ERRORS: dict[str, tuple[Callable[[], Exception], FailureKind]] = {
    "runtime": (lambda: RuntimeError("shapes differ"), FailureKind.FAILED),
    "memory": (MemoryError, FailureKind.OUT_OF_MEMORY),
    "torch": (lambda: torch.OutOfMemoryError("CUDA out of memory"), FailureKind.OUT_OF_MEMORY),
    "cpu": (
        lambda: RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"),
        FailureKind.OUT_OF_MEMORY,
    ),
    "host": (lambda: RuntimeError("std::bad_alloc"), FailureKind.OUT_OF_MEMORY),
}


@pytest.fixture(params=[False, True], ids=["inline", "overlap"])
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    driver = Driver(overlap=request.param)
    driver.warm_up()
    driver.open()
    yield driver
    driver.engine.close()


@pytest.mark.parametrize("is_late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("stage", "error"),
    [*((stage, "runtime") for stage in STAGES)]
    + [(stage, error) for stage in ("forward", "copy") for error in ERRORS if error != "runtime"],
)
def test_a_step_that_fails_leaves_a_fresh_engine(
    stage: str, error: str, is_late: bool, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails at the edge of every stage, with one sequence mid-generation and another joining."""
    raised, kind = ERRORS[error]
    owner, name = STAGES[stage]
    original = getattr(owner, name)

    def fail(*args: Any, **kwargs: Any) -> None:
        if is_late:
            original(*args, **kwargs)
        raise raised()

    driver.run(forward(driver.admit(0), chunks=[(0, 6)]))
    step = forward(driver.admit(4, OTHER), chunks=[(4, 3)], decodes=[0])
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        failure = driver.fail(step)
    assert failure.kind is kind
    assert failure.message
    assert driver.fail(forward(decodes=[0])).kind is FailureKind.REFUSED
    driver.open()
    driver.free = list(range(1, 64))
    both = driver.run(forward(driver.admit(0, OTHER), driver.admit(4), chunks=[(0, 10), (4, 6)]))
    assert tokens(both) == {0: greedy(OTHER, 1)[0], 4: greedy(PROMPT, 1)[0]}
    again = driver.run(forward(decodes=[4, 0]))
    assert tokens(again) == {0: greedy(OTHER, 2)[1], 4: greedy(PROMPT, 2)[1]}
    assert generate(driver, 2, 4) == greedy(PROMPT, 4)


def test_nothing_of_a_step_without_memory_stays(driver: Driver) -> None:
    """Neither log records nor futures nor the threads that wait hold its tensors; no garbage collector helps."""
    held: list[weakref.ref[torch.Tensor]] = []

    def run_out(_: object) -> None:
        activations = torch.empty(1000)
        held.append(weakref.ref(activations))
        try:
            raise RuntimeError("std::bad_alloc")
        except RuntimeError as error:
            raise torch.OutOfMemoryError("CUDA out of memory") from error

    driver.model.before_forward = run_out
    gc.disable()
    try:
        reply = driver.send(forward(driver.admit(0), chunks=[(0, 6)]))
        reply.result(30)
        assert [ref() for ref in held] == [None]
    finally:
        gc.enable()


def test_nothing_of_a_warm_up_without_memory_stays() -> None:
    """Above all its caches, which would not fit next to the caches of the next warm-up."""
    driver = Driver()
    caches: list[weakref.ref[torch.Tensor]] = []
    new_cache = driver.kernels.new_cache

    def remembered(**shape: Any) -> object:
        cache = new_cache(**shape)
        caches.append(weakref.ref(cache.keys))
        return cache

    def run_out(_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    driver.kernels.new_cache = remembered  # type: ignore[method-assign,assignment]
    driver.model.before_forward = run_out
    gc.disable()
    try:
        failed = driver.engine.warm_up(WARMUP)
        assert isinstance(failed.exception(30), CapacityError)
        # The first call that the thread executes after it has let go of the warm-up.
        driver.engine.submit(lambda: None).result(30)
        assert caches
        assert all(ref() is None for ref in caches)
    finally:
        gc.enable()
    assert not driver.engine.progress().warmed_up
    driver.model.before_forward = lambda _: None
    driver.warm_up()
    driver.open()
    assert generate(driver, 0, 3) == greedy(PROMPT, 3)
    driver.engine.close()


def test_an_equal_warm_up_keeps_the_cache_and_ends_the_epoch(driver: Driver) -> None:
    """The KV of the old epoch is never read, though its blocks are reused and hold NaN."""
    capacity = driver.engine.warm_up(WARMUP).result(30)
    driver.open()
    driver.run(forward(driver.admit(0, OTHER), driver.admit(1), chunks=[(0, 10), (1, 6)]))
    runner = driver.runner
    driver.model.batches.clear()
    assert driver.engine.warm_up(WARMUP).result(30) == capacity
    assert driver.model.batches == []
    assert driver.runner is runner
    assert len(runner.batch) == 0
    assert driver.fail(forward(decodes=[0])).kind is FailureKind.REFUSED
    with torch.inference_mode():
        for layer in runner._cache:
            layer.keys[1:] = layer.values[1:] = float("nan")
    driver.open()
    driver.free = list(range(1, 64))
    assert generate(driver, 0, 12) == greedy(PROMPT, 12)
    assert generate(driver, 1, 5) == greedy(PROMPT, 5)


def test_a_different_warm_up_measures_anew(driver: Driver) -> None:
    first = driver.runner
    other = replace(WARMUP, max_total_tokens=20)
    assert driver.engine.warm_up(other).result(30).max_total_tokens == 20
    assert driver.runner is not first
    assert driver.model.batches, "the largest step runs again"
    second = driver.runner
    assert driver.engine.warm_up(WARMUP).result(30).max_total_tokens == 64
    assert driver.runner is not second


def test_a_warm_up_is_kept_only_by_all_ranks_together() -> None:
    asked: list[int] = []

    class Peer(ProcessGroup):
        """Another rank that was never warmed up."""

        def minimum(self, value: int) -> int:
            asked.append(value)
            return min(value, 0) if value <= 1 else value

    driver = Driver(group=Peer(0, 2, torch.device("cpu")))
    driver.warm_up()
    first = driver.runner
    driver.warm_up()
    assert driver.runner is not first
    assert [value for value in asked if value <= 1] == [0, 1]
    driver.engine.close()


def test_a_group_that_is_lost_in_a_warm_up_ends_the_engine() -> None:
    class Lost(ProcessGroup):
        """Ranks that have gone."""

        def minimum(self, value: int) -> int:
            raise CollectiveError(f"no rank answers to {value}")

    driver = Driver(group=Lost(0, 2, torch.device("cpu")))
    ended = Event()
    driver.engine.when_ended(ended.set)
    failed = driver.engine.warm_up(WARMUP).exception(30)
    assert isinstance(failed, EngineEnded)
    assert "no rank answers" in str(failed)
    assert ended.wait(30)
    assert driver.engine.group_is_lost


@pytest.mark.parametrize("stage", ["forward", "copy"])
def test_a_lost_device_ends_the_engine(
    stage: str, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that a GPU keeps would fail every later epoch too."""
    ended = Event()
    driver.engine.when_ended(ended.set)
    asked = lose_the_device(monkeypatch)
    monkeypatch.setattr(*STAGES[stage], no_access)
    assert driver.fail(forward(driver.admit(0), chunks=[(0, 6)])).kind is FailureKind.FAILED
    assert ended.wait(30)
    assert asked == [torch.device("cpu")]


def test_a_device_that_is_lost_in_a_warm_up_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver()
    ended = Event()
    driver.engine.when_ended(ended.set)
    lose_the_device(monkeypatch)
    driver.model.before_forward = no_access
    assert isinstance(driver.engine.warm_up(WARMUP).exception(30), EngineEnded)
    assert ended.wait(30)
    assert not driver.engine.group_is_lost


def no_access(*_: object) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def lose_the_device(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """From now on; which devices were asked about."""
    asked: list[torch.device] = []

    def is_lost(device: torch.device) -> bool:
        asked.append(device)
        return True

    monkeypatch.setattr("millrace_shard.engine.engine.is_lost", is_lost)
    return asked


def test_progress_distinguishes_a_hang_from_a_warm_up_and_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a clock that is turned by hand."""
    now = 1_000
    monkeypatch.setattr("millrace_shard.engine.engine.time.monotonic_ns", lambda: now)
    driver = Driver()
    gate, entered = Event(), Event()

    def block(_: object) -> None:
        entered.set()
        assert gate.wait(30)

    def idle_ns(engine: Engine) -> int:
        return engine.progress().idle_ns

    driver.model.before_forward = block
    assert not driver.engine.progress().warmed_up
    warming = driver.engine.warm_up(WARMUP)
    assert entered.wait(30)
    now = 50_000
    opened = driver.engine.step(driver.opening())
    assert (driver.engine.progress().pending_steps, idle_ns(driver.engine)) == (1, 0)
    assert not driver.engine.progress().warmed_up
    gate.set()
    warming.result(30)
    opened.result(30)
    assert driver.engine.progress().warmed_up
    now = 90_000
    assert idle_ns(driver.engine) == 40_000
    gate.clear()
    entered.clear()
    step = driver.send(forward(driver.admit(0), chunks=[(0, 6)]))
    assert entered.wait(30)
    assert idle_ns(driver.engine) == 0, "the rest before it does not count"
    now = 95_000
    assert (driver.engine.progress().pending_steps, idle_ns(driver.engine)) == (1, 5_000)
    gate.set()
    step.result(30)
    assert (driver.engine.progress().pending_steps, idle_ns(driver.engine)) == (0, 0)
    driver.engine.close()
