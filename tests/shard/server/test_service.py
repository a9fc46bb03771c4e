"""The gRPC service over a unix socket, with a real engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Event

import grpc
import numpy as np
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from millrace_proto import generate_pb2 as pb
from millrace_proto import generate_pb2_grpc as pb_grpc
from millrace_shard.device.process_group import CollectiveError, ProcessGroup
from millrace_shard.device.pulse import PULSE
from millrace_shard.engine.engine import Engine
from millrace_shard.engine.loaded_model import LoadedModel
from millrace_shard.engine.warmup import MemoryLimits
from millrace_shard.server.service import SERVICE_NAME, ShardService, new_server
from millrace_testing.engines.fake_engine import (
    BLOCK_SIZE,
    EOS_TOKEN_ID,
    VOCAB_SIZE,
    FakeModel,
    fake_kernels,
    greedy,
    logits_for,
)

PROMPT = [5, 9, 2, 44, 17, 3]
SECONDS = 30.0
WARMUP = pb.WarmupRequest(max_batch_prefill_tokens=32, max_batch_size=4, max_concurrent_requests=4)


class Group(ProcessGroup):
    """A rank without real peers."""

    def minimum(self, value: int) -> int:
        """This rank's own."""
        return value


@dataclass
class Shard:
    """A server and its engine."""

    engine: Engine
    service: ShardService
    model: FakeModel
    address: str
    stub: pb_grpc.ShardServiceStub
    ends: list[None]
    """One for each time that the router ended it."""

    def health(self) -> pb.HealthResponse:
        """The progress of the engine."""
        answer: pb.HealthResponse = self.stub.Health(pb.HealthRequest(), timeout=SECONDS)
        return answer


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Shard]]:
    """Starts shards, each on its own socket, and stops them."""
    endings: list[Callable[[], object]] = []

    def start(*, rank: int = 0, prefill_logprobs: bool = True) -> Shard:
        model = FakeModel()
        engine = Engine(
            limits=MemoryLimits(kv_memory=64 * BLOCK_SIZE * 8),
            device=torch.device("cpu"),
            cpu_threads=1,
        )
        engine.attach(
            LoadedModel(
                model=model,
                kernels=fake_kernels(),
                group=Group(rank, 2, torch.device("cpu")) if rank else ProcessGroup.single(),
                device=torch.device("cpu"),
                dtype=torch.float32,
            )
        )
        engine.start()
        ends: list[None] = []
        service = ShardService(
            engine,
            deterministic=True,
            prefill_logprobs=prefill_logprobs,
            end=lambda: ends.append(None),
        )
        address = f"unix:{tmp_path}/shard-{rank}"
        server = new_server(service, address)
        server.start()
        channel = grpc.insecure_channel(address)
        endings.extend([channel.close, lambda: server.stop(grace=None).wait(SECONDS), engine.close])
        return Shard(engine, service, model, address, pb_grpc.ShardServiceStub(channel), ends)

    yield start
    for end in endings:
        end()


@pytest.fixture
def shard(start: Callable[..., Shard]) -> Shard:
    """A shard that is warmed up."""
    shard = start()
    shard.stub.Warmup(WARMUP, timeout=SECONDS)
    return shard


class Steps:
    """A stream of steps, written and read by hand."""

    def __init__(self, shard: Shard, epoch: int) -> None:
        self.requests: SimpleQueue[pb.StepRequest | None] = SimpleQueue()
        self.call = shard.stub.Steps(iter(self.requests.get, None), timeout=SECONDS)
        self.epoch = epoch
        self.number = -1

    def send(self, **work: object) -> None:
        self.number += 1
        self.requests.put(pb.StepRequest(epoch=self.epoch, number=self.number, **work))  # type: ignore[arg-type]

    def read(self) -> pb.StepResponse:
        answer: pb.StepResponse = next(self.call)
        return answer

    def ask(self, **work: object) -> pb.StepResponse:
        self.send(**work)
        return self.read()

    def open(self) -> pb.StepResponse:
        return self.ask(open=pb.Open())


