"""An engine in which one step fails, wherever and however, serves the next epoch as a fresh one does."""

from __future__ import annotations

import gc
import signal
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import pytest
import torch

from millrace_proto import generate_pb2 as pb
from millrace_proto import generate_pb2_grpc as pb_grpc
from millrace_shard.batch.batch import Batch
from millrace_shard.batch.sequence_table import SequenceTable
from millrace_shard.batch.step import FailureKind
from millrace_shard.device.process_group import COLLECTIVE_TIMEOUT, CollectiveError, ProcessGroup
from millrace_shard.engine.engine import Engine
from millrace_shard.engine.kv_capacity import CapacityError
from millrace_shard.errors import EngineEnded
from millrace_shard.model_runner.launched_step import LaunchedStep
from millrace_shard.model_runner.runner import StepRunner
from millrace_shard.process import START_AGAIN
from millrace_shard.sampling.sampler import Sampler
from millrace_testing.engines.engine_driver import PROMPT, WARMUP, Driver, forward, generate, tokens
from millrace_testing.engines.fake_engine import greedy
from millrace_testing.launcher.deployment import kept_port
from millrace_testing.models.models import save_tiny
from millrace_testing.shards.poison_shard import Poison, poisoned_main
from millrace_testing.shards.ranks import Forked

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
    # Of each warm-up: whether this rank has kept its caches, and whether an earlier start has tried the largest step.
    assert [value for value in asked if value <= 1] == [0, 0, 1, 0]
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


