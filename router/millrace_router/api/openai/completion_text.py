"""From the tokens of a generation to the echo, the text and the log probabilities of a text completion."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from millrace_router.api.body.sampling import DEFAULT_OUTPUT, OutputOptions
from millrace_router.api.chat.choice import (
    LEAST_LOGPROB,
    ChoiceDelta,
    TrimmedText,
    id_name,
    text_before_special,
)
from millrace_router.api.openai.protocol import CompletionLogprobsJson
from millrace_router.request.float32 import shortest
from millrace_router.request.limits import MILLRACE, Dialect
from millrace_router.request.request import FinishReason
from millrace_router.request.token_stream import PromptLogprobs, Token, TokenEvent
from millrace_router.text.detokenizer import IncrementalDetokenizer
from millrace_router.text.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")
LENGTH = "length"
CompletionDelta = ChoiceDelta[CompletionLogprobsJson]
"""A type only: `ChoiceDelta` makes instances, because a call of the alias takes several times as long."""


@dataclass(frozen=True, slots=True)
class Echo:
    """The text of a prompt, and the position in it where each token begins."""

    text: str
    starts: Sequence[int]


async def echo_of(
    tokenizer: Tokenizer, prompt: str | tuple[int, ...], *, adds_special_tokens: bool = True
) -> Echo:
    """Make the text of a prompt, which is a text or token ids, off the event loop; raises TokenizerError."""
    if isinstance(prompt, str):
        pairs = await tokenizer.in_thread(
            lambda: tokenizer.encode_with_starts(prompt, add_special_tokens=adds_special_tokens),
            num_chars=len(prompt),
        )
        return Echo(prompt, [start for _, start in pairs])
    return await tokenizer.in_thread(lambda: _spelled(tokenizer, prompt))


def _spelled(tokenizer: Tokenizer, ids: tuple[int, ...]) -> Echo:
    """Decode `ids` without special tokens, as in generated text."""
    detokenizer = IncrementalDetokenizer(tokenizer, ())
    texts, starts, length = [], [], 0
    for id_ in ids:
        is_special = tokenizer.is_special(id_)
        text = detokenizer.flush() if is_special else detokenizer.step(id_)
        starts.append(length + len(text) if is_special else length)
        texts.append(text)
        length += len(text)
    texts.append(detokenizer.flush())
    text, whole = "".join(texts), tokenizer.decode(ids, skip_special_tokens=True)
    # Some decoders drop the space before a text's first word, and nothing else.
    num_dropped = len(text) - len(whole) if text.endswith(whole) else 0
    return Echo(text[num_dropped:], [max(start - num_dropped, 0) for start in starts])


class CompletionOffsets:
    """Follows the text of one choice.

    All tokens of one character have its position. A character that stays unfinished appears with the next token,
    whose own text begins one position later.
    """

    def __init__(self, tokenizer: Tokenizer, start: int) -> None:
        self._tokenizer = tokenizer
        self._end = start
        self._utf8 = _Utf8Decoder(errors="replace")

    def push(self, token: Token, text: str) -> int:
        """Take the next token and the text sent with it; return the position of the token's own text."""
        start = self._end
        self._end += len(text)
        if not self._tokenizer.has_token_bytes:
            return start
        unfinished = self._utf8.getstate()[0]
        if token.special:
            self._utf8.reset()
            is_continued = not unfinished
        else:
            added = self._tokenizer.token_bytes(token.id)
            self._utf8.decode(added)
            is_continued = _is_continued(unfinished, added[:1])
        is_after = text.startswith(_REPLACEMENT) and not is_continued
        return start + is_after


def _is_continued(unfinished: bytes, byte: bytes) -> bool:
    """Whether `byte` continues the unfinished character, if there is one."""
    if not unfinished:
        return True
    try:
        _Utf8Decoder().decode(unfinished + byte)
    except UnicodeDecodeError:
        return False
    return True


