"""The format of thoughts in tags."""

from __future__ import annotations

import re
from dataclasses import dataclass

from millrace_router.reasoning.reasoning_format import ANSWER, ReasoningFormat, ThoughtLimit
from millrace_router.reasoning.splitter import Start
from millrace_router.reasoning.tag_splitter import Tags, TagSplitter
from millrace_router.reasoning.thought_grammar import (
    ANY_TOKENS,
    no_budget,
    none_of,
    text_up_to,
    token,
    tokens_up_to,
    written,
)

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
        """See the base; calls are not told from text."""
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
        """See the base."""
        return f"{_THOUGHT}: {text_up_to(self.tags.closers)}\n" if _THOUGHT in rule else ""