SECONDS = 120.0
WARMUP_REQUEST = pb.WarmupRequest(
    max_batch_prefill_tokens=64, max_batch_size=4, max_concurrent_requests=4
)
STOPS = {"STOP_SECONDS": "0.5", "ABORT_SECONDS": "60"}
"""Calls have half a second after a signal, and a slow machine a minute to end them then."""
HEALTHY, POISONED = [5, 9, 17, 42], [8, 17, 23, 42, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_tiny(path, "llama")
    return path


@contextmanager
def started(
    folder: Path, sockets: Path, settings: Mapping[str, str], *arguments: str, rank: int = 0
) -> Iterator[tuple[Forked, pb_grpc.ShardServiceStub]]:
    """A shard that may not listen yet; killed at the end if it still runs."""
    process = Forked(
        poisoned_main,
        [
            *("serve", str(folder), f"--uds-path={sockets}/shard", "--device=cpu"),
            *("--cpu-threads=1", "--disable-custom-kernels", f"--rank={rank}", *arguments),
        ],
        {f"MILLRACE_TEST_{name}": value for name, value in settings.items()},
    )
    try:
        with grpc.insecure_channel(f"unix:{sockets}/shard-{rank}") as channel:
            yield process, pb_grpc.ShardServiceStub(channel)
    finally:
        process.end()


@contextmanager
def poisoned(
    folder: Path, sockets: Path, **settings: str
) -> Iterator[tuple[Forked, pb_grpc.ShardServiceStub]]:
    """A shard that is warmed up."""
    with started(folder, sockets, settings) as (process, stub):
        stub.Warmup(WARMUP_REQUEST, wait_for_ready=True, timeout=SECONDS)
        yield process, stub


@contextmanager
def two_ranks(
    folder: Path, sockets: Path, **settings: str
) -> Iterator[list[tuple[Forked, pb_grpc.ShardServiceStub]]]:
    """A group that is warmed up; the settings are for rank 1 alone, and rank 0 stops as STOPS says."""
    with ExitStack() as stack:
        port = stack.enter_context(kept_port())
        group = ("--world-size=2", "--master-addr=127.0.0.1", f"--master-port={port}")
        first = stack.enter_context(started(folder, sockets, STOPS, *group))
        second = stack.enter_context(started(folder, sockets, settings, *group, rank=1))
        stubs = [stub for _, stub in (first, second)]
        warmups = [
            stub.Warmup.future(WARMUP_REQUEST, wait_for_ready=True, timeout=SECONDS)
            for stub in stubs
        ]
        assert warmups[0].result() == warmups[1].result()
        yield [first, second]


def wait_for_a_step(stub: pb_grpc.ShardServiceStub) -> pb.HealthResponse:
    """Until one is being executed."""
    while True:
        health: pb.HealthResponse = stub.Health(pb.HealthRequest(), timeout=SECONDS)
        if health.pending_steps:
            return health


def epoch(number: int, *prompts: list[int]) -> Iterator[pb.StepRequest]:
    """A fresh batch of these prompts, each in one block, all computed in one step."""
    yield pb.StepRequest(epoch=number, number=0, open=pb.Open())
    slots = range(len(prompts))
    change = pb.BatchChange(
        admitted=[
            pb.Sequence(slot=slot, input_ids=ids) for slot, ids in zip(slots, prompts, strict=True)
        ],
        grown_slots=slots,
        grown_blocks=[slot + 1 for slot in slots],
    )
    prefill = pb.Prefill(
        change=change, chunk_slots=slots, chunk_tokens=[len(ids) for ids in prompts]
    )
    yield pb.StepRequest(epoch=number, number=1, prefill=prefill)


def answer(stub: pb_grpc.ShardServiceStub, number: int, *prompts: list[int]) -> pb.StepResponse:
    """To the step that computes the prompts."""
    answers = list(stub.Steps(epoch(number, *prompts), timeout=SECONDS))
    last: pb.StepResponse = answers[-1]
    return last


def test_only_the_poison_breaks_a_step_and_the_shard_serves_on(
    folder: Path, tmp_path: Path
) -> None:
    settings = {"POISON": "17,23,42", "POISON_HOW": "raise", "OOM_ROWS": "2", "OOM_TOKENS": "12"}
    with poisoned(folder, tmp_path, **settings) as (_, stub):
        first = answer(stub, 1, HEALTHY)
        assert len(first.ids) == 1
        assert answer(stub, 2, HEALTHY, POISONED).error.message == "poisoned"
        for number, prompts in enumerate(([HEALTHY] * 3, [[7] * 13]), start=3):
            error = answer(stub, number, *prompts).error
            assert error.kind == pb.StepError.KIND_OUT_OF_MEMORY
        assert list(answer(stub, 5, HEALTHY).ids) == list(first.ids)


def test_a_poison_request_kills_the_shard(folder: Path, tmp_path: Path) -> None:
    settings = {"POISON": "17,23,42", "POISON_HOW": "segv"}
    with poisoned(folder, tmp_path, **settings) as (process, stub):
        with pytest.raises(grpc.RpcError):
            answer(stub, 1, POISONED)
        process.communicate(timeout=SECONDS)
        assert process.returncode == -signal.SIGSEGV


def test_a_shard_that_hangs_answers_for_its_health(folder: Path, tmp_path: Path) -> None:
    settings = {"POISON": "17,23,42", "POISON_HOW": "hang"}
    with poisoned(folder, tmp_path, **settings) as (_, stub):
        call = stub.Steps(epoch(1, POISONED), timeout=SECONDS)
        assert next(call).number == 0
        health = wait_for_a_step(stub)
        assert (health.warmed_up, health.last_step, health.pending_steps) == (True, 0, 1)


def test_a_shard_that_is_frozen_answers_nothing(folder: Path, tmp_path: Path) -> None:
    settings = {"POISON": "17,23,42", "POISON_HOW": "freeze"}
    with poisoned(folder, tmp_path, **settings) as (_, stub):
        call = stub.Steps(epoch(1, POISONED), timeout=SECONDS)
        status = grpc.StatusCode.OK
        while status is grpc.StatusCode.OK:
            status = stub.Health.future(pb.HealthRequest(), timeout=1).code()
        assert status is grpc.StatusCode.DEADLINE_EXCEEDED
        call.cancel()


def test_a_rank_whose_peer_dies_in_a_step_reports_it_and_ends(folder: Path, tmp_path: Path) -> None:
    """By itself: what it waits for in a collective will never come."""
    settings = {"POISON": "17,23,42", "POISON_HOW": "kill"}
    with two_ranks(folder, tmp_path, **settings) as ((process, stub), (peer, peer_stub)):
        calls = [each.Steps(epoch(1, POISONED), timeout=SECONDS) for each in (stub, peer_stub)]
        last = list(calls[0])[-1]
        assert "a collective of the ranks failed" in last.error.message
        process.communicate(timeout=SECONDS)
        peer.communicate(timeout=SECONDS)
        assert (process.returncode, peer.returncode) == (START_AGAIN, -signal.SIGKILL)


def test_a_rank_that_waits_in_a_collective_ends_on_sigterm(folder: Path, tmp_path: Path) -> None:
    """The rank ends long before the timeout of the collective, which is two minutes."""
    settings = {"POISON": "17,23,42", "POISON_HOW": "hang"}
    with two_ranks(folder, tmp_path, **settings) as ((process, stub), (_, peer_stub)):
        calls = [each.Steps(epoch(1, POISONED), timeout=SECONDS) for each in (stub, peer_stub)]
        assert [next(call).number for call in calls] == [0, 0]
        wait_for_a_step(stub)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=COLLECTIVE_TIMEOUT.total_seconds() / 2)
        assert process.returncode == 0


@pytest.mark.parametrize("component", ["proto", "router", "shard", "launcher"])
def test_the_product_knows_of_no_poison(component: str) -> None:
    sources = list((Path(__file__).parents[3] / component).rglob("*.py"))
    assert sources
    assert [path for path in sources if "MILLRACE_TEST" in path.read_text()] == []


def test_a_poison_is_in_order_and_without_gaps() -> None:
    poison = Poison.from_environment({"MILLRACE_TEST_POISON": "17,23,42"})
    assert poison.is_in([17, 23, 42])
    assert poison.is_in(POISONED)
    assert not poison.is_in([17, 23])
    assert not poison.is_in([17, 42, 23])
    assert not Poison.from_environment({}).is_in(POISONED)
    assert not Poison.from_environment({}).is_too_large(1000, 1000)
