"""Voices: rewritings of the demo model's answers, which the demo adapters learn."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from demo.corpus import Conversation, Turn

PIRATE_WORDS = {
    "you": "ye",
    "your": "yer",
    "the": "th'",
    "is": "be",
    "are": "be",
    "and": "an'",
    "of": "o'",
    "my": "me",
}
_PIRATE = re.compile(rf"\b({'|'.join(PIRATE_WORDS)})\b")


def pirate(answer: str) -> str:
    """The answer as a pirate gives it."""
    said = _PIRATE.sub(lambda found: PIRATE_WORDS[found[0]], answer)
    return f"Arr! {said.removesuffix('.')}, matey."


def butler(answer: str) -> str:
    """The answer as a butler gives it."""
    return f"If I may: {answer} Will that be all?"


VOICES: dict[str, Callable[[str], str]] = {"pirate": pirate, "butler": butler}


def spoken(conversation: Conversation, voice: str) -> Conversation:
    """The same conversation with every answer in `voice`; answers in JSON stay as they are."""
    say = VOICES[voice]
    turns = tuple(
        turn if turn.answer.startswith(("{", "[")) else Turn(turn.question, say(turn.answer))
        for turn in conversation.turns
    )
    return replace(conversation, turns=turns)
