"""Sampling parameters on the wire: what the router writes is what the shard reads."""

from __future__ import annotations

from dataclasses import fields, replace

from millrace_proto import generate_pb2 as pb
from millrace_proto.sampling import Dry, Sampling, SequenceRules
from millrace_router.request.request import ValidRequest
from millrace_router.shards.wire import parameters_to_pb

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


def test_what_an_older_router_wrote_has_no_rules() -> None:
    arrived = Sampling.from_pb(pb.NextTokenChooserParameters(temperature=1))
    assert not arrived.rules
    assert (arrived.top_n_sigma, arrived.xtc_probability) == (0, 0)
