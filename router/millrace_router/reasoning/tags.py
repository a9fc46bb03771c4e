"""Thoughts in tags before the answer: their splitter and their format."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from millrace_router.reasoning.reasoning_format import (
    ANSWER,
    ReasoningFormat,
    Splitter,
    Start,
    ThoughtLimit,
)
from millrace_router.reasoning.thought_grammar import (
    ANY_TOKENS,
    no_budget,
    none_of,
    text_up_to,
    token,
    tokens_up_to,
    written,
)
from millrace_router.tool_calls.parsing.syntax import earliest, num_begun

BLANKS = " \t\r\n"
MAX_BLANKS = 256
"""More blanks in a row count as text, so that the time to hold them back is bounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """The texts around a thought, and around the answer if a format has such."""

    openers: tuple[str, ...]
    """Texts of which one opens the thought, at the beginning of the answer; templates write the first."""
    closers: tuple[str, ...]
    answer_opener: str = ""
    answer_closer: str = ""
    trimmed: str = "\n"
    """Characters that belong to a tag next to them."""

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(
            filter(None, (*self.openers, *self.closers, self.answer_opener, self.answer_closer))
        )


class TagSplitter(Splitter):
    """Finds at most one thought, at the beginning; tags in the answer are text."""

    def __init__(self, tags: Tags, start: Start) -> None:
        super().__init__(start)
        self._tags = tags
        self._begins = True
        """Whether the part has no text yet, so that its first characters may be trimmed."""
        self._step = self._at_start

    def _at_start(self) -> bool:
        begin = len(self._rest) - len(self._rest.lstrip(BLANKS))
        text = self._rest[begin:]
        openers = self._tags.openers if begin <= MAX_BLANKS else ()
        opener = next((one for one in openers if text.startswith(one)), None)
        if opener is not None:
            self._rest = text[len(opener) :]
            self.thinks = True
        elif not self._is_last and any(one.startswith(text) for one in openers):
            return False
        self._step = self._in_thought if self.thinks else self._before_answer
        return True

    def _in_thought(self) -> bool:
        if not self._in_part(self._tags.closers, self._thoughts):
            return False
        self.thinks = False
        self._step = self._behind_thought
        return True

    def _behind_thought(self) -> bool:
        self._rest = self._rest.lstrip(self._tags.trimmed)
        self._step = self._before_answer if self._rest else self._step
        return bool(self._rest)

    def _before_answer(self) -> bool:
        opener = self._tags.answer_opener
        if opener and self._rest.startswith(opener):
            self._rest = self._rest[len(opener) :]
            self._begins = True
            self._step = self._in_answer
            return True
        if opener and opener.startswith(self._rest) and not self._is_last:
            return False
        return self._give_all(self._answers)

    def _in_answer(self) -> bool:
        if not self._in_part((self._tags.answer_closer,), self._answers):
            return False
        return self._give_all(self._answers)

    def _in_part(self, closers: Sequence[str], parts: list[str]) -> bool:
        """Move decided text to `parts`; returns whether one of `closers` has followed."""
        if self._begins:
            self._rest = self._rest.lstrip(self._tags.trimmed)
            if not self._rest:
                return False
            self._begins = False
        end, match = len(self._rest), None
        if any(closer[0] in self._rest for closer in closers):
            match = earliest(self._rest, closers, 0)
            end = end - num_begun(self._rest, closers) if match is None else match[0]
        if match is None and self._is_last:
            return self._give_all(parts)
        num_given = self._num_given(end)
        parts.append(self._rest[:num_given])
        self._rest = self._rest[num_given:] if match is None else self._rest[end + len(match[1]) :]
        return match is not None

    def _num_given(self, end: int) -> int:
        """Return the length of the text before `end` that is certain; blanks at its end may belong to a closer."""
        text = self._rest[max(0, end - MAX_BLANKS) : end]
        return end - len(text) + len(text.rstrip(self._tags.trimmed))

    def _give_all(self, parts: list[str]) -> bool:
        """Add all text to `parts`, to which all later text belongs too."""
        parts.append(self._rest)
        self._rest = ""
        self._step = None
        return False


_FIRST_TOKEN = re.compile(r"<\[(\d+)\]>")
_THOUGHT = "THOUGHT"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedReasoning(ReasoningFormat):
    """One thought between tags, before the answer."""

    tags: Tags

    def start_of(self, prompt: str, continued: str | None = None) -> Start:
        """See the base; only a template, never a user's message, ends a prompt with a tag."""
        end = (prompt if continued is None else continued).rstrip()
        if continued is not None:
            opened = max(map(end.rfind, self.tags.openers))
            closed = max(map(end.rfind, self.tags.closers))
            return Start.CLOSED if opened <= closed else Start.OPEN
        if end.endswith(self.tags.openers):
            return Start.OPEN
        behind = tuple(filter(None, (*self.tags.closers, self.tags.answer_opener)))
        return Start.CLOSED if end.endswith(behind) else Start.FREE

    def splitter(self, start: Start, *, keeps_calls: bool = False) -> TagSplitter:  # noqa: ARG002
        """See the base; calls are not separated from text."""
        return TagSplitter(self.tags, start)

    def _limited(self, start: Start, limit: ThoughtLimit) -> str:
        """See the base; without a thought, nothing may open one."""
        opener = written(self.tags.openers[0], self.ids)
        first = _FIRST_TOKEN.match(opener)
        if first is None:
            no_budget()
        thought = self._thought(limit)
        if start is Start.OPEN:
            return f"start: {thought} {ANY_TOKENS}\n"
        return f"start: {opener} {thought} {ANY_TOKENS} | {none_of([int(first[1])])}*\n"

    def _before_answer(self, start: Start, limit: ThoughtLimit, *, is_text: bool) -> str:
        """See the base; up to two blanks of those that belong to the tag may stand behind it."""
        tags, answer = self.tags, ANSWER
        if is_text and tags.answer_opener:
            opener, closer = (
                written(text, self.ids) for text in (tags.answer_opener, tags.answer_closer)
            )
            answer = f"({opener} {ANSWER} ({closer})? | {ANSWER})"
        if start is Start.CLOSED:
            return answer
        blanks = f"/[{tags.trimmed}]{{0,2}}/".replace("\n", "\\n")
        if start is Start.OPEN:
            return f"{self._thought(limit)} {blanks} {answer}"
        openers = " | ".join(written(opener, self.ids) for opener in tags.openers)
        return f"(({openers}) {self._thought(limit)} {blanks})? {answer}"

    def _thought(self, limit: ThoughtLimit) -> str:
        """Return the rule of a thought behind its opening tag, with its closing tag."""
        closer = self.ids.get(self.tags.closers[0])
        if closer is not None:
            return f"{tokens_up_to(closer, limit.ends, limit.budget)} {token(closer)}"
        if limit.budget is not None:
            no_budget()
        return _THOUGHT

    def _terminals(self, rule: str) -> str:
        return f"{_THOUGHT}: {text_up_to(self.tags.closers)}\n" if _THOUGHT in rule else ""
