"""The base of the reasoning formats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

from millrace_router.reasoning.thought_grammar import answer_rule
from millrace_router.request.request import Grammar, GrammarKind
from millrace_router.tool_calls.parsing.call_format import NO_IDS


class Start(Enum):
    """Where an answer begins, by the end of its prompt."""

    FREE = auto()
    """The model may open a thought."""
    OPEN = auto()
    """The prompt ends within a thought."""
    CLOSED = auto()
    """The prompt ends behind a thought, which is empty if the model is not to think."""


class Split(NamedTuple):
    """The parts of a piece of text."""

    thought: str
    answer: str


class Splitter:
    """Splits one answer; the cuts between pushed pieces make no difference to the joined parts.

    `_step` removes decided text from `_rest`, adds it to a part, and returns whether another step can go on.
    """

    _step: Callable[[], bool] | None
    """None within an answer that nothing ends."""

    def __init__(self, start: Start) -> None:
        self.thinks = start is Start.OPEN
        """Whether the text so far ends within a thought."""
        self._rest = ""
        """Undecided text."""
        self._is_last = False
        self._thoughts: list[str] = []
        self._answers: list[str] = []

    def push(self, text: str, /) -> Split:
        """Split more text; text that may begin a tag is held back."""
        if self._step is None:
            return Split("", text)
        self._rest += text
        return self._split()

    def finish(self) -> Split:
        """Split the held text as the end of the answer; the beginning of a header is dropped."""
        self._is_last = True
        return self._split()

    def _split(self) -> Split:
        while self._rest and self._step is not None and self._step():
            pass
        split = Split("".join(self._thoughts), "".join(self._answers))
        self._thoughts.clear()
        self._answers.clear()
        return split


ANSWER = "answer"
"""The rule of the answer, in grammars."""
NO_EFFORT = "none"
"""The effort that means no thought."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtLimit:
    """What ends a thought besides its tag."""

    budget: int | None = None
    """Tokens between the tags, after which the closing tag must follow."""
    ends: frozenset[int] = frozenset()
    """The end-of-sequence ids, which cannot be in a thought that the grammar knows of."""


def switch(*, thinks: bool) -> dict[str, bool]:
    """Return the variables that make templates think or not, under the names that families have for them."""
    return {"enable_thinking": thinks, "thinking": thinks}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat(ABC):
    """How a family of models writes thoughts; stateless, one object for all requests."""

    name: str
    """Value of `--reasoning-parser`."""
    ids: Mapping[str, int] = field(default_factory=lambda: NO_IDS)
    """Ids of the tags that are one token each, and of special tokens within tags, by text."""
    special: frozenset[str] = frozenset()
    """Special tokens that are tags or parts of them, which the splitter needs as text."""

    @abstractmethod
    def start_of(self, prompt: str, continued: str | None = None) -> Start:
        """Return where the answer to `prompt` begins; `continued` is the text of a last message that goes on."""

    @abstractmethod
    def splitter(self, start: Start, *, keeps_calls: bool = False) -> Splitter:
        """Return a splitter of one answer; with `keeps_calls`, calls stay in it as they are written."""

    def grammar(
        self, start: Start, answer: Grammar | None, limit: ThoughtLimit, *, is_text: bool
    ) -> Grammar | None:
        """Return the grammar of a thought and then `answer`, which is None for any; None if any text is valid.

        With `is_text` the answer contains no calls.

        Raises:
            ValidationError: there is a budget, and the model's tags are not single tokens.

        """
        if answer is None and (limit.budget is None or start is Start.CLOSED):
            return None
        if answer is None:
            return Grammar(GrammarKind.LARK, self._limited(start, limit))
        rule = self._before_answer(start, limit, is_text=is_text)
        if rule == ANSWER:
            return answer
        source = f"start: {rule}\n{ANSWER}: {answer_rule(answer)}\n"
        return Grammar(GrammarKind.LARK, source + self._terminals(rule), answer.closes)

    @abstractmethod
    def _limited(self, start: Start, limit: ThoughtLimit) -> str:
        """Return Lark for a thought with a budget, and any answer."""

    @abstractmethod
    def _before_answer(self, start: Start, limit: ThoughtLimit, *, is_text: bool) -> str:
        """Return the rule of a thought and the rule `answer` behind it."""

    def _terminals(self, rule: str) -> str:  # noqa: ARG002
        return ""

    def variables(self, effort: str | None) -> dict[str, Any]:
        """Return the variables of chat templates for an effort."""
        return (
            {}
            if effort is None
            else {"reasoning_effort": effort, **switch(thinks=effort != NO_EFFORT)}
        )
