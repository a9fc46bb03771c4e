"""From the tokens of a generation to the text, the tool calls and the log probabilities of a choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Generic, TypeVar

from typing_extensions import TypedDict

from millrace_router.api.body.sampling import DEFAULT_OUTPUT, OutputOptions
from millrace_router.api.chat.chat import PreparedChat
from millrace_router.engine.generation import Generation, Usage
from millrace_router.reasoning.reasoning_format import Split, Splitter
from millrace_router.request.float32 import shortest
from millrace_router.request.request import FinishReason
from millrace_router.request.token_stream import Token, TokenEvent, read_tokens
from millrace_router.text.stopping import StopTrimmer
from millrace_router.text.tokenizer import Tokenizer
from millrace_router.tool_calls.tool import AnswerParser, CallDelta, Parsed

STOP = "stop"
TOOL_CALLS = "tool_calls"
STOP_SEQUENCE = "stop_sequence"
_FINISH_REASONS = {
    FinishReason.LENGTH: "length",
    FinishReason.EOS_TOKEN: STOP,
    FinishReason.STOP_SEQUENCE: STOP,
}
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
THOUGHT = "thought"
"""The part of an answer that names the calls in a thought."""
LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON numbers cannot express."""
Logprobs = TypeVar("Logprobs")


class CachedTokensJson(TypedDict):
    """Details of a prompt's tokens."""

    cached_tokens: int


class ChatCompletionTopLogprobJson(TypedDict):
    """A token and its log probability."""

    token: str
    logprob: float
    bytes: list[int]
    """UTF-8 of the text that it adds, cut anywhere."""


class ChatCompletionLogprobJson(ChatCompletionTopLogprobJson):
    """A generated token, and the likeliest tokens in its place."""

    top_logprobs: list[ChatCompletionTopLogprobJson]


@dataclass(slots=True)
class ChoiceDelta(Generic[Logprobs]):
    """The addition of one token to a choice; the last delta has a finish reason."""

    text: str
    finish_reason: str | None
    """`stop`, `length` or `tool_calls`; with stop strings kept also `stop_sequence`."""
    num_tokens: int
    """Tokens of the choice so far."""
    logprobs: Logprobs | None
    calls: tuple[CallDelta, ...] = ()
    thought: str = ""
    """It precedes the text."""
    token_id: int | None = None
    """The token, if the answer has token ids."""


ChatDelta = ChoiceDelta[ChatCompletionLogprobJson]


def id_name(token_id: int) -> str:
    """Name a token by its id, in vLLM's form."""
    return f"token_id:{token_id}"


