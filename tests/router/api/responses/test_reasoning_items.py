"""Thoughts in OpenAI's responses: items, their events, their tokens, and what asks for them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from millrace_router.api.responses.protocol import ResponseEventJson, ResponseJson
from millrace_testing.router.edge import Edge, limits_with, serving
from millrace_testing.router.responses import URL, events_of, response_of
from millrace_testing.text.texts import Generations
from millrace_testing.text.thoughts import tagged

TEMPLATE = (
    "{% for turn in messages %}{{ turn.role }} {% if turn.reasoning_content %}"
    "<think>{{ turn.reasoning_content }}</think>{% endif %}{{ turn.content }} {% endfor %}bot "
    "{{ reasoning_effort | default('') }}"
)
LIMITS = limits_with(max_input_tokens=600, max_total_tokens=1500, vocab_size=500)
TOKENS = tagged()
END = 0
THINKS = "<think>\nWörld or not?\n</think>\n\n"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}}
ASKED: dict[str, Any] = {"input": "hello", "tools": [TOOL]}


def served(*texts: str, end: tuple[int, ...] = (END,)) -> Any:
    plans = [[*TOKENS.encode(text), *end] for text in texts]
    return serving(
        Generations(*plans, tokenizer=TOKENS),
        limits=LIMITS,
        template=TEMPLATE,
        tokenizer=TOKENS,
        tool_call_parser="hermes",
    )


async def whole(edge: Edge, **body: Any) -> dict[str, Any]:
    status, answer, _ = await edge.post(URL, ASKED | body)
    assert status == 200, answer
    TypeAdapter(ResponseJson).validate_python(answer, strict=True)
    result: dict[str, Any] = answer
    return result


@pytest.mark.parametrize(
    ("rest", "kinds"),
    [
        ("Yes.", ["reasoning", "message"]),
        (CALL, ["reasoning", "function_call"]),
        (f"Yes.{CALL}", ["reasoning", "message", "function_call"]),
        ("", ["reasoning"]),
    ],
)
async def test_a_thought_is_the_first_item(rest: str, kinds: list[str]) -> None:
    async with served(THINKS + rest, THINKS + rest) as edge:
        answer = await whole(edge)
        events = await events_of(edge, ASKED)
    TypeAdapter(list[ResponseEventJson]).validate_python(events, strict=True)
    for told in (answer, response_of(events)):
        assert [item["type"] for item in told["output"]] == kinds
        thought = told["output"][0]
        assert thought["id"].startswith("rs_")
        assert thought["summary"] == [{"type": "summary_text", "text": "Wörld or not?"}]
        assert thought["status"] == "completed"
        spent = len(TOKENS.encode(THINKS.strip()))
        assert told["usage"]["output_tokens_details"] == {"reasoning_tokens": spent}


async def test_a_thought_that_is_cut_is_incomplete() -> None:
    async with served(THINKS) as edge:
        answer = await whole(edge, max_output_tokens=6)
    (thought,) = answer["output"]
    assert (answer["status"], thought["status"]) == ("incomplete", "incomplete")


async def test_the_effort_reaches_the_template_and_the_answer() -> None:
    asked = {"effort": "low", "summary": "auto"}
    async with served("Yes.") as edge:
        answer = await whole(edge, reasoning=asked)
        prompt = TOKENS.decode(edge.batcher.requests[0].input_ids, skip_special_tokens=False)
    assert prompt.endswith("bot low")
    assert answer["reasoning"] == asked


async def test_items_are_accepted_as_input() -> None:
    async with served(THINKS + "Yes.", "Yes.") as edge:
        answer = await whole(edge)
        await whole(edge, input=[*answer["output"], {"role": "user", "content": "and?"}])
        prompt = TOKENS.decode(edge.batcher.requests[1].input_ids, skip_special_tokens=False)
    assert "assistant <think>Wörld or not?</think>Yes. user and?" in prompt


async def test_the_events_of_a_thought_are_complete() -> None:
    async with served(THINKS) as edge:
        events = await events_of(edge, ASKED)
    names = [event["type"].removeprefix("response.") for event in events]
    num_deltas = names.count("reasoning_summary_text.delta")
    assert num_deltas > 1
    assert names == [
        "created",
        "in_progress",
        "output_item.added",
        "reasoning_summary_part.added",
        *["reasoning_summary_text.delta"] * num_deltas,
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
        "completed",
    ]


async def test_a_budget_bounds_the_thought() -> None:
    async with served("Yes.") as edge:
        await whole(edge, thinking_token_budget=7)
        grammar = edge.batcher.requests[0].grammar
    assert grammar is not None
    assert "{0,7}" in grammar.source