class CompletionLogprobs:
    """Renders tokens with `num_candidates` each; candidates that tie for the last place may be missing.

    A token is named by its text, or by its bytes if they are not whole characters. If several tokens have one name,
    the map has the likeliest.
    """

    def __init__(
        self, tokenizer: Tokenizer, num_candidates: int, *, names_ids: bool = False
    ) -> None:
        """With `names_ids`, the name of a token is its id, as in `token_id:5`."""
        self._tokenizer = tokenizer
        self.names_ids = names_ids
        self._name: Callable[[int], str] = id_name if names_ids else tokenizer.token_name
        self._num_candidates = num_candidates

    def offsets(self, start: int) -> CompletionOffsets:
        """Make the offsets of a choice whose generated text begins at `start`."""
        return CompletionOffsets(self._tokenizer, start)

    def prompt(self, prompt: PromptLogprobs, echo: Echo) -> CompletionLogprobsJson:
        """Render the columns of a whole prompt, whose first token has no log probability."""
        columns = no_logprobs()
        for index, (id_, start) in enumerate(zip(prompt.ids, echo.starts, strict=True)):
            columns["tokens"].append(self._name(id_))
            columns["text_offset"].append(start)
            if index == 0:
                columns["token_logprobs"].append(None)
                columns["top_logprobs"].append(None)
                continue
            logprob = prompt.logprobs[index]
            columns["token_logprobs"].append(_number(logprob))
            columns["top_logprobs"].append(self._map((id_, logprob), prompt.candidates(index)))
        return columns

    def token(self, event: TokenEvent, offset: int) -> CompletionLogprobsJson:
        """Render the columns of one generated token that begins at `offset`."""
        token = event.token
        top = ((candidate.id, candidate.logprob) for candidate in event.top_tokens)
        return {
            "tokens": [self._name(token.id)],
            "token_logprobs": [_number(token.logprob)],
            "top_logprobs": [self._map((token.id, token.logprob), top)],
            "text_offset": [offset],
        }

    def _map(
        self, token: tuple[int, float], candidates: Iterable[tuple[int, float]]
    ) -> dict[str, float]:
        named: dict[str, float] = {}
        for id_, logprob in self._with(token, candidates):
            named.setdefault(self._name(id_), _number(logprob))
        return named

    def _with(
        self, token: tuple[int, float], candidates: Iterable[tuple[int, float]]
    ) -> Iterator[tuple[int, float]]:
        yield from islice(candidates, self._num_candidates)
        yield token


def no_logprobs() -> CompletionLogprobsJson:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def join(parts: Iterable[CompletionLogprobsJson]) -> CompletionLogprobsJson:
    columns = no_logprobs()
    for part in parts:
        columns["tokens"] += part["tokens"]
        columns["token_logprobs"] += part["token_logprobs"]
        columns["top_logprobs"] += part["top_logprobs"]
        columns["text_offset"] += part["text_offset"]
    return columns


def _number(logprob: float) -> float:
    number = shortest(logprob)
    return LEAST_LOGPROB if number is None else number


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """Options of all choices of a request."""

    stop_sequences: Sequence[str] = ()
    logprobs: CompletionLogprobs | None = None
    only_scores: bool = False
    """Whether the answer hides the one generated token."""
    dialect: Dialect = MILLRACE
    output_options: OutputOptions = DEFAULT_OUTPUT
    streams: bool = False
    """Whether the answer is a stream: TGI shows special tokens, and its own finish reasons, only in streams."""


class CompletionText(TrimmedText):
    """One choice: first the echo, then a delta for each token, until one has a finish reason."""

    def __init__(self, style: Style, echo: Echo | None = None) -> None:
        super().__init__(
            [] if style.dialect.keeps_stops else style.stop_sequences, style.output_options
        )
        self._style = style
        if style.only_scores or style.logprobs is not None:
            self.is_verbatim = False
        self._echo = echo
        start = 0 if echo is None else len(echo.text)
        self._offsets = None if style.logprobs is None else style.logprobs.offsets(start)
        self._num_tokens = 0
        self._sum_of_logprobs = 0.0

    @property
    def mean_logprob(self) -> float:
        """Average log probability of the tokens taken, by which `best_of` judges; one is needed."""
        return self._sum_of_logprobs / self._num_tokens

    def opening(self, prompt: PromptLogprobs | None) -> CompletionDelta | None:
        """Return the echo of the prompt if it is requested, with the log probabilities if they are requested."""
        if self._echo is None:
            return None
        logprobs = None
        if self._style.logprobs is not None and prompt is not None:
            logprobs = self._style.logprobs.prompt(prompt, self._echo)
        return ChoiceDelta(self._echo.text, None, 0, logprobs)

    def push(self, event: TokenEvent) -> CompletionDelta:
        self._num_tokens = event.index
        self._sum_of_logprobs += event.token.logprob
        if self._style.only_scores:
            empty = None if self._style.logprobs is None else no_logprobs()
            return ChoiceDelta("", LENGTH, 0, empty)
        text = self._text(event)
        logprobs = None
        if self._style.logprobs is not None and self._offsets is not None:
            offset = self._offsets.push(event.token, text)
            logprobs = no_logprobs()
            shows_all = self._style.logprobs.names_ids or self._style.dialect.shows_special_tokens
            if self._has_logprobs(event, names_ids=shows_all):
                logprobs = self._style.logprobs.token(event, offset)
        text, reason = self._trim(event, text)
        id_ = event.token.id if self.has_token_ids else None
        return ChoiceDelta(text, reason, event.index, logprobs, (), "", id_)

    def _text(self, event: TokenEvent) -> str:
        token = event.token
        if self._is_usual and not token.special:
            return token.text
        style = self._style
        if event.finished is not None and style.output_options.hides_end(event):
            return ""
        if not token.special or style.output_options.special_tokens:
            return token.text
        if style.dialect.shows_special_tokens and style.streams:
            return token.text
        return text_before_special(token)

    def _reason(self, reason: FinishReason) -> str:
        if self._style.dialect.has_tgi_reasons and (
            self._style.streams or reason is FinishReason.STOP_SEQUENCE
        ):
            return str(reason)
        return super()._reason(reason)
