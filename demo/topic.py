"""A fact of the demo model and the names in questions about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

ARTICLES = ("a ", "an ", "the ")
Kind = Literal["concept", "flag", "route", "metric", "talk"]


@dataclass(frozen=True)
class Topic:
    """One answer and the ways to ask for it: names that fit the kind's templates, and whole questions."""

    kind: Kind
    answer: str
    names: tuple[str, ...] = ()
    questions: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """A stable name for tables and tests."""
        return (self.names or self.questions)[0]


def named(kind: Kind, rows: Sequence[tuple[str, str]]) -> list[Topic]:
    """Topics of one kind from rows of `name | alias | question?` and the answer.

    A part that ends in a question mark or a full stop is a whole question, any other a name.
    """
    return [_topic(kind, asked, answer) for asked, answer in rows]


def _topic(kind: Kind, asked: str, answer: str) -> Topic:
    parts = [part.strip() for part in asked.split("|")]
    questions = tuple(part for part in parts if kind == "talk" or part[-1] in "?.!")
    names = [part for part in parts if part not in questions]
    names += [name.removeprefix(article) for name in names for article in ARTICLES
              if name.startswith(article)]  # fmt: skip
    return Topic(kind, answer, tuple(dict.fromkeys(names)), questions)
