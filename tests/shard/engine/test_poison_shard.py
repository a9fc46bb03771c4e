"""The shard that tests poison: real processes, broken on purpose, and one that is asked to stop while it hangs."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest

from millrace_proto import generate_pb2 as pb
from millrace_proto import generate_pb2_grpc as pb_grpc
from millrace_shard.device.process_group import COLLECTIVE_TIMEOUT
from millrace_testing.launcher.ports import kept_port
from millrace_testing.models.models import save_tiny
from millrace_testing.shards.forked import Forked
from millrace_testing.shards.poison_shard import Poison, poisoned_main

SECONDS = 120.0
WARMUP = pb.WarmupRequest(max_batch_prefill_tokens=64, max_batch_size=4, max_concurrent_requests=4)
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
        stub.Warmup(WARMUP, wait_for_ready=True, timeout=SECONDS)
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
            stub.Warmup.future(WARMUP, wait_for_ready=True, timeout=SECONDS) for stub in stubs
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


def test_poison_kills(folder: Path, tmp_path: Path) -> None:
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
        assert (process.returncode, peer.returncode) == (1, -signal.SIGKILL)


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
