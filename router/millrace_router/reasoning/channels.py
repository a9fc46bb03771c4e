"""The channels of gpt-oss, in which thoughts are messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from millrace_router.reasoning.channel_splitter import (
    CHANNEL,
    END,
    MARKERS,
    MESSAGE,
    START,
    ChannelSplitter,
)
from millrace_router.reasoning.reasoning_format import ANSWER, ReasoningFormat, ThoughtLimit
from millrace_router.reasoning.splitter import Start
from millrace_router.reasoning.thought_grammar import (
    ANY_TOKENS,
    no_budget,
    none_of,
    text_up_to,
    token,
    tokens_up_to,
    written,
)

EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
"""The efforts that the model knows for those that it does not."""
THOUGHT, FINAL = f"{CHANNEL}analysis{MESSAGE}", f"{CHANNEL}final{MESSAGE}"
NEXT = f"{START}assistant"
CONSTRAIN = "<|constrain|>"
"""Stands before the type of a call's arguments, in its header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelReasoning(ReasoningFormat):
    """Thoughts are messages of the channel `analysis`; there may be several."""

    def start_of(self, prompt: str, continued: str | None = None) -> Start:
        """See the base; a message that goes on is an answer."""
        if prompt.endswith(THOUGHT):
            return Start.OPEN
        return Start.FREE if continued is None and not prompt.endswith(FINAL) else Start.CLOSED

    def splitter(self, start: Start, *, keeps_calls: bool = False) -> ChannelSplitter:
        """See the base."""
        return ChannelSplitter(start, keeps_calls=keeps_calls)

    def _limited(self, start: Start, limit: ThoughtLimit) -> str:
        """See the base; the budget is that of the first thought."""
        thought = self._thought(limit)
        if start is Start.OPEN:
            return f"start: {thought} {ANY_TOKENS}\n"
        channel, message = self._written(CHANNEL), self._written(MESSAGE)
        constrained = f"({self._written(CONSTRAIN)} HEADER)?" if CONSTRAIN in self.ids else ""
        return (
            f"start: {self._written(THOUGHT)} {thought} {ANY_TOKENS}"
            f" | {channel} HEADER {constrained} {message} {ANY_TOKENS}"
            f" | ({none_of([self.ids[CHANNEL]])} {ANY_TOKENS})?\n"
            "HEADER: /[^a<][^<]*/\n"
        )

    def _before_answer(self, start: Start, limit: ThoughtLimit, *, is_text: bool) -> str:
        """See the base; a text is a message of the channel `final`."""
        if start is Start.CLOSED:
            return ANSWER
        answer = f"{self._written(FINAL)} {ANSWER}" if is_text else ANSWER
        thought = f"{self._thought(limit)} {self._written(NEXT)}"
        if start is Start.OPEN:
            return f"{thought} {answer}"
        return f"({self._written(THOUGHT)} {thought})? {answer}"

    def _thought(self, limit: ThoughtLimit) -> str:
        """Return the rule of the rest of a thought, with the marker that ends it."""
        end = self.ids.get(END)
        if end is not None:
            others = {id_ for text, id_ in self.ids.items() if text in MARKERS}
            return f"{tokens_up_to(end, limit.ends | others, limit.budget)} {token(end)}"
        if limit.budget is not None:
            no_budget()
        return "REST"

    def _terminals(self, rule: str) -> str:
        """See the base."""
        return f"REST: {text_up_to((END,))}\n" if "REST" in rule else ""

    def _written(self, text: str) -> str:
        return written(text, self.ids)

    def variables(self, effort: str | None) -> dict[str, Any]:
        """See the base; the model always thinks, at least a little."""
        return {} if effort is None else {"reasoning_effort": EFFORTS.get(effort, effort)}
