"""The outputs of generations and chats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Prompt = str | tuple[int, ...]
"""A text, or token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of an answer, as it comes."""

    text: str
    index: int = 0
    """Number among the answers to one prompt."""
    token_ids: tuple[int, ...] | None = None
    """None where a server does not tell."""
    logprobs: tuple[float, ...] | None = None
    """One for each token; None where a server does not tell."""
    finish_reason: str | None = None
    """`stop` or `length` with the last piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One whole answer, with the fields of `Piece`."""

    index: int
    text: str
    token_ids: tuple[int, ...] | None
    logprobs: tuple[float, ...] | None
    finish_reason: str | None

    @classmethod
    def of(cls, pieces: list[Piece]) -> CompletionOutput:
        """Join the pieces of one answer, of which there is at least one."""
        has_ids = all(piece.token_ids is not None for piece in pieces)
        has_logprobs = all(piece.logprobs is not None for piece in pieces)
        return cls(
            index=pieces[0].index,
            text="".join(piece.text for piece in pieces),
            token_ids=tuple(each for p in pieces for each in p.token_ids or ())
            if has_ids
            else None,
            logprobs=tuple(each for p in pieces for each in p.logprobs or ())
            if has_logprobs
            else None,
            finish_reason=pieces[-1].finish_reason,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """All answers to one prompt."""

    prompt: Prompt
    outputs: tuple[CompletionOutput, ...]

    @property
    def text(self) -> str:
        """The text of the first answer."""
        return self.outputs[0].text


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOutput:
    """An answer to a chat."""

    answer: Mapping[str, Any]
    """The whole answer, as OpenAI's chat completions have it."""

    @property
    def message(self) -> Mapping[str, Any]:
        """The message of the first choice, with its tool calls and its thought if there are any."""
        message: Mapping[str, Any] = self.answer["choices"][0]["message"]
        return message

    @property
    def text(self) -> str:
        """The text of the first choice; empty where it has none."""
        return str(self.message.get("content") or "")

    @property
    def finish_reason(self) -> str | None:
        """`stop`, `length` or `tool_calls`, of the first choice."""
        reason: str | None = self.answer["choices"][0]["finish_reason"]
        return reason

    @property
    def usage(self) -> Mapping[str, Any]:
        usage: Mapping[str, Any] = self.answer["usage"]
        return usage


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPiece:
    """A part of an answer to a chat, as it comes."""

    index: int
    delta: Mapping[str, Any]
    """What is new: `content`, `tool_calls` and so on, as in OpenAI's chunks."""
    finish_reason: str | None

    @property
    def text(self) -> str:
        """The new text; often empty."""
        return str(self.delta.get("content") or "")


def chat_pieces(chunk: Mapping[str, Any]) -> list[ChatPiece]:
    """The parts in one of OpenAI's chunks."""
    return [
        ChatPiece(
            index=choice.get("index", 0),
            delta=choice.get("delta") or {},
            finish_reason=choice.get("finish_reason"),
        )
        for choice in chunk.get("choices") or ()
    ]
