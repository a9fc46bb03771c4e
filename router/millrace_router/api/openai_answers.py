"""OpenAI's answers as plain dictionaries for the JSON writer, in TGI's key order."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import orjson

from millrace_router.api.openai_json import (
    ChatCompletionChunkJson,
    ChatCompletionCompleteJson,
    ChatCompletionLogprobJson,
    ChatCompletionTopLogprobJson,
    HeadJson,
    OpenAIErrorResponseJson,
    StreamFailureJson,
    UsageJson,
)
from millrace_router.errors import RouterError
from millrace_router.events import Token, TokenEvent
from millrace_router.float32 import shortest
from millrace_router.request import FinishReason
from millrace_router.stopping import StopTrimmer

_FINISH_REASONS = {
    FinishReason.LENGTH: "length",
    FinishReason.EOS_TOKEN: "stop",
    FinishReason.STOP_SEQUENCE: "stop",
}


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one choice, or of several added up."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Tokens of the prompt that were found computed."""

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
        )

    def json(self) -> UsageJson:
        """Render."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(slots=True)
class Piece:
    """What one token adds to a choice; the last piece has a finish reason."""

    text: str
    finish_reason: str | None
    num_tokens: int
    """Tokens of the choice so far."""
    logprobs: ChatCompletionLogprobJson | None


class ChoiceText:
    """Turns a generation's tokens into a choice: special tokens hidden, cut before a stop string."""

    def __init__(
        self, stop_sequences: list[str], *, logprobs: bool = False, num_candidates: int = 0
    ) -> None:
        """With `logprobs`, each token has its own beside it, and those of so many candidates."""
        self._trimmer = StopTrimmer(stop_sequences)
        self._logprobs = logprobs
        self._num_candidates = num_candidates
        self._num_tokens = 0
        self._sum_of_logprobs = 0.0

    @property
    def mean_logprob(self) -> float:
        """Average log probability of the tokens taken, by which `best_of` judges; one is needed."""
        return self._sum_of_logprobs / self._num_tokens

    def push(self, event: TokenEvent) -> Piece:
        """Take the next token; nothing may follow a piece that has a finish reason."""
        token = event.token
        self._num_tokens = event.index
        self._sum_of_logprobs += token.logprob
        text = self._trimmer.push("" if token.special else token.text)
        reason: str | None = None
        if self._trimmer.stopped:
            reason = "stop"
        elif event.finished is not None:
            reason = _FINISH_REASONS[event.finished.finish_reason]
            text += self._trimmer.finish()
        logprobs = _logprobs(event, self._num_candidates) if self._logprobs else None
        return Piece(text, reason, event.index, logprobs)


def _logprobs(event: TokenEvent, num_candidates: int) -> ChatCompletionLogprobJson:
    """Render a token, and the first candidates: of those that tie for the last place some are left out."""
    entry = _token_logprob(event.token)
    candidates = event.top_tokens[:num_candidates]
    return {**entry, "top_logprobs": [_token_logprob(token) for token in candidates]}


def _token_logprob(token: Token) -> ChatCompletionTopLogprobJson:
    return {"token": token.text, "logprob": shortest(token.logprob)}


class AnswerHead:
    """The keys that every answer and chunk of one request begins with."""

    def __init__(self, kind: str, id_prefix: str, *, model: str, fingerprint: str) -> None:
        self._json: HeadJson = {
            "object": kind,
            "id": f"{id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def json(self, kind: str | None = None) -> HeadJson:
        """Render; `kind` replaces the usual `object`."""
        return {**self._json, "object": kind or self._json["object"]}


class ChunkTemplate:
    """A chunk that is rendered once, with room for the text that changes from token to token."""

    def __init__(self, render: Callable[[str], Mapping[str, object]]) -> None:
        mark = uuid.uuid4().hex
        self._before, self._after = orjson.dumps(render(mark)).split(orjson.dumps(mark))

    def fill(self, text: str) -> bytes:
        """Render the chunk with `text`."""
        return b"%b%b%b" % (self._before, orjson.dumps(text), self._after)


CHUNK = "chat.completion.chunk"


def chat_chunk(head: AnswerHead, piece: Piece, index: int = 0) -> ChatCompletionChunkJson:
    """Render the chunk of one token of the choice `index`."""
    return {
        **head.json(CHUNK),
        "choices": [
            {
                "index": index,
                "delta": {"role": "assistant", "content": piece.text},
                "logprobs": None if piece.logprobs is None else {"content": [piece.logprobs]},
                "finish_reason": piece.finish_reason,
            }
        ],
        "usage": None,
    }


def usage_chunk(head: AnswerHead, usage: Usage) -> ChatCompletionChunkJson:
    """Render the chunk that follows the last token."""
    return {**head.json(CHUNK), "choices": [], "usage": usage.json()}


def chat_choice(index: int, pieces: list[Piece]) -> ChatCompletionCompleteJson:
    """Render a choice of a chat completion in one piece."""
    logprobs = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    return {
        "index": index,
        "message": {"role": "assistant", "content": "".join(piece.text for piece in pieces)},
        "logprobs": {"content": logprobs} if logprobs else None,
        "finish_reason": pieces[-1].finish_reason,
    }


def error_answer(error: RouterError) -> OpenAIErrorResponseJson:
    """Render a failure that comes before the first byte."""
    return {
        "error": {**error_detail(error), "param": None, "code": None},
        "error_type": error.error_type,
    }


def error_detail(error: RouterError) -> StreamFailureJson:
    """Render a failure for the middle of a stream."""
    return {
        "message": str(error),
        "type": error.error_type,
        "http_status_code": error.status,
    }