def token_ids(deltas: Sequence[ChoiceDelta[Logprobs]]) -> list[int]:
    """Return the tokens of deltas that have their ids."""
    return [delta.token_id for delta in deltas if delta.token_id is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Renders the log probabilities of a choice's tokens."""

    num_candidates: int
    bytes_of: Callable[[Token], bytes]
    """Returns the bytes that a token adds to the text; they may end within a character."""
    names_ids: bool = False
    """Whether tokens are named by their ids, as in `token_id:5`."""

    def json(self, event: TokenEvent) -> ChatCompletionLogprobJson:
        """Render a token and its first candidates; candidates that tie for the last place may be missing."""
        candidates = event.top_tokens[: self.num_candidates]
        return {
            **self._token(event.token),
            "top_logprobs": [self._token(token) for token in candidates],
        }

    def _token(self, token: Token) -> ChatCompletionTopLogprobJson:
        logprob = shortest(token.logprob)
        return {
            "token": id_name(token.id) if self.names_ids else token.text,
            "logprob": LEAST_LOGPROB if logprob is None else logprob,
            "bytes": list(self.bytes_of(token)),
        }


def text_before_special(token: Token) -> str:
    """Return the end of the text before a special token: a character that it has cut short, if there is one."""
    return token.text[: len(token.text) - len(token.text.lstrip(_REPLACEMENT))]


class TrimmedText:
    """Text of a choice, cut before a stop string."""

    def __init__(
        self, stop_sequences: Sequence[str], output_options: OutputOptions = DEFAULT_OUTPUT
    ) -> None:
        self._trimmer = StopTrimmer(stop_sequences)
        self._output_options = output_options
        # Read with every token: the usual text needs no look at the options.
        self._is_usual = not (output_options.special_tokens or output_options.stop_token_ids)
        self.has_token_ids = output_options.token_ids
        """Whether the deltas have the ids of tokens."""
        self.is_verbatim = self._is_usual and not (output_options.token_ids or any(stop_sequences))
        """Whether a token that is neither special nor the last one adds its text and nothing else."""

    @property
    def stop_sequence(self) -> str | None:
        """The stop string that the text was cut before, if there was one."""
        return self._trimmer.stop

    def _has_logprobs(self, event: TokenEvent, *, names_ids: bool) -> bool:
        """Return whether the log probabilities have the token: one that ends the answer only if it is part of the text.

        Where tokens have their ids, as in vLLM, all have log probabilities.
        """
        finished, options = event.finished, self._output_options
        if finished is None or names_ids or self.has_token_ids:
            return True
        is_end = finished.finish_reason is FinishReason.EOS_TOKEN and event.token.special
        return not (is_end and not options.special_tokens) and not options.hides_end(event)

    def _trim(self, event: TokenEvent, text: str) -> tuple[str, str | None]:
        """Take the text of the next token; return what may be shown, and the finish reason of the last token."""
        text = self._trimmer.push(text)
        if self._trimmer.stop is not None:
            return text + self._trimmer.stop if self._output_options.stops else text, STOP
        if event.finished is None:
            return text, None
        return text + self._trimmer.finish(), self._reason(event.finished.finish_reason)

    def _reason(self, reason: FinishReason) -> str:
        """Name the reason for which a generation ended."""
        return _FINISH_REASONS[reason]


class ChoiceText(TrimmedText):
    """Turns a generation's tokens into a choice: hides special tokens, cuts before a stop string, extracts calls."""

    def __init__(  # noqa: PLR0913
        self,
        stop_sequences: Sequence[str],
        *,
        logprobs: TokenLogprobs | None = None,
        parser: AnswerParser | None = None,
        thought_parser: AnswerParser | None = None,
        markers: Sequence[str] = (),
        keeps_stops: bool = False,
        splitter: Splitter | None = None,
        shows_thought: bool = True,
        output_options: OutputOptions = DEFAULT_OUTPUT,
    ) -> None:
        """With `parser` the choice may have calls, and with `splitter` a thought; their text includes `markers`.

        `thought_parser` finds calls in a thought that never closes.

        Markers are special tokens. With `keeps_stops` a stop string stays in the text, and the finish reason names it,
        as in TGI.
        """
        super().__init__([] if keeps_stops else stop_sequences, output_options)
        self._logprobs = logprobs
        self._parser = parser
        self._thought_parser = thought_parser
        self.may_call = parser is not None
        """Whether the choice may have calls, so that text may be held back for long."""
        self._markers = tuple(markers)
        self._keeps_stops = keeps_stops
        self._num_called = 0
        self._num_whole = 0
        self._splitter = splitter
        self._thoughts: list[str] = []
        self._shows_thought = shows_thought
        if not (logprobs is None and parser is None and splitter is None):
            self.is_verbatim = False
        self.reasoning_tokens: int | None = None if splitter is None else 0
        """Tokens of the thought so far, its tags among them; None if thoughts are not split from the text."""

    @property
    def is_broken(self) -> bool:
        """Whether the choice has a call that has not ended; at the end, it is broken or cut."""
        return self._num_whole < self._num_called

    def push(self, event: TokenEvent) -> ChatDelta:
        """Take the next token; nothing may follow a delta that has a finish reason."""
        token = event.token
        is_plain = self._is_usual and not token.special
        text, thought = token.text if is_plain else self._text_of(event), ""
        if self._splitter is not None:
            thought, text = self._split(self._splitter, text, ended=event.finished is not None)
        text, reason = self._trim(event, text)
        logprobs, source = None, self._logprobs
        if source is not None and self._has_logprobs(event, names_ids=source.names_ids):
            logprobs = source.json(event)
        id_ = token.id if self.has_token_ids else None
        if self._parser is None:
            return ChoiceDelta(text, reason, event.index, logprobs, (), thought, id_)
        parsed = self._parse(self._parser, text, ended=reason is not None)
        if event.finished is not None and event.finished.finish_reason is FinishReason.EOS_TOKEN:
            parsed.calls += self._calls_in_thought()
        for call in parsed.calls:
            self._num_called += call.id is not None
            self._num_whole += call.is_last
        if reason == STOP and self._num_whole and not self.is_broken:
            reason = TOOL_CALLS
        return ChoiceDelta(parsed.text, reason, event.index, logprobs, parsed.calls, thought, id_)

    def _text_of(self, event: TokenEvent) -> str:
        """Return the text of a token that may be part of the choice."""
        token = event.token
        if event.finished is not None and self._output_options.hides_end(event):
            return ""
        if token.special and not self._output_options.special_tokens:
            return self._hidden(token)
        return token.text

    def _hidden(self, token: Token) -> str:
        """Return the text before a special token, and the part of the token that the parser needs."""
        marker = next((marker for marker in self._markers if token.text.endswith(marker)), "")
        return text_before_special(token) + marker

    def _reason(self, reason: FinishReason) -> str:
        if self._keeps_stops and reason is FinishReason.STOP_SEQUENCE:
            return STOP_SEQUENCE
        return super()._reason(reason)

    def _split(self, splitter: Splitter, text: str, *, ended: bool) -> Split:
        thought = splitter.thinks
        split = splitter.push(text)
        if ended:
            rest = splitter.finish()
            split = Split(split.thought + rest.thought, split.answer + rest.answer)
        if not (thought or splitter.thinks or split.thought):
            return split
        assert self.reasoning_tokens is not None
        self.reasoning_tokens += 1
        if self._thought_parser is not None:
            self._thoughts.append(split.thought)
        return split if self._shows_thought else Split("", split.answer)

    def _parse(self, parser: AnswerParser, text: str, *, ended: bool) -> Parsed:
        parsed = parser.push(text)
        if ended:
            rest = parser.finish()
            parsed = Parsed(parsed.text + rest.text, parsed.calls + rest.calls)
        return parsed

    def _calls_in_thought(self) -> tuple[CallDelta, ...]:
        """Return the whole calls in a thought that the model ended its answer in."""
        parser = self._thought_parser
        if parser is None or self._splitter is None or not self._splitter.thinks:
            return ()
        calls = (*parser.push("".join(self._thoughts)).calls, *parser.finish().calls)
        whole = [call.index for call in calls if call.is_last]
        return tuple(
            replace(call, index=self._num_called + whole.index(call.index))
            for call in calls
            if call.index in whole
        )


def without_broken(deltas: Sequence[ChatDelta]) -> list[ChatDelta]:
    """Return a choice whose broken and cut calls are text again."""
    whole = [call.index for delta in deltas for call in delta.calls if call.is_last]
    made = []
    for delta in deltas:
        parts, calls = list[str](), list[CallDelta]()
        for part in parts_of(delta):
            if not isinstance(part, CallDelta):
                parts += [] if isinstance(part, Thought) else [part]
            elif part.index in whole:
                calls.append(replace(part, index=whole.index(part.index)))
            else:
                parts.append(part.source)
        made.append(replace(delta, text="".join(parts), calls=tuple(calls)))
    if whole and made[-1].finish_reason == STOP:
        made[-1] = replace(made[-1], finish_reason=TOOL_CALLS)
    return made


class Thought(str):
    """A part of a thought, where other text is a part of the answer."""

    __slots__ = ()


def parts_of(delta: ChatDelta) -> Iterator[Thought | str | CallDelta]:
    """Yield the parts of a delta in order: thought, the rest of a call, text, new calls."""
    if delta.thought:
        yield Thought(delta.thought)
    calls = iter(delta.calls)
    for call in calls:
        if call.id is not None:
            calls = chain((call,), calls)
            break
        yield call
    if delta.text:
        yield delta.text
    yield from calls


def reader(prepared: PreparedChat, index: int = 0) -> ChoiceText:
    """Return a new reader of the choice `index` of a chat."""
    names = prepared.names.part(index)
    chat, reasoning, tools = prepared.chat, prepared.reasoning, prepared.tools
    markers = set(prepared.tool_format.markers) if tools else set()
    splitter = None
    if reasoning is not None:
        markers |= reasoning.special
        splitter = reasoning.splitter(prepared.start, keeps_calls=bool(tools))
    return ChoiceText(
        prepared.request.stop,
        logprobs=_logprobs(prepared),
        parser=prepared.tool_format.parser(tools, chat.choice, names) if tools else None,
        thought_parser=prepared.tool_format.parser(tools, chat.choice, names.part(THOUGHT))
        if tools and splitter is not None
        else None,
        markers=sorted(markers),
        keeps_stops=chat.keeps_stops,
        splitter=splitter,
        shows_thought=chat.shows_thought,
        output_options=chat.output_options,
    )


def _logprobs(prepared: PreparedChat) -> TokenLogprobs | None:
    if prepared.chat.num_logprobs is None:
        return None
    return TokenLogprobs(
        num_candidates=prepared.chat.num_logprobs,
        bytes_of=partial(_bytes_of, prepared.tokenizer),
        names_ids=prepared.chat.logprobs_name_ids,
    )


def _bytes_of(tokenizer: Tokenizer, token: Token) -> bytes:
    if tokenizer.has_token_bytes and not token.special:
        return tokenizer.token_bytes(token.id)
    return token.text.encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadChoice:
    """A choice that has been read to its end."""

    deltas: Sequence[ChatDelta]
    finish_reason: str
    stop_sequence: str | None
    """The stop string that the text was cut before, if there was one."""
    usage: Usage


async def read_choice(generation: Generation, chat: PreparedChat) -> ReadChoice:
    """Read one choice, until a delta has a finish reason; raises RouterError."""
    text, deltas = reader(chat, generation.sample), list[ChatDelta]()

    def take(token: TokenEvent) -> bool:
        deltas.append(text.push(token))
        return deltas[-1].finish_reason is not None

    await read_tokens(generation, take)
    if text.is_broken:
        deltas = without_broken(deltas)
    last = deltas[-1]
    assert last.finish_reason is not None
    return ReadChoice(
        deltas=deltas,
        finish_reason=last.finish_reason,
        stop_sequence=text.stop_sequence,
        usage=generation.usage(last.num_tokens, text.reasoning_tokens),
    )
