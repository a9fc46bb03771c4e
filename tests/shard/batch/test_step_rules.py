"""Every message is answered once, harms no other process, and has no effect on the next epoch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import count
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest
import torch
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from millrace_proto import generate_pb2 as pb
from millrace_proto import generate_pb2_grpc as pb_grpc
from millrace_shard.arrays import Ints
from millrace_shard.batch.device_tables import BatchLimits, BlockTables
from millrace_shard.batch.sequence_table import within_budget
from millrace_shard.batch.step import StepFailure, StepReply
from millrace_shard.device import transfers
from millrace_shard.errors import StepInvalid
from millrace_shard.server.service import SERVICE_NAME, ShardService, new_server
from millrace_shard.server.wire import reply_to_pb, step_from_pb
from millrace_shard.speculation.loading import Speculation
from millrace_testing.engines.engine_driver import Driver
from millrace_testing.engines.fake_engine import greedy
from millrace_testing.engines.steps import ints

SECONDS = 30.0
T = TypeVar("T")
PROMPT = [5, 9, 2, 44, 17, 3]
UINT32, UINT64 = 2**32 - 1, 2**64 - 1
LIMITS = settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

uint32 = st.one_of(
    st.integers(0, 8), st.sampled_from([63, 64, 65, 97, 2**31 - 1, 2**31, UINT32 - 1, UINT32])
)
uint64 = st.one_of(st.integers(0, 8), st.sampled_from([2**63 - 1, 2**63, UINT64 - 1, UINT64]))
floats = st.one_of(st.floats(width=32), st.sampled_from([0.0, 1.0, -1.0, 1e-45, 3.4e38]))
column = st.lists(uint32, max_size=6)


def messages(kind: type[T], **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[T]:
    """Messages of `kind` with any of the fields left out."""
    return st.fixed_dictionaries({}, optional=fields).map(lambda chosen: kind(**chosen))


parameters = messages(
    pb.NextTokenChooserParameters,
    temperature=floats,
    top_k=uint32,
    top_p=floats,
    typical_p=floats,
    do_sample=st.booleans(),
    seed=uint64,
    repetition_penalty=floats,
    frequency_penalty=floats,
    presence_penalty=floats,
    openai_frequency_penalty=floats,
)
sequence = messages(
    pb.Sequence,
    slot=uint32,
    request_id=uint64,
    input_ids=column,
    generated_tokens=uint32,
    cached_tokens=uint32,
    parameters=parameters,
    top_n_tokens=uint32,
    prefill_logprobs=st.booleans(),
    prefill_top_n_tokens=st.integers(0, 200),
    min_new_tokens=uint32,
)
change = messages(
    pb.BatchChange,
    dropped_slots=column,
    admitted=st.lists(sequence, max_size=3),
    grown_slots=column,
    grown_blocks=column,
)


@st.composite
def consistent(draw: st.DrawFn) -> pb.Prefill:
    """A batch that could run, but for the parameters of its sequences: these have to fail alone or yield tokens."""
    rows = draw(
        st.lists(st.tuples(st.lists(st.integers(0, 96), min_size=1, max_size=6), parameters))
    )[:4]
    return pb.Prefill(
        change=pb.BatchChange(
            admitted=[
                pb.Sequence(
                    slot=slot,
                    input_ids=ids,
                    parameters=chosen,
                    top_n_tokens=draw(uint32),
                    prefill_logprobs=draw(st.booleans()),
                    min_new_tokens=draw(uint32),
                )
                for slot, (ids, chosen) in enumerate(rows)
            ],
            grown_slots=[slot for slot in range(len(rows)) for _ in range(2)],
            grown_blocks=range(1, 1 + 2 * len(rows)),
        ),
        chunk_slots=range(len(rows)),
        chunk_tokens=[len(ids) for ids, _ in rows],
    )


prefill = st.one_of(
    consistent(),
    messages(
        pb.Prefill,
        change=change,
        chunk_slots=column,
        chunk_tokens=column,
        decode_slots=column,
        decode_tokens=column,
        draft_tokens=column,
    ),
)
works: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({}),
    st.just({"open": pb.Open()}),
    st.fixed_dictionaries({"prefill": prefill}),
    st.fixed_dictionaries(
        {
            "decode": messages(
                pb.Decode,
                change=change,
                decode_slots=column,
                decode_tokens=column,
                draft_tokens=column,
            )
        }
    ),
    st.fixed_dictionaries({"filter_batch": messages(pb.FilterBatch, dropped_slots=column)}),
)
in_order = st.lists(works, max_size=6)
anyhow = st.lists(st.tuples(uint64, uint64, works), max_size=4)


warmup = messages(
    pb.WarmupRequest,
    max_batch_prefill_tokens=uint32,
    # Of a row, the tables alone cost memory, and as many as are asked for are made.
    max_batch_size=st.integers(0, 100),
    max_input_tokens=uint32,
    max_total_tokens=uint32,
    max_batch_total_tokens=uint64,
    max_concurrent_requests=uint32,
)
WARMUP_ANSWERS = (grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED)


class Served:
    """A shard on a unix socket, and epochs that were never used before."""

    def __init__(self, address: str, driver: Driver) -> None:
        self.driver = driver
        self.stub = pb_grpc.ShardServiceStub(grpc.insecure_channel(address))
        self.raw: grpc.StreamStreamMultiCallable[bytes, bytes] = grpc.insecure_channel(
            address
        ).stream_stream(f"/{SERVICE_NAME}/Steps")
        self._epochs = count(10**6)

    def epoch(self) -> int:
        return next(self._epochs)

    def serves(self) -> None:
        """A correct epoch yields the right tokens."""
        epoch = self.epoch()
        change = pb.BatchChange(
            admitted=[pb.Sequence(slot=3, input_ids=PROMPT)],
            grown_slots=[3] * 3,
            grown_blocks=[7, 1, 63],
        )
        steps: list[dict[str, object]] = [
            {"open": pb.Open()},
            {"prefill": pb.Prefill(change=change, chunk_slots=[3], chunk_tokens=[len(PROMPT)])},
        ]
        steps += [{"decode": pb.Decode(decode_slots=[3])} for _ in range(3)]
        sent = [
            pb.StepRequest(epoch=epoch, number=number, **work)  # type: ignore[arg-type]
            for number, work in enumerate(steps)
        ]
        answers = list(self.stub.Steps(iter(sent), timeout=SECONDS))
        assert [answer.ids[0] for answer in answers[1:]] == greedy(PROMPT, 4)
        assert self.stub.Health(pb.HealthRequest(), timeout=SECONDS).pending_steps == 0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    driver = Driver(speculation=Speculation(max_draft_tokens=3))
    service = ShardService(
        driver.engine, deterministic=True, prefill_logprobs=True, end=lambda: None
    )
    address = f"unix:{tmp_path_factory.mktemp('shard')}/socket"
    server = new_server(service, address)
    server.start()
    driver.warm_up()
    yield Served(address, driver)
    server.stop(grace=None).wait(SECONDS)
    driver.engine.close()


@settings(LIMITS, max_examples=8)
@given(request=warmup, first=in_order)
def test_a_warm_up_answers_and_the_next_one_serves(
    request: pb.WarmupRequest, first: list[dict[str, object]], served: Served
) -> None:
    """And so do steps over whatever it has left."""
    call = served.stub.Warmup.future(request, timeout=SECONDS)
    assert call.code() in WARMUP_ANSWERS, call.details()
    epoch = served.epoch()
    sent = [
        pb.StepRequest(epoch=epoch, number=number, **work)  # type: ignore[arg-type]
        for number, work in enumerate([{"open": pb.Open()}, *first])
    ]
    assert len(list(served.stub.Steps(iter(sent), timeout=SECONDS))) == len(sent)
    served.driver.warm_up()
    served.serves()


@LIMITS
@given(first=in_order, rest=anyhow)
@example(first=[{"decode": pb.Decode(decode_slots=[UINT32] * 3)}], rest=[(UINT64, UINT64, {})])
def test_every_step_is_answered_once_and_the_next_epoch_is_right(
    first: list[dict[str, object]], rest: list[tuple[int, int, dict[str, object]]], served: Served
) -> None:
    epoch = served.epoch()
    opened = [{"open": pb.Open()}, *first]
    sent = [
        pb.StepRequest(epoch=epoch, number=number, **work)  # type: ignore[arg-type]
        for number, work in enumerate(opened)
    ]
    sent += [
        pb.StepRequest(epoch=epoch, number=number, **work)  # type: ignore[arg-type]
        for epoch, number, work in rest
    ]
    answers = list(served.stub.Steps(iter(sent), timeout=SECONDS))
    assert [(a.epoch, a.number) for a in answers] == [(s.epoch, s.number) for s in sent]
    served.serves()


@LIMITS
@given(data=st.lists(st.binary(max_size=60), max_size=4))
def test_bytes_that_may_be_no_message_end_their_stream_at_most(
    data: list[bytes], served: Served
) -> None:
    opening = pb.StepRequest(epoch=served.epoch(), number=0, open=pb.Open()).SerializeToString()
    good = 0
    with contextlib.suppress(DecodeError):
        for message in data:
            pb.StepRequest.FromString(message)
            good += 1
    call = served.raw(iter([opening, *data]), timeout=SECONDS)
    answers: list[bytes] = []
    with contextlib.suppress(grpc.RpcError):
        answers.extend(call)
    if call.code() is grpc.StatusCode.OK:
        assert len(answers) == 1 + len(data)
    else:
        assert call.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
        assert good < len(data), "only what is no message may end a stream"
    served.serves()


@LIMITS
@given(data=st.binary(max_size=200))
def test_bytes_that_are_a_message_become_a_step_and_its_answer_a_message(
    data: bytes, served: Served
) -> None:
    try:
        message = pb.StepRequest.FromString(data)
    except DecodeError:
        return
    step = step_from_pb(message)
    reply: StepReply = served.driver.engine.step(step).result(SECONDS)
    answer = reply_to_pb(reply, with_tokens=True)
    assert (answer.epoch, answer.number) == (message.epoch, message.number)
    assert answer.HasField("error") == isinstance(reply.outcome, StepFailure)


@pytest.mark.parametrize(
    ("num_required", "extras", "filled"),
    [
        (32, [0, 3, 0], [0, 0, 0]),
        (31, [3, 2], [1, 0]),
        (27, [0, 2, 4], [0, 2, 3]),
        (27, [0, 2, 3], [0, 2, 3]),
        (32, [7], [0]),
        (32, [8], [8]),
        (32, [3, 3, 2], [3, 3, 2]),
        (31, [7], [1]),
        (31, [8], [8]),
        (16, [3], [0]),
        (16, [4], [4]),
        (1, [16], [16]),
        (512, [7], [0]),
        (512, [8], [8]),
    ],
)
def test_a_tile_is_begun_only_where_it_is_worth_it(
    num_required: int, extras: list[int], filled: list[int]
) -> None:
    assert within_budget(ints(extras), num_required=num_required, tile=16).tolist() == filled


@given(
    extras=st.lists(st.integers(0, 20), max_size=40),
    num_required=st.integers(1, 600),
    tile=st.sampled_from([1, 4, 16]),
)
def test_all_extra_positions_are_filled_or_those_that_fit_the_last_tile(
    extras: list[int], num_required: int, tile: int
) -> None:
    filled = within_budget(ints(extras), num_required=num_required, tile=tile)
    assert (filled >= 0).all()
    assert (filled <= ints(extras)).all()
    waiting = sum(extras) - int(filled.sum())
    if waiting:
        tiles = -(-num_required // tile)
        assert num_required + int(filled.sum()) == tiles * tile
        assert tile > 1
        beyond = num_required + sum(extras) - tiles * tile
        assert beyond < tile / 2
        assert beyond < num_required // 4
        served = np.flatnonzero(filled < ints(extras))
        assert not filled[served[0] + 1 :].any(), "a row before one that is served waits"


TABLE_LIMITS = BatchLimits(
    max_batch_size=3,
    max_tokens=63,
    num_blocks=20,
    block_size=16,
    vocab_size=9,
    padding_block=20,
)


@pytest.fixture(params=[True, False], ids=["at once", "later"])
def tables(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> BlockTables:
    monkeypatch.setattr(transfers, "is_synchronous", lambda _: request.param)
    return BlockTables(TABLE_LIMITS, torch.device("cpu"))


def grow(tables: BlockTables, slots: list[int], blocks: list[int]) -> Ints:
    return tables.grow(ints(slots), ints(blocks), ints([0] * len(slots))).blocks


def test_readers_see_all_changes(tables: BlockTables) -> None:
    grow(tables, [1, 1, 0], [5, 6, 7])
    assert tables.tables[:, :3].tolist() == [[7, 0, 0], [5, 6, 0], [0, 0, 0], [20, 0, 0]]
    grow(tables, [1], [8])
    assert tables.tables[1].tolist() == [5, 6, 8, 0]


def test_the_last_change_of_an_entry_counts(tables: BlockTables) -> None:
    """A slot changes hands before the device has seen its former blocks."""
    grow(tables, [0, 0], [1, 2])
    tables.drop(ints([0]))
    grow(tables, [0, 0], [9, 10])
    assert tables.tables[0, :2].tolist() == [9, 10]


def test_changes_are_taken_once(tables: BlockTables) -> None:
    grow(tables, [2, 0], [3, 4])
    changes = tables.take_changes()
    assert not len(tables.take_changes())
    tables.change(torch.from_numpy(changes))
    assert tables.tables[:, 0].tolist() == [4, 0, 3, 20]


def test_an_epoch_leaves_no_changes(tables: BlockTables) -> None:
    grow(tables, [0], [3])
    tables.clear()
    assert not len(tables.take_changes())


def test_what_follows_kept_positions_is_cleared(tables: BlockTables) -> None:
    blocks, rows = tables.grow(ints([1] * 4 + [0]), ints([5, 6, 7, 8, 9]), ints([20] * 4 + [32]))
    assert blocks.tolist() == [7, 8]
    assert rows.tolist() == list(range(6 * 16 + 4, 7 * 16))
    blocks, rows = tables.grow(ints([0, 0]), ints([10, 11]), ints([32, 32]))
    assert (blocks.tolist(), rows.tolist()) == ([11], [])


def test_a_half_filled_block_has_one_owner_and_a_full_one_may_have_more(
    tables: BlockTables,
) -> None:
    tables.grow(ints([1, 1]), ints([5, 6]), ints([20, 20]))
    with pytest.raises(StepInvalid, match="another owner"):
        tables.grow(ints([0, 0]), ints([5, 6]), ints([20, 20]))
    blocks, rows = tables.grow(ints([0, 0]), ints([5, 7]), ints([16, 16]))
    assert (blocks.tolist(), rows.tolist()) == ([7], [])
