"""The APIs that `millrace bench` measures: answers may be short, and an event may hold several tokens.

Gaps are then those between events; the number of tokens is the server's own count, else that of the events.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millrace.errors import RequestError
from millrace.http.client import Client
from millrace.load.dialects import TGI, BadStreamError, Dialect, Usage
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
        return _tgi(extra)
    common = {"model": model, "stream": True, "stream_options": {"include_usage": True}, **extra}

    def body(prompt: str, level: Level) -> dict[str, Any]:
        said: dict[str, Any] = {"prompt": prompt}
        if api == CHAT:
            said = {"messages": [{"role": "user", "content": prompt}]}
        return {**common, **said, "max_tokens": level.new_tokens, "temperature": 0}

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


def _tgi(extra: Mapping[str, Any]) -> Dialect:
    def body(prompt: str, level: Level) -> dict[str, Any]:
        parameters = {"max_new_tokens": level.new_tokens, "details": True, "do_sample": False}
        return {"inputs": prompt, "parameters": {**parameters, **extra}}

    return Dialect(
        path=TGI.path,
        body=body,
        num_tokens=TGI.num_tokens,
        check_end=TGI.check_end,
        is_exact=False,
        usage=_tgi_usage,
    )


def _tgi_usage(event: dict[str, Any]) -> Usage | None:
    details = event.get("details")
    return (details.get("input_length", 0), details["generated_tokens"]) if details else None