def prefill(
    slot: int = 0, ids: list[int] = PROMPT, first_block: int = 1, **fields: object
) -> pb.Prefill:
    blocks = range(first_block, first_block + len(ids) // BLOCK_SIZE + 3)
    return pb.Prefill(
        change=pb.BatchChange(
            admitted=[
                pb.Sequence(slot=slot, request_id=77, input_ids=ids, **fields)  # type: ignore[arg-type]
            ],
            grown_slots=[slot] * len(blocks),
            grown_blocks=list(blocks),
        ),
        chunk_slots=[slot],
        chunk_tokens=[len(ids)],
    )


def decode(*slots: int) -> pb.Decode:
    return pb.Decode(decode_slots=slots)


def test_info_describes_the_loaded_model(start: Callable[..., Shard]) -> None:
    shard = start(rank=1, prefill_logprobs=False)
    info = shard.stub.Info(pb.InfoRequest(), timeout=SECONDS)
    assert info == pb.InfoResponse(
        model_type="fake",
        dtype="float32",
        device_type="cpu",
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=64,
        eos_token_ids=[EOS_TOKEN_ID],
        block_size=BLOCK_SIZE,
        rank=1,
        world_size=2,
        attention="fake",
        deterministic=True,
        prefill_logprobs=False,
        kv_cache_dtype="float32",
        hidden_size=1,
        group=shard.engine.loaded.group.id,
    )


def test_only_the_group_that_is_meant_ends(start: Callable[..., Shard]) -> None:
    shard = start()
    group = shard.engine.loaded.group.id
    for asked in (group + 1, group):
        request = pb.EndRequest(group=asked, reason="a rank is lost")
        assert shard.stub.End(request, timeout=SECONDS).ends == (asked == group)
        assert shard.ends == [None] * (asked == group)


def test_warmup_answers_with_the_capacity(start: Callable[..., Shard]) -> None:
    answer = start().stub.Warmup(WARMUP, timeout=SECONDS)
    assert answer == pb.WarmupResponse(
        num_blocks=64,
        max_batch_total_tokens=63 * BLOCK_SIZE,
        max_input_tokens=63,
        max_total_tokens=64,
        kv_bytes_per_token=8,
    )


def test_limits_that_do_not_fit_are_the_operators_error(start: Callable[..., Shard]) -> None:
    request = pb.WarmupRequest(
        max_batch_prefill_tokens=8,
        max_batch_size=4,
        max_total_tokens=64,
        max_batch_total_tokens=40,
        max_concurrent_requests=4,
    )
    with pytest.raises(grpc.RpcError) as caught:
        start().stub.Warmup(request, timeout=SECONDS)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    details = caught.value.details() or ""
    assert details.startswith("Not enough memory to handle `max_total_tokens`=64: they take")


def test_a_failed_warm_up_is_reported_and_the_next_one_succeeds(
    start: Callable[..., Shard],
) -> None:
    shard = start()

    def fail(_: object) -> None:
        raise ValueError("no such layer")

    shard.model.before_forward = fail
    with pytest.raises(grpc.RpcError) as caught:
        shard.stub.Warmup(WARMUP, timeout=SECONDS)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert caught.value.details() == "no such layer"
    assert not shard.health().warmed_up
    shard.model.before_forward = lambda _: None
    shard.stub.Warmup(WARMUP, timeout=SECONDS)
    assert shard.health().warmed_up


def test_a_warm_up_that_loses_the_group_reports_the_shards_end(
    start: Callable[..., Shard],
) -> None:
    """UNAVAILABLE, so the router may wait for a restarted shard."""
    shard = start()

    def lose(_: object) -> None:
        raise CollectiveError("a collective of the ranks failed")

    shard.model.before_forward = lose
    with pytest.raises(grpc.RpcError) as caught:
        shard.stub.Warmup(WARMUP, timeout=SECONDS)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert caught.value.details() == "a collective of the ranks failed"


def test_a_sequence_is_computed_from_prompt_to_end(shard: Shard) -> None:
    steps = Steps(shard, 5)
    assert steps.open() == pb.StepResponse(epoch=5, number=0, timings=pb.Timings())
    first = steps.ask(prefill=prefill(top_n_tokens=2, prefill_logprobs=True))
    assert (first.epoch, first.number) == (5, 1)
    assert (list(first.slots), list(first.counts)) == ([0], [1])
    assert list(first.ids) == greedy(PROMPT, 1)
    best = logits_for(PROMPT).log_softmax(-1).topk(2)
    assert list(first.logprobs) == pytest.approx([float(best.values[0])], abs=1e-6)
    assert list(first.top_counts) == [2]
    assert list(first.top_ids) == best.indices.tolist()
    assert (list(first.prefill_slots), list(first.prefill_counts)) == ([0], [6])
    assert np.isnan(first.prefill_logprobs[0])
    assert not np.isnan(list(first.prefill_logprobs)[1:]).any()
    assert first.timings.HasField("concat_ns")
    result = list(first.ids)
    for _ in range(5):
        result += steps.ask(decode=decode(0)).ids
    assert result == greedy(PROMPT, 6)
    dropped = steps.ask(filter_batch=pb.FilterBatch(dropped_slots=[0]))
    assert not dropped.HasField("error")
    assert steps.ask(decode=decode(0)).error.kind == pb.StepError.KIND_FAILED
    assert steps.ask(filter_batch=pb.FilterBatch()).error.kind == pb.StepError.KIND_REFUSED


def test_parameters_reach_the_sampler(shard: Shard) -> None:
    steps = Steps(shard, 5)
    steps.open()
    parameters = pb.NextTokenChooserParameters(
        temperature=1.0, top_k=1, top_p=1.0, typical_p=1.0, do_sample=True, seed=2**64 - 1,
        repetition_penalty=1e6,
    )  # fmt: skip
    first = steps.ask(prefill=prefill(parameters=parameters))
    seen = set(PROMPT)
    expected = [
        score / 1e6 if i in seen and score > 0 else score
        for i, score in enumerate(logits_for(PROMPT).tolist())
    ]
    assert list(first.ids) == [int(np.argmax(expected))]
    assert list(first.logprobs) == [0.0]


def test_two_steps_are_in_flight_and_health_answers_meanwhile(shard: Shard) -> None:
    gate, entered = Event(), Event()

    def block(_: object) -> None:
        entered.set()
        assert gate.wait(SECONDS)

    shard.model.before_forward = block
    steps = Steps(shard, 5)
    steps.open()
    steps.send(prefill=prefill())
    steps.send(decode=decode(0))
    assert entered.wait(SECONDS)
    while shard.health().pending_steps < 2:
        pass
    assert shard.health().last_step == 0
    gate.set()
    answers = [steps.read(), steps.read()]
    assert [answer.number for answer in answers] == [1, 2]
    assert [answer.ids[0] for answer in answers] == greedy(PROMPT, 2)
    health = shard.health()
    assert (health.last_step, health.pending_steps) == (2, 0)


def test_the_pulse_stands_still_while_a_step_is_stuck_and_goes_on_with_the_next_layer(
    shard: Shard,
) -> None:
    gate, entered = SimpleQueue[None](), SimpleQueue[None]()

    def compute_layers(_: object) -> None:
        for _ in range(3):
            entered.put(None)
            gate.get(timeout=SECONDS)
            PULSE.advance()
        entered.put(None)

    shard.model.before_forward = compute_layers
    steps = Steps(shard, 5)
    steps.open()
    steps.send(prefill=prefill())
    pulses = []
    for _ in range(3):
        entered.get(timeout=SECONDS)
        pulses += [shard.health().pulse, shard.health().pulse]
        gate.put(None)
    entered.get(timeout=SECONDS)
    assert steps.read().number == 1
    assert pulses[::2] == pulses[1::2]
    assert pulses[0] < pulses[2] < pulses[4]


def test_a_broken_stream_ends_its_epoch(shard: Shard) -> None:
    steps = Steps(shard, 5)
    steps.open()
    steps.ask(prefill=prefill())
    batch = shard.engine.submit(lambda: shard.engine._warmed_up).result(SECONDS).runner.batch  # type: ignore[union-attr]
    assert len(batch) == 1
    steps.call.cancel()
    while len(batch):
        shard.engine.submit(lambda: None).result(SECONDS)
    again = Steps(shard, 6)
    again.open()
    assert list(again.ask(prefill=prefill()).ids) == greedy(PROMPT, 1)


def test_a_new_epoch_takes_over_and_continues_after_the_old_streams_end(shard: Shard) -> None:
    old = Steps(shard, 5)
    old.open()
    old.ask(prefill=prefill())
    new = Steps(shard, 6)
    new.open()
    assert old.ask(decode=decode(0)).error.kind == pb.StepError.KIND_REFUSED
    assert list(new.ask(prefill=prefill()).ids) == greedy(PROMPT, 1)
    old.requests.put(None)
    assert list(old.call) == []
    assert list(new.ask(decode=decode(0)).ids) == greedy(PROMPT, 2)[1:]


def test_steps_need_an_open_epoch_and_known_work(shard: Shard) -> None:
    steps = Steps(shard, 5)
    steps.number = 0
    assert steps.ask(decode=decode(0)).error.kind == pb.StepError.KIND_REFUSED
    steps = Steps(shard, 6)
    steps.open()
    assert steps.ask().error.kind == pb.StepError.KIND_FAILED


def test_other_ranks_answer_with_only_the_checksum(
    shard: Shard, start: Callable[..., Shard]
) -> None:
    other = start(rank=1)
    other.stub.Warmup(WARMUP, timeout=SECONDS)
    answers = []
    for each in (shard, other):
        steps = Steps(each, 5)
        steps.open()
        asked = prefill(top_n_tokens=2, prefill_logprobs=True, prefill_top_n_tokens=1)
        answers.append(steps.ask(prefill=asked))
    assert answers[0].checksum == answers[1].checksum != 0
    assert answers[0].ids
    columns = ("slots", "counts", "ids", "logprobs", "top_ids", "prefill_logprobs")
    for column in (*columns, "prefill_top_ids"):
        assert not getattr(answers[1], column)


def test_prompts_have_candidates_where_requested(shard: Shard) -> None:
    steps = Steps(shard, 5)
    steps.open()
    answer = steps.ask(prefill=prefill(prefill_logprobs=True, prefill_top_n_tokens=2))
    assert list(answer.ids) == greedy(PROMPT, 1)
    assert list(answer.prefill_top_counts) == [2]
    best = [logits_for(PROMPT[:i]).log_softmax(-1).topk(2) for i in range(1, len(PROMPT))]
    assert list(answer.prefill_top_ids[:2]) == [0, 0]
    assert np.isnan(answer.prefill_top_logprobs[:2]).all()
    ids = [id_ for each in best for id_ in each.indices.tolist()]
    assert list(answer.prefill_top_ids[2:]) == ids
    values = [value for each in best for value in each.values.tolist()]
    assert list(answer.prefill_top_logprobs[2:]) == pytest.approx(values, abs=1e-6)


def test_the_operators_leave_is_passed_on_and_not_insisted_on(start: Callable[..., Shard]) -> None:
    shard = start(prefill_logprobs=False)
    assert not shard.stub.Info(pb.InfoRequest(), timeout=SECONDS).prefill_logprobs
    shard.stub.Warmup(WARMUP, timeout=SECONDS)
    steps = Steps(shard, 5)
    steps.open()
    answer = steps.ask(prefill=prefill(prefill_logprobs=True))
    assert list(answer.prefill_counts) == [len(PROMPT)]
    assert not answer.prefill_top_counts


def test_failed_rows_are_named(shard: Shard) -> None:
    shard.model.poison = 44
    steps = Steps(shard, 5)
    steps.open()
    answer = steps.ask(prefill=prefill(3))
    assert list(answer.failed_slots) == [3]
    assert not answer.slots
    assert not answer.HasField("error")


def test_long_prompts_pass(shard: Shard) -> None:
    """Messages above gRPC's default limit of 4 MiB are read; the sequence of this one is too long for the shard."""
    steps = Steps(shard, 5)
    steps.open()
    answer = steps.ask(prefill=prefill(ids=[90] * 5_000_000))
    assert list(answer.failed_slots) == [0]


def test_streams_end_once_their_steps_are_answered(shard: Shard) -> None:
    steps = Steps(shard, 5)
    steps.open()
    assert list(steps.ask(prefill=prefill()).ids) == greedy(PROMPT, 1)
    shard.service.end_streams()
    assert list(steps.call) == []


def test_the_standard_health_service_and_reflection_answer(shard: Shard) -> None:
    with grpc.insecure_channel(shard.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE_NAME):
            request = health_pb2.HealthCheckRequest(service=name)
            status = health.Check(request, timeout=SECONDS).status
            assert status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        listing = reflection_pb2.ServerReflectionRequest(list_services="")
        answer = next(reflection.ServerReflectionInfo(iter([listing]), timeout=SECONDS))
        assert SERVICE_NAME in {s.name for s in answer.list_services_response.service}


def test_a_dead_engine_is_not_healthy(shard: Shard) -> None:
    with grpc.insecure_channel(shard.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        watched = health.Watch(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        assert next(watched).status == health_pb2.HealthCheckResponse.SERVING
        shard.engine.close()
        assert next(watched).status == health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE_NAME):
            request = health_pb2.HealthCheckRequest(service=name)
            status = health.Check(request, timeout=SECONDS).status
            assert status == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(grpc.RpcError) as caught:
        shard.health()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
