"""Token ids for a journal without any: the replay repeats the schedule, but not the text."""

from __future__ import annotations

from millrace_proto import generate_pb2 as pb

MASK = (1 << 64) - 1


def token_at(position: int, vocab_size: int) -> int:
    """The id at a position, the same for every sequence, so that cached blocks match.

    The ids are those of splitmix64, so that no draft token is right.
    """
    value = (position + 1) * 0x9E3779B97F4A7C15 & MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return (value ^ value >> 31) % vocab_size


def fill_in(message: pb.StepRequest, vocab_size: int) -> None:
    """Give every admitted sequence ids, and remove the fields that depend on the recorded ids.

    Rules that name tokens are removed, and so are grammars, because their sources are unknown. Rows of several
    positions are removed with grammars and draft tokens: with more right draft tokens than in the record, a row would
    need further blocks.
    """
    work = message.WhichOneof("work")
    if work not in {"prefill", "decode"}:
        return
    step = message.prefill if work == "prefill" else message.decode
    step.ClearField("decode_tokens")
    step.ClearField("draft_tokens")
    for sequence in step.change.admitted:
        count = len(sequence.input_ids)
        del sequence.input_ids[:]
        sequence.input_ids.extend(token_at(position, vocab_size) for position in range(count))
        bias_ids = sequence.parameters.bias_ids
        num_biases = len(bias_ids)
        del bias_ids[:]
        bias_ids.extend(range(num_biases))
        sequence.ClearField("grammar")
        parameters = sequence.parameters
        for ids in (parameters.allowed_ids, parameters.bad_word_ids, parameters.stop_ids):
            del ids[:]
        del parameters.bad_word_lengths[:]
