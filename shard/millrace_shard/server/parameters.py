"""The sampling parameters of a sequence on the wire."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from millrace_proto import generate_pb2 as pb
from millrace_shard.batch.sequence import SamplingParameters
from millrace_shard.sampling.sequence_rules.rules import Dry, SequenceRules


def parameters_from_pb(message: pb.Sequence) -> SamplingParameters:
    """Read the parameters of the choice of the next token."""
    if not message.HasField("parameters"):
        return SamplingParameters()
    p = message.parameters
    return SamplingParameters(
        temperature=p.temperature,
        top_k=p.top_k,
        top_p=p.top_p,
        typical_p=p.typical_p,
        do_sample=p.do_sample,
        seed=p.seed,
        repetition_penalty=p.repetition_penalty,
        frequency_penalty=p.frequency_penalty,
        presence_penalty=p.presence_penalty,
        openai_frequency_penalty=p.openai_frequency_penalty,
        min_p=p.min_p,
        watermark=p.watermark,
        bias=tuple(zip(p.bias_ids, p.bias_values, strict=False)),
        top_n_sigma=p.top_n_sigma,
        xtc_probability=p.xtc_probability,
        xtc_threshold=p.xtc_threshold,
        rules=SequenceRules(
            allowed_ids=tuple(p.allowed_ids),
            bad_words=tuple(_words(p)),
            stop_ids=tuple(p.stop_ids),
            dry=_dry(p.dry) if p.HasField("dry") else None,
        ),
    )


def _words(p: pb.NextTokenChooserParameters) -> Iterator[tuple[int, ...]]:
    ids = iter(p.bad_word_ids)
    return (tuple(islice(ids, length)) for length in p.bad_word_lengths)


def _dry(message: pb.DryPenalty) -> Dry:
    return Dry(
        multiplier=message.multiplier,
        base=message.base,
        allowed_length=message.allowed_length,
        window=message.window,
        breakers=tuple(message.breaker_ids),
    )
