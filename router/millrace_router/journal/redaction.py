"""What of a message is written: all of it, or all but what would tell the text.

Log probabilities tell it as well: whoever has the model finds the token that has this one, position by position. So
does a checksum of few ids. They go with the ids; lengths, parameters, seeds, slots, blocks and times stay.
"""

from __future__ import annotations

import json
import secrets
from array import array
from collections.abc import Iterator, MutableSequence
from hashlib import blake2b

from millrace_proto import generate_pb2 as pb
from millrace_router.journal.shard_state import IDS

TELLING = (
    "ids",
    "logprobs",
    "top_ids",
    "top_logprobs",
    "prefill_logprobs",
    "prefill_top_ids",
    "prefill_top_logprobs",
    "checksum",
    "failure_reasons",
)
"""Fields of an answer that tell of its tokens, or may."""
HASH_BYTES = 8


class Redaction:
    """Writes messages, with or without what would tell the text."""

    def __init__(self, *, keeps_tokens: bool) -> None:
        self._keeps_tokens = keeps_tokens
        # Never written anywhere: nobody can check a guess at a prompt against its hash.
        self._key = secrets.token_bytes(blake2b.MAX_KEY_SIZE)

    def notes(self, message: pb.StepRequest) -> Iterator[bytes]:
        """JSON that stands for each admitted prompt whose ids are left out.

        Its hash tells that two prompts of one life of the router are the same, and nothing else.
        """
        if self._keeps_tokens:
            return
        for sequence in _admitted(message):
            note = {
                "request_id": sequence.request_id,
                "slot": sequence.slot,
                "input_tokens": len(sequence.input_ids),
                "input_hash": self._hash(sequence),
                "grammar_characters": len(sequence.grammar.source),
            }
            yield json.dumps(note).encode()

    def request(self, message: pb.StepRequest) -> bytes:
        """`message` as it is written, with zeros for the ids that are left out."""
        if self._keeps_tokens or not _admitted(message):
            return message.SerializeToString()
        blank = pb.StepRequest()
        blank.CopyFrom(message)
        for sequence in _admitted(blank):
            _fill_with_zeros(sequence.input_ids)
            _fill_with_zeros(sequence.parameters.bias_ids)
            if sequence.HasField("grammar"):
                sequence.grammar.ClearField("source")
        return blank.SerializeToString()

    def answer(self, answer: pb.StepResponse) -> bytes:
        """`answer` as it is written."""
        if self._keeps_tokens:
            return answer.SerializeToString()
        blank = pb.StepResponse()
        blank.CopyFrom(answer)
        for name in TELLING:
            blank.ClearField(name)  # type: ignore[arg-type]
        return blank.SerializeToString()

    def _hash(self, sequence: pb.Sequence) -> str:
        ids = array(IDS, sequence.input_ids).tobytes()
        return blake2b(ids, digest_size=HASH_BYTES, key=self._key).hexdigest()


def _fill_with_zeros(ids: MutableSequence[int]) -> None:
    count = len(ids)
    del ids[:]
    ids.extend([0] * count)


def _admitted(message: pb.StepRequest) -> list[pb.Sequence]:
    work = message.WhichOneof("work")
    if work == "prefill":
        return list(message.prefill.change.admitted)
    if work == "decode":
        return list(message.decode.change.admitted)
    return []
