"""Turns of one role in a row become one for templates that refuse them."""

from __future__ import annotations

from typing import Any

from millrace_router.api.chat.start import joined


def test_runs_of_plain_turns_become_one() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}
    results = [{"role": "tool", "content": "1", "tool_call_id": "c"}] * 2
    parts = {
        "role": "user",
        "content": [{"type": "text", "text": "d"}, {"type": "text", "text": "e"}],
    }
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "a"},
        {"role": "developer", "content": "b"},
        {"role": "user", "content": "c"},
        parts,
        called,
        *results,
        {"role": "user", "content": "f"},
    ]
    assert joined(messages) == [
        {"role": "system", "content": "a\n\nb"},
        {"role": "user", "content": "c\n\nde"},
        called,
        *results,
        {"role": "user", "content": "f"},
    ]
