"""Text completions as plain dictionaries for the JSON writer."""

from __future__ import annotations

from millrace_router.api.completion_json import CompletionCompleteJson


def completion_choice(index: int, text: str, finish_reason: str) -> CompletionCompleteJson:
    """Render a choice of a text completion; in a stream, `finish_reason` is "" until the last."""
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
