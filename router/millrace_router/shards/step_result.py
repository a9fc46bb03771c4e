"""The answer of the shards to a step, read from the messages of the wire."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, repeat

from millrace_proto import generate_pb2 as pb
from millrace_router.request.token_stream import PromptChunk


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Shard-side durations in seconds."""

    forward: float
    decode: float
    total: float
    concat: float | None


Candidates = Sequence[tuple[int, float]]
"""Token ids and log probabilities, most likely first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The answer to a step, merged over the ranks."""

    number: int
    tokens: Sequence[tuple[int, int, float, Candidates]]
    """(slot, token id, log probability, other candidates); a slot's tokens stand together, in order."""
    counts: Sequence[tuple[int, int]]
    """(slot, number of its tokens)."""
    prompt_logprobs: Sequence[tuple[int, PromptChunk]]
    """(slot, log probabilities of the prompt tokens computed in this step)."""
    failed_slots: Sequence[int]
    timings: StepTimings
    failed_images: Sequence[int] = ()
    """Image slots whose features are not finite."""
    failure_reasons: Mapping[int, str] = field(default_factory=dict)
    """Reasons of failed slots whose grammar allowed no further token."""
    pooled: Sequence[tuple[int, Sequence[float]]] = ()
    """(slot, what its complete prompt yields)."""
    closed_slots: Sequence[int] = ()
    """Slots whose last token was chosen to close their text within its limit."""
    computed: Sequence[tuple[int, int, int]] = ()
    """(slot, KV positions filled so far, draft tokens of the step), for decodes with more than one position allowed."""


def result_from_pb(messages: Sequence[pb.StepResponse]) -> StepResult:
    """Merge the answers of all ranks to one step: rank 0's tokens, the slowest rank's timings."""
    first = messages[0]
    slowest = max(messages, key=lambda message: message.timings.total_ns).timings
    return StepResult(
        number=first.number,
        tokens=tuple(_tokens(first)),
        counts=tuple(zip(first.slots, first.counts, strict=True)),
        prompt_logprobs=tuple(_prompt_logprobs(first)),
        failed_slots=tuple({slot for message in messages for slot in message.failed_slots}),
        timings=StepTimings(
            forward=slowest.forward_ns / 1e9,
            decode=slowest.decode_ns / 1e9,
            total=slowest.total_ns / 1e9,
            concat=slowest.concat_ns / 1e9 if slowest.HasField("concat_ns") else None,
        ),
        failure_reasons={
            slot: reason
            for message in messages
            for slot, reason in zip(message.failed_slots, message.failure_reasons, strict=False)
            if reason
        },
        failed_images=tuple({slot for message in messages for slot in message.failed_images}),
        pooled=tuple(_pooled(first)) if first.pooled_slots else (),
        closed_slots=tuple(first.closed_slots),
        computed=tuple(
            zip(first.computed_slots, first.computed_positions, first.drafted_tokens, strict=True)
        ),
    )


def _tokens(message: pb.StepResponse) -> Iterator[tuple[int, int, float, Candidates]]:
    """Flatten the columns with C iterators, because this runs for every token. Raises ValueError if lengths differ."""
    ids, logprobs, counts = message.ids, message.logprobs, message.counts
    if not len(ids) == len(logprobs) == sum(counts):
        raise ValueError("a step's columns differ in length")
    slots: Iterable[int] = message.slots
    if set(counts) != {1}:
        slots = chain.from_iterable(map(repeat, slots, counts))
    return zip(slots, ids, logprobs, _candidates(message), strict=False)


def _pooled(message: pb.StepResponse) -> Iterator[tuple[int, Sequence[float]]]:
    first = 0
    for slot, count in zip(message.pooled_slots, message.pooled_counts, strict=True):
        yield slot, message.pooled_values[first : first + count]
        first += count


def _candidates(message: pb.StepResponse) -> Iterator[Candidates]:
    if not message.top_counts:
        return repeat(())
    top = zip(message.top_ids, message.top_logprobs, strict=True)
    return (tuple(islice(top, count)) for count in message.top_counts)


def _prompt_logprobs(message: pb.StepResponse) -> Iterator[tuple[int, PromptChunk]]:
    rows = zip(message.prefill_slots, message.prefill_counts, strict=True)
    top_counts = message.prefill_top_counts or [0] * len(message.prefill_slots)
    first = first_top = 0
    for (slot, count), top_count in zip(rows, top_counts, strict=True):
        end, end_top = first + count, first_top + count * top_count
        yield (
            slot,
            PromptChunk(
                message.prefill_logprobs[first:end],
                message.prefill_top_ids[first_top:end_top],
                message.prefill_top_logprobs[first_top:end_top],
            ),
        )
        first, first_top = end, end_top
