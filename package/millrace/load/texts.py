"""Prompts for servers whose tokenizer is not known."""

from __future__ import annotations

import json
import random
from pathlib import Path

TEXT = (
    "the of and to in is was for on that with as are by from at his an were which be this has one have not had but "
    "also two their been who its new first more other time some only over most after made about many such year "
    "would people when part then may these between world well under name long place house city work water while "
    "life high use used day three school state second during early large group end little great old until found "
    "form call line small set same way around young home show point light sound side better hand port air land read "
    "add own play food face book eye money free paper music river car feet care story saw left late run family room "
    "white real "
)
WORDS = TEXT.split()
"""Common English words; each is one token of most vocabularies."""


def random_prompts(num_tokens: int, count: int, *, seed: int) -> tuple[str, ...]:
    """Texts of about `num_tokens` tokens each, which share no useful prefix; the same seed gives the same texts."""
    generator = random.Random(seed)
    return tuple(" ".join(generator.choices(WORDS, k=num_tokens)) for _ in range(count))


def prompts_of(path: Path) -> tuple[str, ...]:
    """The prompts of a file: one a line, as text, or as JSON with `prompt`, `inputs` or `text`.

    Raises OSError, and ValueError with the line's number for a line of JSON without one of these.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    found = tuple(
        _prompt_of(line, number) for number, line in enumerate(lines, start=1) if line.strip()
    )
    if not found:
        raise ValueError(f"{path} contains no prompts")
    return found


def _prompt_of(line: str, number: int) -> str:
    if not line.startswith("{"):
        return line
    try:
        value = json.loads(line)
    except ValueError:
        raise ValueError(f"line {number} is not JSON") from None
    for name in ("prompt", "inputs", "text"):
        if isinstance(value.get(name), str):
            return str(value[name])
    raise ValueError(f"line {number} lacks `prompt`, `inputs` or `text`")
