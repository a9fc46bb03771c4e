"""Anthropic's answers: in one piece, as a stream of events in Anthropic's order, and errors."""

from __future__ import annotations

import json
import sys
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from http import HTTPStatus
from itertools import chain
from typing import Any

import orjson

from millrace_router.api.anthropic.protocol import (
    BlockJson,
    InputJsonDeltaJson,
    MessageEndJson,
    MessageEventJson,
    MessagesAnswerJson,
    MessagesErrorResponseJson,
    MessagesToolUseJson,
    MessagesUsageJson,
    SignatureDeltaJson,
    ThinkingDeltaJson,
)
from millrace_router.api.anthropic.to_chat import tool_use_id
from millrace_router.api.chat.choice import ChatDelta, ChoiceText, ReadChoice, Thought, parts_of
from millrace_router.api.chat.stream import ChunkTemplate, EventStream
from millrace_router.engine.generation import Generation, Usage
from millrace_router.errors import GenerationError, RouterError, SizeError
from millrace_router.server.sse import named_event
from millrace_router.tool_calls.tool import CallDelta

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""Anthropic's stop reasons by OpenAI's finish reason."""
NO_END: MessageEndJson = {"stop_reason": None, "stop_sequence": None}
CLIENTS_FAULT = "invalid_request_error"
ERROR_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.INTERNAL_SERVER_ERROR: "api_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}
"""Types by status; every other status is `invalid_request_error`, as in Anthropic's API."""
STATUSES = {
    HTTPStatus.UNPROCESSABLE_ENTITY: HTTPStatus.BAD_REQUEST,
    HTTPStatus.FAILED_DEPENDENCY: HTTPStatus.INTERNAL_SERVER_ERROR,
}
"""Anthropic's statuses in place of those that its API does not have."""
NamedJson = tuple[str, bytes]
"""Name of an event, and its data."""
TEXT = -1
"""Key of the text block, where calls have their index."""
THOUGHT = -2
"""Key of the block of a thought."""


def status_of(error: RouterError) -> HTTPStatus:
    """Status of a failure on Anthropic's routes."""
    status = HTTPStatus(error.status)
    return STATUSES.get(status, status)


def text_of(error: RouterError) -> str:
    """Return the text of a failure: Anthropic's where agents read it, to shorten a conversation or an answer."""
    if not isinstance(error, SizeError):
        return error.client_text
    num_prompt, num_new = error.num_prompt_tokens, error.max_new_tokens
    most_prompt, most = error.max_prompt_tokens, error.max_total_tokens
    if most_prompt is not None and num_prompt > most_prompt:
        return f"prompt is too long: {num_prompt} tokens > {most_prompt} maximum"
    if most is None:
        return error.client_text
    return (
        f"input length and `max_tokens` exceed context limit: {num_prompt} + {num_new} > {most}, decrease input length"
        " or `max_tokens` and try again"
    )


def may_be_retried(error: RouterError) -> bool:
    """Whether clients may repeat the request; without this header they repeat every request that was answered 500."""
    return not isinstance(error, GenerationError)


