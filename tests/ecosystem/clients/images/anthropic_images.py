"""The `anthropic` package: pictures in messages, and an agent whose tool takes screenshots."""

from __future__ import annotations

import anthropic
from cases import raised, run
from images.shown import MODEL, base64_of, shown

SCREENSHOT = {
    "name": "screenshot",
    "description": "Shows the screen.",
    "input_schema": {"type": "object", "properties": {}, "additionalProperties": False},
}


def client(base_url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=base_url, api_key="-", max_retries=0)


def block(content: bytes) -> dict[str, object]:
    source = {"type": "base64", "media_type": "image/png", "data": base64_of(content)}
    return {"type": "image", "source": source}


def a_picture_is_read(base_url: str) -> None:
    for text, content in shown().items():
        parts = [block(content), {"type": "text", "text": "Read it."}]
        asked = {"model": MODEL, "messages": [{"role": "user", "content": parts}]}
        answer = client(base_url).messages.create(
            **asked, max_tokens=9, extra_body={"temperature": 0}
        )
        assert [one.text for one in answer.content] == [text]
        usage = answer.usage
        count = client(base_url).messages.count_tokens(**asked).input_tokens
        assert count == usage.input_tokens + usage.cache_read_input_tokens > 9


def an_agent_reads_the_screenshots_of_its_tool(base_url: str) -> None:
    for text, content in shown().items():
        messages = [{"role": "user", "content": "What is on the screen?"}]
        common = {"model": MODEL, "max_tokens": 60, "tools": [SCREENSHOT]}
        call = client(base_url).messages.create(
            **common, messages=messages, tool_choice={"type": "tool", "name": "screenshot"}
        )
        assert call.stop_reason == "tool_use"
        (use,) = call.content
        assert use.name == "screenshot"
        result = {"type": "tool_result", "tool_use_id": use.id, "content": [block(content)]}
        messages += [
            {"role": "assistant", "content": call.content},
            {"role": "user", "content": [result]},
        ]
        answer = client(base_url).messages.create(
            **common,
            messages=messages,
            tool_choice={"type": "none"},
            extra_body={"temperature": 0},
        )
        assert [one.text for one in answer.content] == [text]


def a_bad_picture_is_an_error_that_names_its_part(base_url: str) -> None:
    error = raised(
        anthropic.BadRequestError,
        lambda: client(base_url).messages.create(
            model=MODEL, max_tokens=9, messages=[{"role": "user", "content": [block(b"none")]}]
        ),
    )
    assert "messages.0.content.0" in str(error)


run(globals())
