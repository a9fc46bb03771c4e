"""The messages of the shards: columns of a step's answer, and parameters."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace_proto import generate_pb2 as pb
from millrace_proto.sampling import Dry, Sampling, SequenceRules
from millrace_router.request.request import ValidRequest
from millrace_router.request.token_stream import PromptChunk
from millrace_router.scheduler.block_ledger import Seals
from millrace_router.scheduler.step_plan import StepPlan
from millrace_router.shards.step_result import result_from_pb
from millrace_router.shards.wire import open_to_pb, parameters_to_pb, plan_to_pb, stored_from_pb

COUNTS = st.lists(st.integers(0, 3), max_size=6) | st.lists(st.just(1), max_size=6)


@given(counts=COUNTS, with_top=st.booleans())
def test_each_token_has_its_slot_and_candidates(counts: list[int], *, with_top: bool) -> None:
    slots = [10 + row for row in range(len(counts))]
    expected: list[tuple[int, int, float, object]] = []
    answer = pb.StepResponse(number=7, slots=slots, counts=counts)
    for slot, count in zip(slots, counts, strict=True):
        for _ in range(count):
            token_id = len(expected)
            top = [(token_id + index, -float(index)) for index in range(token_id % 3)]
            answer.ids.append(token_id)
            answer.logprobs.append(-token_id / 2)
            if with_top:
                answer.top_counts.append(len(top))
                answer.top_ids.extend(id_ for id_, _ in top)
                answer.top_logprobs.extend(logprob for _, logprob in top)
            expected.append((slot, token_id, -token_id / 2, tuple(top) if with_top else ()))
    result = result_from_pb([answer])
    assert list(result.tokens) == expected
    assert list(result.counts) == list(zip(slots, counts, strict=True))


@given(rows=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2)), max_size=4))
def test_each_prompt_has_its_scores_and_candidates(rows: list[tuple[int, int]]) -> None:
    answer, expected = pb.StepResponse(), []
    for slot, (count, width) in enumerate(rows):
        answer.prefill_slots.append(slot)
        answer.prefill_counts.append(count)
        answer.prefill_top_counts.append(width)
        logprobs = [-slot - index / 4 for index in range(count)]
        ids = [100 * slot + index for index in range(count * width)]
        answer.prefill_logprobs.extend(logprobs)
        answer.prefill_top_ids.extend(ids)
        answer.prefill_top_logprobs.extend(-float(id_) for id_ in ids)
        expected.append((slot, PromptChunk(logprobs, ids, [-float(id_) for id_ in ids])))
    if not any(width for _, width in rows):
        answer.ClearField("prefill_top_counts")
    assert list(result_from_pb([answer]).prompt_logprobs) == expected


@pytest.mark.parametrize("column", ["ids", "logprobs", "counts", "slots"])
def test_columns_of_different_length_are_an_error(column: str) -> None:
    answer = pb.StepResponse(slots=[1, 2], counts=[1, 1], ids=[5, 6], logprobs=[-1.0, -2.0])
    getattr(answer, column).append(1)
    with pytest.raises(ValueError, match=r"length|shorter|longer"):
        result_from_pb([answer])


@pytest.mark.parametrize("chunks", [[], [(7, 3)]], ids=["decode", "prefill"])
def test_allowed_positions_are_two_columns_next_to_the_slots(
    chunks: list[tuple[int, int]],
) -> None:
    plan: StepPlan = StepPlan(
        decodes=[4, 2], decode_tokens=[5, 1], draft_tokens=[3, 0], chunks=chunks
    )
    message = plan_to_pb(plan, epoch=1, number=1)
    work = message.prefill if chunks else message.decode
    assert list(work.decode_slots) == [4, 2]
    assert list(work.decode_tokens) == [5, 1]
    assert list(work.draft_tokens) == [3, 0]


def test_positions_filled_by_decodes_are_reported_by_slot() -> None:
    answer = pb.StepResponse(
        slots=[4, 2],
        counts=[0, 3],
        ids=[7, 8, 9],
        logprobs=[-1.0] * 3,
        computed_slots=[4, 2],
        computed_positions=[30, 12],
        drafted_tokens=[0, 4],
    )
    result = result_from_pb([answer])
    assert result.computed == ((4, 30, 0), (2, 12, 4))
    assert [(slot, id_) for slot, id_, _, _ in result.tokens] == [(2, 7), (2, 8), (2, 9)]
    answer.drafted_tokens.append(1)
    with pytest.raises(ValueError, match=r"longer|shorter"):
        result_from_pb([answer])


def test_a_step_that_changes_nothing_sends_no_changes() -> None:
    plan = StepPlan(decodes=[3])
    message = plan_to_pb(plan, epoch=1, number=2)
    assert message == pb.StepRequest(epoch=1, number=2, decode=pb.Decode(decode_slots=[3]))
    plan.grown.append((3, 9))
    change = plan_to_pb(plan, epoch=1, number=3).decode.change
    assert change == pb.BatchChange(grown_slots=[3], grown_blocks=[9])


SAMPLED = Sampling(
    temperature=0.5,
    top_k=3,
    top_p=0.75,
    typical_p=0.875,
    do_sample=True,
    seed=2**64 - 1,
    repetition_penalty=1.5,
    frequency_penalty=0.25,
    presence_penalty=-1.5,
    openai_frequency_penalty=0.5,
    min_p=0.125,
    top_n_sigma=1.25,
    xtc_probability=0.5,
    xtc_threshold=0.0625,
    watermark=True,
    bias=((3, 0.5), (70000, -1.0)),
    rules=SequenceRules(
        allowed_ids=(1, 5),
        bad_words=((1,), (2, 3, 4)),
        dry=Dry(multiplier=0.75, base=1.75, allowed_length=2, window=64, breakers=(9, 11)),
    ),
)
"""No value is its default, and all are exact in float32."""
REQUEST = ValidRequest(
    input_ids=(1,),
    max_new_tokens=9,
    sampling=SAMPLED,
    stop_token_ids=(6, 8),
    min_new_tokens=2,
)


def read(request: ValidRequest) -> Sampling:
    """What a shard reads of what the router writes."""
    message = parameters_to_pb(request)
    return Sampling.from_pb(pb.NextTokenChooserParameters.FromString(message.SerializeToString()))


def test_seals_are_columns_next_to_the_changes() -> None:
    seals = Seals(unsealed=[9], sealed={4: b"k" * 32, 7: b"l" * 32})
    change = plan_to_pb(StepPlan(decodes=[2], seals=seals), epoch=1, number=1).decode.change
    assert list(change.unsealed_blocks) == [9]
    assert list(change.sealed_blocks) == [4, 7]
    assert list(change.sealed_keys) == [b"k" * 32, b"l" * 32]


def test_a_directory_is_read_by_block() -> None:
    largest = (1 << 64) - 1
    columns = {"blocks": [4, 6], "owners": [0, largest], "generations": [largest, 2]}
    message = pb.BlocksResponse(life=largest, keys=[b"k" * 32, b""], **columns)
    stored = stored_from_pb(message)
    assert stored.life == largest
    assert stored.blocks == {4: (0, largest, b"k" * 32), 6: (largest, 2, b"")}


def test_an_epoch_has_the_life_of_its_blocks() -> None:
    assert [open_to_pb(3, life).open.life for life in (0, 1 << 63)] == [0, 1 << 63]


def test_every_parameter_arrives() -> None:
    defaults, arrived = Sampling(), read(REQUEST)
    for field in fields(Sampling):
        value = getattr(SAMPLED, field.name)
        assert value != getattr(defaults, field.name), field.name
        if field.name != "rules":
            assert getattr(arrived, field.name) == value, field.name
    rules, dry = SAMPLED.rules, SAMPLED.rules.dry
    assert (arrived.rules.allowed_ids, arrived.rules.bad_words) == (
        rules.allowed_ids,
        rules.bad_words,
    )
    assert dry is not None
    assert arrived.rules.dry is not None
    assert all(
        getattr(arrived.rules.dry, field.name) == getattr(dry, field.name) for field in fields(Dry)
    )


def test_stop_tokens_are_sent_only_for_a_minimum() -> None:
    assert read(REQUEST).rules.stop_ids == (6, 8)
    assert not read(replace(REQUEST, min_new_tokens=0)).rules.stop_ids


def test_messages_of_older_routers_have_no_rules() -> None:
    arrived = Sampling.from_pb(pb.NextTokenChooserParameters(temperature=1))
    assert not arrived.rules
    assert (arrived.top_n_sigma, arrived.xtc_probability) == (0, 0)