def error_answer(status: HTTPStatus, message: str, request_id: str) -> MessagesErrorResponseJson:
    """Render a failure; an event of a stream has the same shape."""
    error_type = ERROR_TYPES.get(status, CLIENTS_FAULT)
    return {
        "type": "error",
        "error": {"type": error_type, "message": message},
        "request_id": request_id,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageHead:
    """The parts of a message that are known before its first token."""

    model: str
    id: str

    def json(
        self,
        usage: Usage,
        content: Sequence[BlockJson] = (),
        end: MessageEndJson = NO_END,
    ) -> MessagesAnswerJson:
        """Render the message so far."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": list(content),
            "stop_reason": end["stop_reason"],
            "stop_sequence": end["stop_sequence"],
            "usage": usage_json(usage),
        }


def usage_json(usage: Usage) -> MessagesUsageJson:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def end_json(finish_reason: str, stop: str | None) -> MessageEndJson:
    """Render why a message ended; calls take precedence over the stop sequence `stop` after them."""
    if stop is None or finish_reason == "tool_calls":
        return {"stop_reason": STOP_REASONS[finish_reason], "stop_sequence": None}
    return {"stop_reason": "stop_sequence", "stop_sequence": stop}


def message_json(head: MessageHead, choice: ReadChoice) -> MessagesAnswerJson:
    """Render a message in one piece."""
    end = end_json(choice.finish_reason, choice.stop_sequence)
    return head.json(choice.usage, blocks_of(choice.deltas), end)


def blocks_of(deltas: Sequence[ChatDelta]) -> list[BlockJson]:
    """Make the blocks of a whole message."""
    blocks: list[BlockJson] = []
    arguments: dict[int, str] = {}
    """By the index of the block."""
    for part in chain.from_iterable(map(parts_of, deltas)):
        last = blocks[-1] if blocks else None
        if isinstance(part, Thought):
            if last is None or last["type"] != "thinking":
                last = {"type": "thinking", "thinking": "", "signature": ""}
                blocks.append(last)
            last["thinking"] += part
        elif isinstance(part, CallDelta):
            if part.id is not None:
                arguments[len(blocks)] = ""
                blocks.append(tool_use_block(part))
            arguments[len(blocks) - 1] += part.arguments
        elif last is not None and last["type"] == "text":
            last["text"] += part
        else:
            blocks.append({"type": "text", "text": part})
    for block in blocks:
        if block["type"] == "thinking":
            block["signature"] = signature(block["thinking"])
    for index, text in arguments.items():
        block = blocks[index]
        assert block["type"] == "tool_use"
        block["input"] = input_of(text)
    return blocks


def signature(thought: str) -> str:
    """Return the hash of a thought as its signature, which clients require; it proves nothing."""
    return b64encode(blake2b(thought.encode(errors="surrogatepass")).digest()).decode()


def tool_use_block(first: CallDelta) -> MessagesToolUseJson:
    """Render a call without its arguments."""
    return {
        "type": "tool_use",
        "id": tool_use_id(first.id or ""),
        "name": first.name or "",
        "input": {},
    }


def input_of(arguments: str) -> dict[str, Any]:
    """Parse the arguments of a whole call; integers beyond 64 bits become floats, as in JavaScript.

    Numbers beyond all floats become the largest one: JSON cannot write infinity, and a whole call is not refused.
    """
    parsed: dict[str, Any]
    try:
        parsed = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        parsed = json.loads(arguments, parse_int=_number, parse_float=_float)
    return parsed


def _number(digits: str) -> float:
    return int(digits) if len(digits) < 19 else _float(digits)


def _float(digits: str) -> float:
    return max(-sys.float_info.max, min(float(digits), sys.float_info.max))


class MessageEvents:
    """Renders a message delta by delta; one block is open at a time."""

    def __init__(self, head: MessageHead) -> None:
        self._head = head
        self._num_blocks = 0
        self._open: int | None = None
        self._text: ChunkTemplate
        self._thoughts: list[str] = []
        """Parts of the open thought."""

    def start(self, usage: Usage) -> Iterator[NamedJson]:
        """Yield the first events; `usage` has the prompt's tokens."""
        yield _named({"type": "message_start", "message": self._head.json(usage)})
        yield _named({"type": "ping"})

    def push(self, delta: ChatDelta) -> Iterator[NamedJson]:
        """Yield what one token adds, if anything."""
        for part in parts_of(delta):
            if isinstance(part, Thought):
                yield from self._push_thought(part)
            elif isinstance(part, CallDelta):
                yield from self._push_call(part)
            else:
                yield from self._push_text(part)

    def finish(self, finish_reason: str, stop: str | None, usage: Usage) -> Iterator[NamedJson]:
        """Yield the last events, after the last delta was pushed."""
        yield from self._close()
        end = end_json(finish_reason, stop)
        yield _named({"type": "message_delta", "delta": end, "usage": usage_json(usage)})
        yield _named({"type": "message_stop"})

    def _push_thought(self, thought: str) -> Iterator[NamedJson]:
        if self._open != THOUGHT:
            yield from self._begin(THOUGHT, {"type": "thinking", "thinking": "", "signature": ""})
            self._thoughts = []
        self._thoughts.append(thought)
        yield self._delta({"type": "thinking_delta", "thinking": thought})

    def _push_text(self, text: str) -> Iterator[NamedJson]:
        if self._open != TEXT:
            yield from self._begin(TEXT, {"type": "text", "text": ""})
            index = self._num_blocks - 1
            self._text = ChunkTemplate(lambda text: _text_delta(index, text))
        yield "content_block_delta", self._text.fill(text)

    def _push_call(self, delta: CallDelta) -> Iterator[NamedJson]:
        if self._open != delta.index:
            yield from self._begin(delta.index, tool_use_block(delta))
        if delta.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": delta.arguments})

    def _delta(
        self, json: ThinkingDeltaJson | SignatureDeltaJson | InputJsonDeltaJson
    ) -> NamedJson:
        return _named({"type": "content_block_delta", "index": self._num_blocks - 1, "delta": json})

    def _begin(self, key: int, block: BlockJson) -> Iterator[NamedJson]:
        yield from self._close()
        yield _named(
            {"type": "content_block_start", "index": self._num_blocks, "content_block": block}
        )
        self._open = key
        self._num_blocks += 1

    def _close(self) -> Iterator[NamedJson]:
        if self._open == THOUGHT:
            signed = signature("".join(self._thoughts))
            yield self._delta({"type": "signature_delta", "signature": signed})
        if self._open is not None:
            yield _named({"type": "content_block_stop", "index": self._num_blocks - 1})
            self._open = None


def _text_delta(index: int, text: str) -> MessageEventJson:
    return {
        "type": "content_block_delta",
        "index": index,
        "delta": {"type": "text_delta", "text": text},
    }


def _named(json: MessageEventJson) -> NamedJson:
    return json["type"], orjson.dumps(json)


class MessageStream(EventStream):
    """Frames a message."""

    def __init__(self, generation: Generation, text: ChoiceText, head: MessageHead) -> None:
        super().__init__(generation, text)
        self._events = MessageEvents(head)

    def _begin(self) -> Iterator[bytes]:
        return _framed(self._events.start(self._generation.usage(0)))

    def _push(self, delta: ChatDelta) -> Iterator[bytes]:
        return _framed(self._events.push(delta))

    def _end(self, delta: ChatDelta, finish_reason: str) -> Iterator[bytes]:
        yield from _framed(self._events.push(delta))
        usage = self._generation.usage(delta.num_tokens)
        yield from _framed(self._events.finish(finish_reason, self._text.stop_sequence, usage))


def _framed(events: Iterable[NamedJson]) -> Iterator[bytes]:
    return (named_event(name, json) for name, json in events)
