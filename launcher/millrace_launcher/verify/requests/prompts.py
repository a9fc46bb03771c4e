"""The built-in prompts: short and long, with common beginnings, and with more than ASCII."""

from __future__ import annotations

from pathlib import Path

SHARED = (
    "You are a careful assistant. Answer in plain words, say what you do not know, and never invent a source. "
    "The conversation below is between a reader of a technical manual and you. "
)
LONG = (
    "A server that generates text keeps the keys and values of every token it has seen, since each new token attends "
    "to all of them. They lie in blocks of a fixed size, so that memory is given out as answers grow, and prompts that "
    "begin alike share what was computed once. "
)
PROMPTS = (
    "1, 2, 3, 5, 8, 13, 21, 34, 1, 2, 3, 5, 8, 13, 21, 34, 1, 2, 3, 5,",
    LONG * 12 + "In one sentence, this means",
    SHARED + "What does a scheduler do when memory runs out?",
    "a",
    SHARED + "Why is a long prompt computed in pieces?",
    "Größe, œuvre, 你好，世界, Привет, 😀👩‍💻 and naïve café:",  # noqa: RUF001
    LONG * 3 + "To sum up,",
    SHARED + SHARED + "Name one thing that makes an answer slower.",
    "What is continuous batching?",
    "def step(batch):\n    for row in batch:\n        row.tokens.append(",
    LONG + "The keys and values of every token",
    "The the the the the the the",
)
UNRELATED = (
    "Once upon a time in a quiet harbour",
    "Complete the list: iron, copper, tin,",
    LONG * 5,
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "?",
    SHARED * 2 + "Tell me about something else.",
)


class PromptsError(Exception):
    """The prompt file cannot be read or has no prompts."""


def read_prompts(path: Path) -> tuple[str, ...]:
    """Read the prompts of a text file, one a line without blank lines. Raises PromptsError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise PromptsError(f"{path} cannot be read: {error}") from error
    prompts = tuple(line for line in lines if line.strip())
    if not prompts:
        raise PromptsError(f"{path} holds no prompt; write one a line")
    return prompts
