"""Mooncake's traces as requests of token ids, with every length divided by one number."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

BLOCK_TOKENS = 512
"""Tokens that one of the trace's hash ids stands for."""
FIRST_ID = 400
"""Lower ids are control tokens and single bytes."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of the trace."""

    at: float
    """Seconds from the beginning."""
    body: bytes
    """A streamed completion whose prompt is token ids."""
    num_prompt_tokens: int


def read_trace(path: Path, *, limit: int, divisor: int, vocab_size: int) -> Iterator[Arrival]:
    """Yield the first `limit` requests; equal hash ids become equal tokens."""
    size = BLOCK_TOKENS // divisor

    @cache
    def tokens_of(hash_id: int) -> tuple[int, ...]:
        choose = random.Random(hash_id)
        return tuple(choose.randrange(FIRST_ID, vocab_size) for _ in range(size))

    with path.open() as lines:
        for _, line in zip(range(limit), lines, strict=False):
            one = json.loads(line)
            prompt = [token for each in one["hash_ids"] for token in tokens_of(each)]
            prompt = prompt[: max(1, one["input_length"] // divisor)]
            # A client's keys are in one order; the prompt first, as most of the hash is to be of it.
            body = {
                "prompt": prompt,
                "model": "tgi",
                "stream": True,
                "max_tokens": max(1, one["output_length"] // divisor),
                "ignore_eos": True,
            }
            yield Arrival(one["timestamp"] / 1000, json.dumps(body).encode(), len(prompt))
