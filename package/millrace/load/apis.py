"""The API of each server for a streamed generation: the request, and the number of tokens in an event."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from millrace.errors import RequestError
from millrace.http.client import Client
from millrace.load.levels import Level

CHAT, COMPLETIONS, GENERATE = "chat", "completions", "tgi"
APIS = (CHAT, COMPLETIONS, GENERATE)


async def find_api(client: Client) -> str:
    """TGI's API where `/info` has a router's limits, else OpenAI's chats. Raises ConnectionFailed."""
    try:
        info = await client.get("/info")
    except RequestError:
        return CHAT
    return GENERATE if isinstance(info, dict) and "max_input_tokens" in info else CHAT


def dialect_of(api: str, model: str, *, ignore_eos: bool) -> Dialect:
    """The requests and events of one of `APIS`; with `ignore_eos` answers have their full length where servers can."""
    extra: Mapping[str, Any] = {"ignore_eos": True} if ignore_eos else {}
    if api == GENERATE:
        return replace(TGI, body=_tgi_body(extra), is_exact=False, usage=_tgi_usage)
    common = {"model": model, "stream": True, "stream_options": {"include_usage": True}, **extra}

    def body(prompt: str, level: Level) -> dict[str, Any]:
        content: dict[str, Any] = {"prompt": prompt}
        if api == CHAT:
            content = {"messages": [{"role": "user", "content": prompt}]}
        return {**common, **content, "max_tokens": level.new_tokens, "temperature": 0}

    return Dialect(
        path="/v1/chat/completions" if api == CHAT else "/v1/completions",
        body=body,
        num_tokens=_openai_pieces,
        check_end=_check_any,
        is_exact=False,
        usage=_openai_usage,
    )


def _openai_pieces(event: dict[str, Any], _: int) -> int:
    """1 where the event has text, a thought or a part of a tool call."""
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        names = ("content", "reasoning_content", "reasoning", "tool_calls")
        if choice.get("text") or any(delta.get(name) for name in names):
            return 1
    return 0


def _openai_usage(event: dict[str, Any]) -> Usage | None:
    usage = event.get("usage")
    return (usage["prompt_tokens"], usage["completion_tokens"]) if usage else None


def _check_any(_: dict[str, Any], num_pieces: int) -> None:
    if not num_pieces:
        raise BadStreamError("the answer is empty")


def _tgi_usage(event: dict[str, Any]) -> Usage | None:
    details = event.get("details")
    return (details.get("input_length", 0), details["generated_tokens"]) if details else None


Usage = tuple[int, int]
"""Tokens of the prompt and of the answer."""


class BadStreamError(Exception):
    """The server answered with something other than the requested stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The path, the body of a request, and how its events are read."""

    path: str
    body: Callable[[str, Level], dict[str, Any]]
    """Makes the body from a prompt and its level."""
    num_tokens: Callable[[dict[str, Any], int], int]
    """Counts the new tokens of an event, given the number before it; raises BadStreamError."""
    check_end: Callable[[dict[str, Any], int], None]
    """Checks the last event with a token against the number of tokens; raises BadStreamError."""
    keeps_connections: bool = True
    is_exact: bool = True
    """Whether every answer has the length that was asked for, and each of its tokens is seen."""
    usage: Callable[[dict[str, Any]], Usage | None] | None = None
    """Reads the server's own count of tokens from an event that has it."""


def _tgi_body(extra: Mapping[str, Any]) -> Callable[[str, Level], dict[str, Any]]:
    def body(prompt: str, level: Level) -> dict[str, Any]:
        parameters = {"max_new_tokens": level.new_tokens, "details": True, "do_sample": False}
        return {"inputs": prompt, "parameters": {**parameters, **extra}}

    return body


def _tgi_tokens(event: dict[str, Any], before: int) -> int:
    if event["index"] != before + 1:
        raise BadStreamError(f"token {event['index']} came as {before + 1}")
    return 1


def _tgi_end(last: dict[str, Any], num_tokens: int) -> None:
    details = last.get("details")
    if not details or last.get("generated_text") is None:
        raise BadStreamError(f"the stream stopped after {num_tokens} tokens without an end")
    if details["generated_tokens"] != num_tokens:
        raise BadStreamError(
            f"got {num_tokens} events, details say {details['generated_tokens']}"
            f" ({details['finish_reason']})"
        )


TGI = Dialect(
    path="/generate_stream",
    body=_tgi_body({"ignore_eos": True}),
    num_tokens=_tgi_tokens,
    check_end=_tgi_end,
)
