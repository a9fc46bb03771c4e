"""Builds Anthropic's answers and errors."""

from __future__ import annotations

import secrets
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from http import HTTPStatus
from itertools import chain
from typing import Any

from pydantic_core import from_json

from millrace_router.api.anthropic.protocol import (
    BlockJson,
    MessageEndJson,
    MessagesAnswerJson,
    MessagesErrorResponseJson,
    MessagesToolUseJson,
    MessagesUsageJson,
)
from millrace_router.api.anthropic.to_chat import tool_use_id
from millrace_router.api.openai.choice import ChatDelta, Thought, parts_of
from millrace_router.engine.generation import Usage
from millrace_router.errors import GenerationError, RouterError
from millrace_router.tool_calls.tool import CallDelta

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""By OpenAI's finish reason."""
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


def status_of(error: RouterError) -> HTTPStatus:
    """Status of a failure on Anthropic's routes."""
    status = HTTPStatus(error.status)
    return STATUSES.get(status, status)


def may_be_retried(error: RouterError) -> bool:
    """Whether clients may repeat the request; without this word they repeat every request that was answered 500."""
    return not isinstance(error, GenerationError)


def error_answer(status: HTTPStatus, message: str, request_id: str) -> MessagesErrorResponseJson:
    """Render a failure; an event of a stream has the same shape."""
    kind = ERROR_TYPES.get(status, CLIENTS_FAULT)
    return {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": request_id,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageHead:
    """The parts of a message that are known before its first token."""

    model: str
    id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(12)}")

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
    """Render token counts."""
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
    for place, text in arguments.items():
        block = blocks[place]
        assert block["type"] == "tool_use"
        block["input"] = input_of(text)
    return blocks


def signature(thought: str) -> str:
    """Sign a thought with its hash: there is no secret in it, and clients need one."""
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
    """Parse the arguments of a call; if they were cut short, the part there is, as Anthropic's client does."""
    try:
        parsed = from_json(arguments or "{}", allow_partial="trailing-strings")
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
