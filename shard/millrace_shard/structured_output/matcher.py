"""A grammar's state along one sequence, and how a grammar that llguidance understands becomes one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter

from llguidance import LLMatcher, LLParserLimits

from millrace_shard.structured_output.grammar.grammar_source import GrammarInvalid
from millrace_shard.structured_output.vocabulary import Vocabulary

MAX_MESSAGE = 500
LIMITS = LLParserLimits(max_lexer_states=100_000, verbose_errors=False)
"""llguidance's own, which bound a mask to about 20 ms, but for fewer lexer states: each takes 1 to 2 kB."""

WORDING = {
    "Unimplemented keys:": "not supported:",
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf": (
        "`oneOf` is supported only where a type or a required property tells its options apart"
    ),
}
"""What llguidance says to those who call it, as it is said to those who write schemas."""
SOURCE_LINE = re.compile(r"\n *[0-9]+ \| ")


TOO_MANY_STATES = "lexer error: too many states"


@dataclass(frozen=True, slots=True, eq=False)
class Lexer:
    """What the copies of a matcher share: states of the grammar's lexer, of which there is room for so many."""

    compile_seconds: float
    """What it takes to have another one."""


class Matcher:
    """Follows the tokens of one sequence; used by one thread at a time."""

    def __init__(self, inner: LLMatcher, eos_token_ids: frozenset[int], lexer: Lexer) -> None:
        self.inner = inner
        self.lexer = lexer
        self.has_ended = False
        """Whether an end-of-sequence id was consumed: what follows counts for nothing."""
        self._eos_token_ids = eos_token_ids
        self._consumed: list[int] = []

    @classmethod
    def of(cls, lark: str, vocabulary: Vocabulary) -> Matcher:
        """Compile `lark`; does not hold the interpreter meanwhile. Raises GrammarInvalid."""
        began = perf_counter()
        inner = LLMatcher(vocabulary.tokenizer, lark, log_level=0, limits=LIMITS)
        if inner.is_error():
            raise GrammarInvalid(short_reason(inner.get_error()))
        return cls(inner, frozenset(vocabulary.eos_token_ids), Lexer(perf_counter() - began))

    def copy(self) -> Matcher:
        """One of its own in the same state, in microseconds; copies share what they learn of the grammar's lexer."""
        copied = Matcher(self.inner.deep_copy(), self._eos_token_ids, self.lexer)
        copied.has_ended, copied._consumed = self.has_ended, self._consumed.copy()
        return copied

    def follow(self, other: Matcher) -> bool:
        """From the start of a text to where `other` stands; whether that went well."""
        went_well = self.consume_all(other._consumed)
        self.has_ended = other.has_ended
        return went_well

    def is_exhausted(self) -> bool:
        """Whether it cannot go on since there is no room for more states of its lexer, whoever has used it up."""
        return self.inner.is_error() and TOO_MANY_STATES in self.inner.get_error()

    def consume(self, token: int) -> bool:
        """Go on by `token`; False where the grammar has no place for it, and then this matcher is of no more use."""
        if self.has_ended:
            return True
        is_end = token in self._eos_token_ids
        # A grammar may name an end-of-sequence token itself; only there is it more than the end of a complete text.
        if not (is_end and self.inner.is_accepting()):
            if not self.inner.consume_token(token):
                return False
            self._consumed.append(token)
        self.has_ended = is_end
        return True

    def consume_all(self, tokens: Iterable[int]) -> bool:
        """Whether each of `tokens` had its place."""
        for token in tokens:  # noqa: SIM110
            if not self.consume(int(token)):
                return False
        return True

    def mark(self) -> tuple[bool, int]:
        """Where it stands now, for `return_to`."""
        return self.has_ended, len(self._consumed)

    def return_to(self, mark: tuple[bool, int]) -> bool:
        """Take back what was consumed since `mark`; False where that cannot be, and then it is of no more use."""
        self.has_ended, num_consumed = mark
        taken_back = len(self._consumed) - num_consumed
        del self._consumed[num_consumed:]
        return not taken_back or self.inner.rollback(taken_back)

    def error(self) -> str | None:
        """Why it cannot go on, if it cannot: a limit of llguidance, or a grammar that leads nowhere."""
        if not self.inner.is_stopped():
            return None
        if self.inner.stop_reason() == "NoExtensionBias":
            return "no text matches"
        return short_reason(self.inner.get_error()) if self.inner.is_error() else None


def short_reason(message: str) -> str:
    """What llguidance says, without the source and the state that it echoes."""
    for echo in ("\n<state>", "<grammar>", "<non-verbose/>"):
        message = message.split(echo, maxsplit=1)[0]
    message = SOURCE_LINE.split(message, maxsplit=1)[0]
    message = message.partition("failed to compile JSON schema: ")[2] or message
    for theirs, ours in WORDING.items():
        message = message.replace(theirs, ours)
    if message.strip() == "NoExtensionBias":
        return "no text matches"
    if "regex parse error:" in message:
        message = f"invalid regex: {message.rpartition('error: ')[2]}"
    return " ".join(message.split())[:MAX_MESSAGE]
