"""The sampling parameters of a request on the wire."""

from __future__ import annotations

from millrace_proto import generate_pb2 as pb
from millrace_router.request.request import Dry, ValidRequest


def parameters_to_pb(request: ValidRequest) -> pb.NextTokenChooserParameters:
    """Write the parameters of the choice of the next token."""
    sampling, rules = request.sampling, request.sampling.rules
    return pb.NextTokenChooserParameters(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        typical_p=sampling.typical_p,
        do_sample=sampling.samples,
        seed=sampling.seed,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        openai_frequency_penalty=sampling.openai_frequency_penalty,
        min_p=sampling.min_p,
        watermark=sampling.watermark,
        bias_ids=[id_ for id_, _ in sampling.bias],
        bias_values=[value for _, value in sampling.bias],
        top_n_sigma=sampling.top_n_sigma,
        xtc_probability=sampling.xtc_probability,
        xtc_threshold=sampling.xtc_threshold,
        allowed_ids=rules.allowed_ids,
        bad_word_ids=[id_ for word in rules.bad_words for id_ in word],
        bad_word_lengths=[len(word) for word in rules.bad_words],
        # Only the ban before a minimum needs them: the router ends the sequence.
        stop_ids=request.stop_token_ids if request.min_new_tokens else (),
        dry=None if rules.dry is None else _dry_to_pb(rules.dry),
    )


def _dry_to_pb(dry: Dry) -> pb.DryPenalty:
    return pb.DryPenalty(
        multiplier=dry.multiplier,
        base=dry.base,
        allowed_length=dry.allowed_length,
        window=dry.window,
        breaker_ids=dry.breakers,
    )
