"""Removes the fields of a message that reveal the text, unless the journal keeps tokens.

Log probabilities reveal it too: with the model, the token of each log probability can be found position by position.
So do embeddings, a checksum of few ids, and the keys of sealed blocks, which are hashes of their ids. These fields are
removed with the ids; lengths, parameters, seeds, slots, blocks and times are written.
"""

from __future__ import annotations

import json
import secrets
from array import array
from collections.abc import Iterator, Mapping, MutableSequence
from hashlib import blake2b
from typing import Any

from millrace_proto import generate_pb2 as pb

REVEALING = (
    "ids",
    "logprobs",
    "top_ids",
    "top_logprobs",
    "prefill_logprobs",
    "prefill_top_ids",
    "prefill_top_logprobs",
    "checksum",
    "failure_reasons",
    "pooled_slots",
    "pooled_counts",
    "pooled_values",
)
"""Fields of an answer that reveal tokens, or may."""
HASH_BYTES = 8
_IDS = "I"
"""Type code of token ids in arrays."""


class Redaction:
    """Serializes messages with or without the fields that reveal the text."""

    def __init__(self, *, keeps_tokens: bool) -> None:
        self._keeps_tokens = keeps_tokens
        # The key is never written, so a guessed prompt cannot be checked against its hash.
        self._key = secrets.token_bytes(blake2b.MAX_KEY_SIZE)

    def notes(self, message: pb.StepRequest) -> Iterator[bytes]:
        """JSON descriptions of the admitted prompts whose ids are removed.

        Equal prompts of one router process have equal hashes. The hash reveals nothing else.
        """
        if self._keeps_tokens:
            return
        for sequence in _change(message).admitted:
            note = {
                "request_id": sequence.request_id,
                "slot": sequence.slot,
                "input_tokens": len(sequence.input_ids),
                "input_hash": self._hash(sequence),
                "grammar_characters": len(sequence.grammar.source),
            }
            yield json.dumps(note).encode()

    def request(self, message: pb.StepRequest) -> bytes:
        """Serialize `message`, with zeros for removed ids and keys."""
        change = _change(message)
        if self._keeps_tokens or not (change.admitted or change.sealed_keys):
            return message.SerializeToString()
        blank = pb.StepRequest()
        blank.CopyFrom(message)
        change = _change(blank)
        change.sealed_keys[:] = [bytes(len(key)) for key in change.sealed_keys]
        for sequence in change.admitted:
            _fill_with_zeros(sequence.input_ids)
            parameters = sequence.parameters
            _fill_with_zeros(parameters.bias_ids)
            _fill_with_zeros(parameters.allowed_ids)
            _fill_with_zeros(parameters.bad_word_ids)
            _fill_with_zeros(parameters.stop_ids)
            if parameters.HasField("dry"):
                _fill_with_zeros(parameters.dry.breaker_ids)
            if sequence.HasField("grammar"):
                sequence.grammar.ClearField("source")
        return blank.SerializeToString()

    def answer(self, answer: pb.StepResponse) -> bytes:
        if self._keeps_tokens:
            return answer.SerializeToString()
        blank = pb.StepResponse()
        blank.CopyFrom(answer)
        for name in REVEALING:
            blank.ClearField(name)  # type: ignore[arg-type]
        return blank.SerializeToString()

    def fields(self, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the fields of another record; the digest of an image would show that it is a known one."""
        if self._keeps_tokens or "tiles" not in content:
            return content
        return {name: value for name, value in content.items() if name != "digest"}

    def _hash(self, sequence: pb.Sequence) -> str:
        ids = array(_IDS, sequence.input_ids).tobytes()
        return blake2b(ids, digest_size=HASH_BYTES, key=self._key).hexdigest()


def _fill_with_zeros(ids: MutableSequence[int]) -> None:
    count = len(ids)
    del ids[:]
    ids.extend([0] * count)


def _change(message: pb.StepRequest) -> pb.BatchChange:
    """The change of the batch in `message`; an empty one if it has none."""
    return (message.decode if message.HasField("decode") else message.prefill).change
