"""Turns of a conversation, for templates that take one of a role at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from millrace_router.text.template_messages import Message, text_of

SYSTEM = {"developer": "system"}


def joined(messages: Sequence[Message]) -> list[Message]:
    """Return `messages` with a turn for each run of plain turns of one role, their texts a blank line apart.

    The roles `system` and `developer` count as one.
    """
    made: list[Message] = []
    for (_, is_plain), run in groupby(messages, key=_kind_of):
        turns = list(run)
        if not is_plain or len(turns) == 1:
            made += turns
            continue
        text = "\n\n".join(text_of(turn["content"]) for turn in turns)
        made.append({"role": turns[0]["role"], "content": text})
    return made


def _kind_of(message: Message) -> tuple[str, bool]:
    role: str = message["role"]
    return SYSTEM.get(role, role), message.keys() == {"role", "content"}
