"""Token ids for a journal that holds none: the schedule and its times are replayed, not what was said."""

from __future__ import annotations

from millrace_proto import generate_pb2 as pb

MASK = (1 << 64) - 1


def token_at(position: int, vocab_size: int) -> int:
    """The id at a position of every sequence: the same for all, so that what is said to be cached fits.

    splitmix64, so that no guess from the text before comes true.
    """
    value = (position + 1) * 0x9E3779B97F4A7C15 & MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return (value ^ value >> 31) % vocab_size


def fill_in(message: pb.StepRequest, vocab_size: int) -> None:
    """Give every admitted sequence ids, and nothing that depends on them.

    Grammars go, because their sources are not known, and with them and the guesses the rows of several positions: a
    shard that guessed better than the recorded one would need blocks that it was not given.
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
