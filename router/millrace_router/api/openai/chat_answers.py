"""Answers and chunks of a chat, as plain dictionaries for the JSON writer, in TGI's key order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from millrace_router.api.openai.answers import AnswerHead, usage_json
from millrace_router.api.openai.choice import STOP, TOOL_CALLS, ChatDelta
from millrace_router.api.openai.protocol import (
    ChatCompletionChunkJson,
    ChatCompletionCompleteJson,
    ChatCompletionDeltaJson,
    ChatCompletionJson,
    ChatCompletionLogprobJson,
    DeltaToolCallJson,
    FunctionJson,
    OutputMessageJson,
    TextDeltaJson,
    ToolCallDeltaJson,
)
from millrace_router.engine.usage import Usage
from millrace_router.request.dialect import MILLRACE, Dialect
from millrace_router.tool_calls.tool import CallDelta

CHUNK = "chat.completion.chunk"
ROLE = "assistant"


class ChatAnswers:
    """Renders the answer to one request, as its dialect has it."""

    def __init__(self, head: AnswerHead, dialect: Dialect = MILLRACE) -> None:
        self._head = head
        self._dialect = dialect

    def opening(self, index: int) -> ChatCompletionChunkJson | None:
        """Render what precedes the first chunk of the choice `index`."""
        if self._dialect.repeats_role:
            return None
        return self._chunk(index, {"role": ROLE, "content": ""})

    def text_chunk(self, index: int, text: str) -> ChatCompletionChunkJson:
        """Render a chunk that has nothing but text."""
        return self._chunk(index, self._said(text))

    def chunks(
        self, index: int, piece: ChatDelta, usage: Usage | None = None
    ) -> list[ChatCompletionChunkJson]:
        """Render a piece that may have anything: none if nothing is to be told, and one for each call in it.

        A finish reason comes with text, but after all calls: clients end a call when they read it.
        """
        deltas = self._deltas(piece)
        if piece.finish_reason is not None and (piece.calls or not deltas):
            is_call = piece.finish_reason == TOOL_CALLS and not self._dialect.stops_after_calls
            deltas.append({} if is_call else self._said(""))
        if not deltas and (piece.logprobs is not None or usage is not None):
            deltas.append(self._said(""))
        last = len(deltas) - 1
        return [
            self._chunk(
                index,
                delta,
                logprobs=None if number else piece.logprobs,
                finish_reason=self._reason(piece.finish_reason) if number == last else None,
                usage=usage,
            )
            for number, delta in enumerate(deltas)
        ]

    def usage_chunk(self, usage: Usage) -> ChatCompletionChunkJson:
        """Render the chunk that follows the last token."""
        return {**self._head.json(CHUNK), "choices": [], "usage": usage_json(usage)}

    def choice(self, index: int, pieces: Sequence[ChatDelta]) -> ChatCompletionCompleteJson:
        """Render a choice in one piece."""
        logprobs = [piece.logprobs for piece in pieces if piece.logprobs is not None]
        return {
            "index": index,
            "message": self._message(pieces),
            "logprobs": {"content": logprobs} if logprobs else None,
            "finish_reason": self._reason(pieces[-1].finish_reason),
        }

    def answer(self, choices: list[ChatCompletionCompleteJson], usage: Usage) -> ChatCompletionJson:
        """Render all choices."""
        return {**self._head.json(), "choices": choices, "usage": usage_json(usage)}

    def _chunk(
        self,
        index: int,
        delta: ChatCompletionDeltaJson,
        *,
        logprobs: ChatCompletionLogprobJson | None = None,
        finish_reason: str | None = None,
        usage: Usage | None = None,
    ) -> ChatCompletionChunkJson:
        return {
            **self._head.json(CHUNK),
            "choices": [
                {
                    "index": index,
                    "delta": delta,
                    "logprobs": None if logprobs is None else {"content": [logprobs]},
                    "finish_reason": finish_reason,
                }
            ],
            "usage": None if usage is None else usage_json(usage),
        }

    def _reason(self, reason: str | None) -> str | None:
        return STOP if reason == TOOL_CALLS and self._dialect.stops_after_calls else reason

    def _said(self, text: str) -> TextDeltaJson:
        return {"role": ROLE, "content": text} if self._dialect.repeats_role else {"content": text}

    def _deltas(self, piece: ChatDelta) -> list[ChatCompletionDeltaJson]:
        deltas: list[ChatCompletionDeltaJson] = [self._said(piece.text)] if piece.text else []
        for call in _joined(piece.calls):
            called: ToolCallDeltaJson = {"tool_calls": [self._called(call)]}
            deltas.append({"role": ROLE, **called} if self._dialect.repeats_role else called)
        return deltas

    def _called(self, call: CallDelta) -> DeltaToolCallJson:
        if call.name is None:
            return {"index": call.index, "function": _function(call)}
        return {
            "index": call.index,
            "id": self._id(call),
            "type": "function",
            "function": _function(call),
        }

    def _id(self, call: CallDelta) -> str:
        return str(call.index) if self._dialect.numbers_calls else call.id or ""

    def _message(self, pieces: Sequence[ChatDelta]) -> OutputMessageJson:
        text = "".join(piece.text for piece in pieces)
        calls = _joined([delta for piece in pieces for delta in piece.calls])
        if not calls:
            return {"role": ROLE, "content": text}
        return {
            "role": ROLE,
            "content": text or None,
            "tool_calls": [
                {
                    "id": self._id(call),
                    "type": "function",
                    "function": {
                        "description": None,
                        "name": call.name or "",
                        "arguments": call.arguments,
                    },
                }
                for call in calls
            ],
        }


def _joined(deltas: Sequence[CallDelta]) -> list[CallDelta]:
    """Put the pieces of each call together, calls in the order in which they begin."""
    calls: dict[int, CallDelta] = {}
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        calls.setdefault(delta.index, delta)
        arguments.setdefault(delta.index, []).append(delta.arguments)
    return [replace(call, arguments="".join(arguments[index])) for index, call in calls.items()]


def _function(call: CallDelta) -> FunctionJson:
    if call.name is None:
        return {"arguments": call.arguments}
    return {"name": call.name, "arguments": call.arguments}
