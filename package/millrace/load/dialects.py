"""The API of each server for a streamed generation: the request, and the number of tokens in an event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from millrace.load.levels import Level

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


def _tgi_body(prompt: str, level: Level) -> dict[str, Any]:
    return {
        "inputs": prompt,
        "parameters": {
            "max_new_tokens": level.new_tokens,
            "ignore_eos": True,
            "details": True,
            "do_sample": False,
        },
    }


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


TGI = Dialect(path="/generate_stream", body=_tgi_body, num_tokens=_tgi_tokens, check_end=_tgi_end)


def _openai_body(prompt: str, level: Level) -> dict[str, Any]:
    return {
        "model": "bench",
        "prompt": prompt,
        "max_tokens": level.new_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def _openai_tokens(event: dict[str, Any], _: int) -> int:
    return sum(len(choice["token_ids"] or ()) for choice in event["choices"])


def _openai_end(last: dict[str, Any], num_tokens: int) -> None:
    if not last or last["choices"][0]["finish_reason"] is None:
        raise BadStreamError(f"the stream stopped after {num_tokens} tokens without an end")


VLLM = Dialect(
    path="/v1/completions", body=_openai_body, num_tokens=_openai_tokens, check_end=_openai_end
)
"""OpenAI's completions with vLLM's `return_token_ids`: an event may hold several tokens or none."""


def _llama_body(prompt: str, level: Level) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "n_predict": level.new_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
    }


def _llama_tokens(event: dict[str, Any], _: int) -> int:
    return len(event["tokens"])


def _llama_end(last: dict[str, Any], num_tokens: int) -> None:
    if not last.get("stop") or last["tokens_predicted"] != num_tokens:
        raise BadStreamError(
            f"got {num_tokens} tokens, the server says {last.get('tokens_predicted')}"
        )


LLAMA = Dialect(
    path="/completion",
    body=_llama_body,
    num_tokens=_llama_tokens,
    check_end=_llama_end,
    keeps_connections=False,
)
"""llama.cpp's own route. Its server drops keep-alive connections, so each request opens one."""
