"""Answers and chunks of a chat, as plain dictionaries for the JSON writer, in TGI's key order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from millrace_router.api.openai.answers import AnswerHead, usage_json
from millrace_router.api.openai.choice import STOP, TOOL_CALLS, ChatDelta, token_ids
from millrace_router.api.openai.protocol import (
    ChatCompletionChoiceJson,
    ChatCompletionChunkJson,
    ChatCompletionCompleteJson,
    ChatCompletionDeltaJson,
    ChatCompletionJson,
    ChatCompletionLogprobJson,
    DeltaToolCallJson,
    FunctionJson,
    OutputMessageJson,
    TextDeltaJson,
    ThoughtDeltaJson,
    ThoughtsJson,
    ToolCallDeltaJson,
)
from millrace_router.engine.generation import Usage
from millrace_router.request.dialect import MILLRACE, Dialect
from millrace_router.tool_calls.tool import CallDelta

CHUNK = "chat.completion.chunk"
ROLE = "assistant"


class ChatAnswers:
    """Renders the answer to one request in its dialect."""

    def __init__(self, head: AnswerHead, dialect: Dialect = MILLRACE) -> None:
        self._head = head
        self._dialect = dialect

    def opening(
        self, index: int, prompt_ids: Sequence[int] | None = None
    ) -> ChatCompletionChunkJson | None:
        """Render what precedes the first chunk of the choice `index`, with `prompt_ids` also the prompt's tokens."""
        if self._dialect.repeats_role and prompt_ids is None:
            return None
        chunk = self._chunk(index, {"role": ROLE, "content": ""})
        if prompt_ids is not None:
            chunk["prompt_token_ids"] = list(prompt_ids)
        return chunk

    def text_chunk(self, index: int, text: str) -> ChatCompletionChunkJson:
        """Render a chunk with nothing but text."""
        return self._chunk(index, self._said(text))

    def thought_chunk(self, index: int, thought: str) -> ChatCompletionChunkJson:
        """Render a chunk with nothing but thought."""
        return self._chunk(index, self._thought(thought))

    def chunks(
        self, index: int, delta: ChatDelta, usage: Usage | None = None
    ) -> list[ChatCompletionChunkJson]:
        """Render the chunks of any delta: none if it has nothing to send, and one for each call in it.

        A finish reason comes in a chunk after all calls, because clients end a call when they read it.
        """
        parts = self._parts(delta)
        if delta.finish_reason is not None and (delta.calls or not parts):
            is_call = delta.finish_reason == TOOL_CALLS and not self._dialect.stops_after_calls
            parts.append({} if is_call else self._said(""))
        if not parts and (
            delta.logprobs is not None or usage is not None or delta.token_id is not None
        ):
            parts.append(self._said(""))
        last = len(parts) - 1
        return [
            self._chunk(
                index,
                part,
                logprobs=None if number else delta.logprobs,
                finish_reason=self._reason(delta.finish_reason) if number == last else None,
                usage=usage,
                token_id=None if number else delta.token_id,
            )
            for number, part in enumerate(parts)
        ]

    def usage_chunk(self, usage: Usage) -> ChatCompletionChunkJson:
        """Render the chunk after the last token."""
        return {**self._head.json(CHUNK), "choices": [], "usage": usage_json(usage)}

    def choice(self, index: int, deltas: Sequence[ChatDelta]) -> ChatCompletionCompleteJson:
        """Render a choice in one piece."""
        logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
        choice: ChatCompletionCompleteJson = {
            "index": index,
            "message": self._message(deltas),
            "logprobs": {"content": logprobs} if logprobs else None,
            "finish_reason": self._reason(deltas[-1].finish_reason),
        }
        if deltas[0].token_id is not None:
            choice["token_ids"] = token_ids(deltas)
        return choice

    def answer(
        self,
        choices: list[ChatCompletionCompleteJson],
        usage: Usage,
        prompt_ids: Sequence[int] | None = None,
    ) -> ChatCompletionJson:
        """Render all choices; with `prompt_ids` also the prompt's tokens."""
        answer: ChatCompletionJson = {
            **self._head.json(),
            "choices": choices,
            "usage": usage_json(usage),
        }
        if prompt_ids is not None:
            answer["prompt_token_ids"] = list(prompt_ids)
        return answer

    def _chunk(
        self,
        index: int,
        delta: ChatCompletionDeltaJson,
        *,
        logprobs: ChatCompletionLogprobJson | None = None,
        finish_reason: str | None = None,
        usage: Usage | None = None,
        token_id: int | None = None,
    ) -> ChatCompletionChunkJson:
        choice: ChatCompletionChoiceJson = {
            "index": index,
            "delta": self._delta(delta),
            "logprobs": None if logprobs is None else {"content": [logprobs]},
            "finish_reason": finish_reason,
        }
        if token_id is not None:
            choice["token_ids"] = [token_id]
        return {
            **self._head.json(CHUNK),
            "choices": [choice],
            "usage": None if usage is None else usage_json(usage),
        }

    def _delta(self, delta: ChatCompletionDeltaJson) -> ChatCompletionDeltaJson:
        return delta

    def _reason(self, reason: str | None) -> str | None:
        return STOP if reason == TOOL_CALLS and self._dialect.stops_after_calls else reason

    def _said(self, text: str) -> TextDeltaJson:
        return {"role": ROLE, "content": text} if self._dialect.repeats_role else {"content": text}

    def _thought(self, text: str) -> ThoughtDeltaJson:
        thought: ThoughtDeltaJson = {"reasoning_content": text, "reasoning": text}
        return {"role": ROLE, **thought} if self._dialect.repeats_role else thought

    def _parts(self, delta: ChatDelta) -> list[ChatCompletionDeltaJson]:
        parts: list[ChatCompletionDeltaJson] = []
        if delta.thought:
            parts.append(self._thought(delta.thought))
        if delta.text:
            parts.append(self._said(delta.text))
        for call in _joined(delta.calls):
            called: ToolCallDeltaJson = {"tool_calls": [self._called(call)]}
            parts.append({"role": ROLE, **called} if self._dialect.repeats_role else called)
        return parts

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

    def _message(self, deltas: Sequence[ChatDelta]) -> OutputMessageJson:
        text = "".join(delta.text for delta in deltas)
        calls = _joined([call for delta in deltas for call in delta.calls])
        thought = "".join(delta.thought for delta in deltas)
        thoughts: ThoughtsJson = (
            {"reasoning_content": thought, "reasoning": thought} if thought else {}
        )
        if not calls:
            return {"role": ROLE, "content": text, **thoughts}
        return {
            "role": ROLE,
            "content": text or None,
            **thoughts,
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


class OldChatAnswers(ChatAnswers):
    """Chunks for TGI's old clients, which want a role, and a call or null, in each of them."""

    def _delta(self, delta: ChatCompletionDeltaJson) -> ChatCompletionDeltaJson:
        old: dict[str, Any] = {"content": None, "tool_calls": None, **delta, "role": ROLE}
        # Each chunk has one call at most.
        for call in old["tool_calls"] or ():
            function = {"name": None, **call["function"]}
            old["tool_calls"] = {"id": "", "type": "function", **call, "function": function}
        return cast("ChatCompletionDeltaJson", old)


def _joined(parts: Sequence[CallDelta]) -> list[CallDelta]:
    """Join the deltas of each call; calls are in the order in which they begin."""
    calls: dict[int, CallDelta] = {}
    arguments: dict[int, list[str]] = {}
    for delta in parts:
        calls.setdefault(delta.index, delta)
        arguments.setdefault(delta.index, []).append(delta.arguments)
    return [replace(call, arguments="".join(arguments[index])) for index, call in calls.items()]


def _function(call: CallDelta) -> FunctionJson:
    if call.name is None:
        return {"arguments": call.arguments}
    return {"name": call.name, "arguments": call.arguments}
