"""The channels of gpt-oss, in which thoughts are messages: their splitter and their format."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

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

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, MESSAGE, END, CALL, RETURN)
_BEGINNING = "<"
"""The first character of every marker."""
ANALYSIS = "analysis"
EARLY_RECIPIENT = " to="
"""Begins a header behind the prompt, which ends with `<|start|>assistant`."""
MAX_HEADER = 256
"""Characters of a header; a longer one is text."""
_BEHIND_HEADER = (MESSAGE, START, END, CALL, RETURN)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")
_RECIPIENT = re.compile(r"\bto=\S")
_ROLE = re.compile(r"<\|start\|>(?:assistant)?")


class ChannelSplitter(Splitter):
    """Reads messages: a header with channel and recipient, `<|message|>`, text, and a marker that ends it.

    The text of the channel `analysis` is thought. Messages with a recipient are calls: they become answer as they are
    written, markers included, if `keeps_calls`; else only their text does. All other text is answer.
    """

    def __init__(self, start: Start, *, keeps_calls: bool) -> None:
        super().__init__(start)
        self._keeps_calls = keeps_calls
        self._has_thought = False
        self._headers: tuple[str, ...] = (START, CHANNEL, MESSAGE, EARLY_RECIPIENT)
        """Texts that begin a header."""
        self._step = self._in_thought if self.thinks else self._between

    def _between(self) -> bool:
        """Before a message: text that is no header belongs to the answer."""
        if self._rest.startswith(self._headers):
            self._step = self._in_header
        elif not self._is_last and any(one.startswith(self._rest) for one in self._headers):
            return False
        else:
            self._step = self._in_answer
        self._headers = (START, CHANNEL, MESSAGE)
        return True

    def _in_header(self) -> bool:
        begin = 0 if self._rest.startswith(MESSAGE) else 1
        end, marker = earliest(self._rest, _BEHIND_HEADER, begin) or (len(self._rest), "")
        if end > MAX_HEADER or marker not in {MESSAGE, ""}:
            self._give_up_header()
            return True
        if not marker:
            if self._is_last:
                self._rest = ""
            return False
        header, self._rest = self._rest[:end], self._rest[end + len(MESSAGE) :]
        self._open(header)
        return True

    def _give_up_header(self) -> None:
        """Treat the text as no header; clients never get the marker before it."""
        marker = next((one for one in MARKERS if self._rest.startswith(one)), "")
        self._rest = self._rest[len(marker) :]
        self._step = self._in_answer

    def _open(self, header: str) -> None:
        channel = _CHANNEL.search(header)
        if _RECIPIENT.search(header):
            if self._keeps_calls:
                self._answers.append(_ROLE.sub("", header, count=1) + MESSAGE)
                self._step = self._in_call
            else:
                self._step = self._in_answer
        elif channel is not None and channel[1] == ANALYSIS:
            if self._has_thought:
                self._thoughts.append("\n")
            self._step = self._in_thought
            self.thinks = self._has_thought = True
        else:
            self._step = self._in_answer

    def _in_thought(self) -> bool:
        ended = self._in_message(self._thoughts)
        self.thinks = not ended
        self._has_thought = True
        return ended

    def _in_answer(self) -> bool:
        return self._in_message(self._answers)

    def _in_call(self) -> bool:
        """Within a call; the marker that ends it belongs to it."""
        match = earliest(self._rest, MARKERS, 0) if _BEGINNING in self._rest else None
        ended = self._in_message(self._answers)
        if ended and match is not None and match[1] not in {START, CHANNEL, MESSAGE}:
            self._answers.append(match[1])
        return ended

    def _in_message(self, parts: list[str]) -> bool:
        """Move decided text to `parts`; returns whether a marker has ended it."""
        has_marker = _BEGINNING in self._rest
        match = earliest(self._rest, MARKERS, 0) if has_marker else None
        if match is None:
            is_whole = self._is_last or not has_marker
            num_held = 0 if is_whole else num_begun(self._rest, MARKERS)
            num_given = len(self._rest) - num_held
            parts.append(self._rest[:num_given])
            self._rest = self._rest[num_given:]
            return False
        end, marker = match
        parts.append(self._rest[:end])
        is_header = marker in {START, CHANNEL, MESSAGE}
        self._rest = self._rest[end if is_header else end + len(marker) :]
        self._step = self._between
        return True


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
        return ChannelSplitter(start, keeps_calls=keeps_calls)

    def _limited(self, start: Start, limit: ThoughtLimit) -> str:
        """See the base; the budget applies to the first thought."""
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
        return f"REST: {text_up_to((END,))}\n" if "REST" in rule else ""

    def _written(self, text: str) -> str:
        return written(text, self.ids)

    def variables(self, effort: str | None) -> dict[str, Any]:
        """See the base; the model always thinks, at least a little."""
        return {} if effort is None else {"reasoning_effort": EFFORTS.get(effort, effort)}
