"""The state of a grammar along one sequence, over llguidance's matcher."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter

from llguidance import LLMatcher, LLParserLimits

from millrace_shard.structured_output.closing import Closing, ClosingState, Ending
from millrace_shard.structured_output.grammar_source import GrammarInvalid
from millrace_shard.structured_output.vocabulary import Vocabulary

MAX_MESSAGE = 500
LIMITS = LLParserLimits(max_lexer_states=100_000, verbose_errors=False)
"""The defaults of llguidance, which limit a mask to about 20 ms, with fewer lexer states: a state takes 1 to 2 kB."""

WORDING = {
    "Unimplemented keys:": "not supported:",
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf": (
        "`oneOf` is supported only where a type or a required property distinguishes its options"
    ),
}
"""Messages of llguidance for programmers, and our wording for users who write schemas."""
SOURCE_LINE = re.compile(r"\n *[0-9]+ \| ")


TOO_MANY_STATES = "lexer error: too many states"


@dataclass(slots=True, eq=False)
class Lexer:
    """The lexer states of a grammar, which all copies of a matcher share; their number is limited."""

    compile_seconds: float
    """Time to compile another one."""
    ending: Ending | None = None
    """The ending of the grammar's empty text, once one is found."""
    none_within: int = 0
    """A number of tokens within which none was found."""
    state_bytes: int = 0
    """Memory of the states that texts have reached so far, as `MaskComputer` measures it."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A state of a matcher."""

    has_ended: bool
    num_consumed: int
    closing: ClosingState | None


class Matcher:
    """Follows the tokens of one sequence. One thread at a time uses it."""

    def __init__(self, inner: LLMatcher, eos_token_ids: frozenset[int], lexer: Lexer) -> None:
        self.inner = inner
        self.lexer = lexer
        self.has_ended = False
        """Whether it has consumed an end-of-sequence id; later tokens do not count."""
        self.closing: Closing | None = None
        """The closing of its text within a limit of tokens, if there is a limit."""
        self._eos_token_ids = eos_token_ids
        self._consumed: list[int] = []

    @classmethod
    def of(cls, lark: str, vocabulary: Vocabulary) -> Matcher:
        """Compile `lark` without the interpreter lock. Raises GrammarInvalid."""
        began = perf_counter()
        inner = LLMatcher(vocabulary.tokenizer, lark, log_level=0, limits=LIMITS)
        if inner.is_error():
            raise GrammarInvalid(short_reason(inner.get_error()))
        return cls(inner, frozenset(vocabulary.eos_token_ids), Lexer(perf_counter() - began))

    def copy(self) -> Matcher:
        """A copy in the same state, in microseconds, without a limit; all copies share the lexer states."""
        copied = Matcher(self.inner.deep_copy(), self._eos_token_ids, self.lexer)
        copied.has_ended, copied._consumed = self.has_ended, self._consumed.copy()
        return copied

    def limit(self, num_tokens: int, vocabulary: Vocabulary) -> None:
        """Have the text, which is empty, closed within `num_tokens` tokens if possible."""
        lexer = self.lexer
        is_out_of_reach = num_tokens <= lexer.none_within
        self.closing = Closing(
            vocabulary.closing, num_tokens, lexer.ending, is_out_of_reach=is_out_of_reach
        )
        self.look()
        if (ending := self.closing.state.ending) or self.inner.is_accepting():
            lexer.ending = ending
        else:
            lexer.none_within = max(lexer.none_within, num_tokens)

    def look(self) -> int | None:
        """The only token that the limit allows next; None without a limit, or if it allows what the grammar allows."""
        if self.closing is None:
            return None
        position = len(self._consumed)
        self.closing.look(self.inner, position)
        return self.closing.next_token(position)

    def follow(self, other: Matcher) -> bool:
        """Consume the text of `other`, from its start; returns whether it matches."""
        is_match = self.consume_all(other._consumed)
        self.has_ended = other.has_ended
        return is_match

    def is_exhausted(self) -> bool:
        """Whether its lexer has no room for more states, which any sequence of the grammar may have used up."""
        return self.inner.is_error() and TOO_MANY_STATES in self.inner.get_error()

    def consume(self, token: int) -> bool:
        """Consume `token`; False if the grammar does not allow it, after which the matcher is unusable."""
        if self.has_ended:
            return True
        if self.closing is not None:
            self.look()
        is_end = token in self._eos_token_ids
        # A grammar may contain an end-of-sequence token; elsewhere this token ends a complete text.
        if not (is_end and self.inner.is_accepting()):
            if not self.inner.consume_token(token):
                return False
            self._consumed.append(token)
        self.has_ended = is_end
        return True

    def consume_all(self, tokens: Iterable[int]) -> bool:
        """Consume `tokens`; returns whether the grammar allows each of them."""
        for token in tokens:  # noqa: SIM110
            if not self.consume(int(token)):
                return False
        return True

    def mark(self) -> Mark:
        closing = None if self.closing is None else self.closing.state
        return Mark(self.has_ended, len(self._consumed), closing)

    def return_to(self, mark: Mark) -> bool:
        """Return to the state `mark`; False if that fails, after which the matcher is unusable."""
        self.has_ended, num_consumed = mark.has_ended, mark.num_consumed
        if self.closing is not None and mark.closing is not None:
            self.closing.state = mark.closing
        taken_back = len(self._consumed) - num_consumed
        del self._consumed[num_consumed:]
        return not taken_back or self.inner.rollback(taken_back)

    def error(self) -> str | None:
        """The reason if no token can follow: a limit of llguidance, or a grammar without a match."""
        if not self.inner.is_stopped():
            return None
        if self.inner.stop_reason() == "NoExtensionBias":
            return "no text matches"
        return short_reason(self.inner.get_error()) if self.inner.is_error() else None


def short_reason(message: str) -> str:
    """A message of llguidance without the source and the state that it echoes."""
    for echo in ("\n<state>", "<grammar>", "<non-verbose/>", " while processing json-schema:"):
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
