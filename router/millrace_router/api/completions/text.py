"""From the tokens of a generation to the text and the log probabilities of a text completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millrace_router.api.chat.shown import DEFAULT_TEXT, ShownText
from millrace_router.api.completions.echo import Echo
from millrace_router.api.completions.logprobs import CompletionLogprobs, no_logprobs
from millrace_router.api.completions.protocol import CompletionLogprobsJson
from millrace_router.api.openai.choice import ChoiceDelta, TrimmedText, text_before_special
from millrace_router.request.dialect import MILLRACE, Dialect
from millrace_router.request.events import PromptLogprobs, TokenEvent
from millrace_router.request.request import FinishReason

LENGTH = "length"
CompletionDelta = ChoiceDelta[CompletionLogprobsJson]
"""A type only: `ChoiceDelta` makes instances, because a call of the alias takes several times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """Options of all choices of a request."""

    stop_sequences: Sequence[str] = ()
    logprobs: CompletionLogprobs | None = None
    only_scores: bool = False
    """Whether the answer hides the one generated token."""
    dialect: Dialect = MILLRACE
    shown: ShownText = DEFAULT_TEXT
    streams: bool = False
    """Whether the answer is a stream: TGI shows special tokens, and its own finish reasons, in streams alone."""


class CompletionText(TrimmedText):
    """One choice: first the echo, then a delta for each token, until one has a finish reason."""

    def __init__(self, style: Style, echo: Echo | None = None) -> None:
        super().__init__([] if style.dialect.keeps_stops else style.stop_sequences, style.shown)
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
        """Return the echo of the prompt, if the request asks for one, with the log probabilities, if there are any."""
        if self._echo is None:
            return None
        logprobs = None
        if self._style.logprobs is not None and prompt is not None:
            logprobs = self._style.logprobs.prompt(prompt, self._echo)
        return ChoiceDelta(self._echo.text, None, 0, logprobs)

    def push(self, event: TokenEvent) -> CompletionDelta:
        """Take the next token."""
        self._num_tokens = event.index
        self._sum_of_logprobs += event.token.logprob
        if self._style.only_scores:
            empty = None if self._style.logprobs is None else no_logprobs()
            return ChoiceDelta("", LENGTH, 0, empty)
        text = self._text(event)
        logprobs = None
        if self._style.logprobs is not None and self._offsets is not None:
            offset = self._offsets.push(event.token, text)
            logprobs = self._style.logprobs.token(event, offset)
        text, reason = self._trim(event, text)
        id_ = event.token.id if self.has_token_ids else None
        return ChoiceDelta(text, reason, event.index, logprobs, (), "", id_)

    def _text(self, event: TokenEvent) -> str:
        token = event.token
        if self._is_usual and not token.special:
            return token.text
        style = self._style
        if event.finished is not None and style.shown.hides_end(event):
            return ""
        if not token.special or style.shown.special_tokens:
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
