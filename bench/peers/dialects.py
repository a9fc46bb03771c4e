"""The APIs of the peers for a streamed generation of an exact length."""

from __future__ import annotations

from typing import Any

from millrace.load.apis import BadStreamError, Dialect
from millrace.load.levels import Level


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
