"""Questions for the demo model: with the answer already in the prompt, and without."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from demo.corpus import Ask, wordings

SEED = 1
"""Seed of the demo model's corpus."""
MOST_TOKENS = 120
NUM_PRECEDENTS = 3
"""Other questions in a repetitive prompt, with their answers."""


def bodies(text: str, *, count: int, seed: str) -> list[Mapping[str, Any]]:
    """`count` greedy requests for `/generate` of the kind `text`, a key of `KINDS`, from a seed."""
    generator = random.Random(seed)
    asks = [ask for ask in wordings(SEED) if len(ask.topic.answer) > 60]
    prompts = [KINDS[text](generator.sample(asks, NUM_PRECEDENTS + 1)) for _ in range(count)]
    parameters = {"max_new_tokens": MOST_TOKENS, "details": True}
    return [{"inputs": prompt, "parameters": parameters} for prompt in prompts]


def _plain(asks: Sequence[Ask]) -> str:
    return f"{asks[0].text}\n"


def _repetitive(asks: Sequence[Ask]) -> str:
    """A question that the history before it already answers."""
    history = "".join(f"{ask.text}\n{ask.topic.answer}\n" for ask in asks)
    return f"{history}{asks[0].text}\n"


KINDS = {"repetitive": _repetitive, "plain": _plain}
