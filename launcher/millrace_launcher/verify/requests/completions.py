"""Makes an answer of the chunks of `/v1/completions`, for requests with `echo` and `logprobs`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from millrace_launcher.verify.servers.answers import (
    Answer,
    Candidates,
    Scored,
    StreamError,
    as_float32,
    failed,
    joined,
    message_of,
)


def completion_from(chunks: Iterable[Mapping[str, Any]]) -> Answer:
    """Combine the chunks: first the prompt's, then one for each token; an error chunk ends the answer.

    Raises StreamError unless only the last chunk has a finish reason, and usage has the number of received tokens.
    """
    prompt: Scored | None = None
    parts: list[Scored] = []
    texts: list[str] = []
    reason: str | None = None
    usage: Mapping[str, Any] = {}
    for chunk in chunks:
        if "error" in chunk:
            return failed(joined(parts), message_of(chunk["error"]))
        if reason is not None:
            raise StreamError("a chunk came after the last one")
        try:
            (choice,) = chunk["choices"]
            scored, text = _scored(choice["logprobs"]), choice["text"]
            reason = choice["finish_reason"] or None
            if reason is not None:
                usage = chunk["usage"]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise StreamError(f"a chunk is none of Millrace's: {error!r}") from error
        texts.append(text)
        if prompt is None:
            prompt = scored
        else:
            parts.append(scored)
    found = joined(parts)
    if prompt is None or reason is None:
        return failed(found, "the stream ended without its last chunk")
    counted = (usage["prompt_tokens"], usage["completion_tokens"])
    if counted != (len(prompt.ids), len(found.ids)):
        raise StreamError(
            f"{len(prompt.ids)} and {len(found.ids)} tokens came, usage counts {counted}"
        )
    return Answer(
        ids=found.ids,
        logprobs=found.logprobs,
        candidates=found.candidates,
        prompt=prompt,
        text="".join(texts),
        finish_reason=reason,
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
    )


def _scored(columns: Mapping[str, Any]) -> Scored:
    return Scored(
        ids=tuple(columns["tokens"]),
        logprobs=tuple(map(as_float32, columns["token_logprobs"])),
        candidates=tuple(map(_candidates, columns["top_logprobs"])),
    )


def _candidates(named: Mapping[str, float] | None) -> Candidates:
    """The likeliest tokens in order, then the token itself; none for the prompt's first token."""
    return tuple((name, as_float32(logprob)) for name, logprob in (named or {}).items())
