"""Thoughts in Anthropic's messages: the first block of an answer, signed, requested, bounded, and given back."""

from __future__ import annotations

from typing import Any

import pytest

from millrace_testing.router.edge import Edge, limits_with, serving
from millrace_testing.router.streams import message_events_in, message_of
from millrace_testing.text.texts import saying
from millrace_testing.text.thoughts import tagged

MESSAGES = "/v1/messages"
TOOL = {"name": "add", "input_schema": {"type": "object"}}
THINKING_TEMPLATE = (
    "{% for turn in messages %}{{ turn.role }} {% if turn.reasoning_content %}"
    "<think>{{ turn.reasoning_content }}</think>{% endif %}{{ turn.content }} {% endfor %}bot "
    "{{ enable_thinking | default('free') }} {{ reasoning_effort | default('') }}"
)
LIMITS = limits_with(max_input_tokens=600, max_total_tokens=1500, vocab_size=500)
TOKENS = tagged()
QUESTION = {"role": "user", "content": "hello"}
THINKING: dict[str, Any] = {"model": "claude", "max_tokens": 300, "messages": [QUESTION]}
THINKS = "<think>\nWörld or not?\n</think>\n\n"
HERMES_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def serving_thoughts(*texts: str) -> Any:
    return serving(
        saying(*texts, using=TOKENS),
        limits=LIMITS,
        template=THINKING_TEMPLATE,
        tokenizer=TOKENS,
        tool_call_parser="hermes",
    )


async def whole(edge: Edge, **body: Any) -> Any:
    return await edge.answer(MESSAGES, THINKING | body)


async def streamed(edge: Edge, **body: Any) -> list[tuple[str, Any]]:
    return message_events_in(await edge.stream(MESSAGES, THINKING | body))


async def test_a_thought_is_the_first_block() -> None:
    async with serving_thoughts(THINKS + "Yes." + HERMES_CALL) as edge:
        answer = await whole(edge, tools=[TOOL])
    thought, text, call = answer["content"]
    assert thought.pop("signature")
    assert thought == {"type": "thinking", "thinking": "Wörld or not?"}
    assert text == {"type": "text", "text": "Yes."}
    assert (call["type"], call["input"]) == ("tool_use", {"a": 1})


@pytest.mark.parametrize("rest", ["Yes.", HERMES_CALL, ""])
async def test_a_stream_has_the_same_blocks(rest: str) -> None:
    async with serving_thoughts(THINKS + rest, THINKS + rest) as edge:
        answer = await whole(edge, tools=[TOOL])
        events = await streamed(edge, tools=[TOOL])
    message = message_of(events)
    for block in (*message["content"], *answer["content"]):
        block.pop("id", None)
    assert message["content"] == answer["content"]
    deltas = [data["delta"]["type"] for name, data in events if name == "content_block_delta"]
    signed = deltas.index("signature_delta")
    assert set(deltas[:signed]) == {"thinking_delta"}
    assert "thinking_delta" not in deltas[signed:]
    assert signed > 1


async def test_signatures_distinguish_thoughts() -> None:
    async with serving_thoughts(THINKS, THINKS, THINKS.replace("not", "so")) as edge:
        one, same, other = [(await whole(edge))["content"][0]["signature"] for _ in range(3)]
    assert one == same != other


@pytest.mark.parametrize(
    ("body", "end"),
    [
        ({}, "free "),
        ({"thinking": {"type": "adaptive"}}, "free "),
        ({"thinking": {"type": "enabled"}}, "True "),
        ({"thinking": {"type": "disabled"}}, "False "),
        ({"output_config": {"effort": "low"}}, "True low"),
    ],
)
async def test_templates_learn_whether_to_think(body: dict[str, Any], end: str) -> None:
    async with serving_thoughts("Yes.") as edge:
        await whole(edge, **body)
        prompt = TOKENS.decode(edge.batcher.requests[0].input_ids, skip_special_tokens=False)
    assert prompt.endswith(f"bot {end}")


async def test_past_blocks_reach_the_template() -> None:
    async with serving_thoughts(THINKS + "Yes.", "Yes.") as edge:
        answer = await whole(edge)
        turns = [QUESTION, {"role": "assistant", "content": answer["content"]}, QUESTION]
        await whole(edge, messages=turns)
        prompt = TOKENS.decode(edge.batcher.requests[1].input_ids, skip_special_tokens=False)
    assert "assistant <think>Wörld or not?</think>Yes. user" in prompt


async def test_a_thought_may_be_left_out() -> None:
    async with serving_thoughts(THINKS + "Yes.") as edge:
        answer = await whole(edge, thinking={"type": "adaptive", "display": "omitted"})
    assert answer["content"] == [{"type": "text", "text": "Yes."}]


async def test_a_display_that_is_not_known_shows_the_thought() -> None:
    async with serving_thoughts(THINKS + "Yes.") as edge:
        answer = await whole(edge, thinking={"type": "adaptive", "display": "updates"})
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"]


async def test_a_budget_bounds_the_thought() -> None:
    async with serving_thoughts("Yes.", "Yes.") as edge:
        await whole(edge, thinking={"type": "enabled", "budget_tokens": 7})
        await whole(edge, thinking={"type": "enabled", "budget_tokens": 1500})
        bounded, free = [request.grammar for request in edge.batcher.requests]
    assert bounded is not None
    assert "{0,7}" in bounded.source
    assert free is None
