"""The thought of a chat: separate from the text in answers and streams, counted, requested, and given back."""

from __future__ import annotations

from typing import Any

import pytest

from millrace_router.request.request import GrammarKind, ValidRequest
from millrace_testing.router.edge import Edge, limits_with, serving
from millrace_testing.router.streams import CHAT, added_up
from millrace_testing.text.texts import Generations, saying
from millrace_testing.text.thoughts import CHANNEL_END, channelled, tagged

TEMPLATE = (
    "{% if tools %}<tool_call>{% endif %}"
    "{% for turn in messages %}{{ turn.role }} {% if turn.reasoning_content %}"
    "<think>{{ turn.reasoning_content }}</think>{% endif %}{{ turn.content }} {% endfor %}bot "
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% if opens %}<think>\n{% endif %}{% if reasoning_effort %}{{ reasoning_effort }} {% endif %}"
)
LIMITS = limits_with(max_input_tokens=1000, max_total_tokens=2000, vocab_size=500)
BYTES = tagged()
USER = {"role": "user", "content": "hello"}
ASKED: dict[str, Any] = {"messages": [USER]}
WEATHER = {"type": "function", "function": {"name": "weather"}}
THINKS = "<think>\nWörld or not?\n</think>\n\nWörld."
CALLS = THINKS + '<tool_call>\n{"name": "weather", "arguments": {"a": "<think>"}}\n</tool_call>'
NUM_TAGGED = len(BYTES.encode("<think>\nWörld or not?\n</think>"))


def served(*texts: str, **options: Any) -> Any:
    usual = {"limits": LIMITS, "template": TEMPLATE, "tokenizer": BYTES}
    return serving(saying(*texts, using=BYTES), **usual | options)


async def answer(edge: Edge, **body: Any) -> Any:
    return await edge.answer(CHAT, {**ASKED, **body})


def prompt_of(request: ValidRequest) -> str:
    return BYTES.decode(request.input_ids, skip_special_tokens=False)


async def test_the_thought_is_separate_from_the_text() -> None:
    async with served(THINKS) as edge:
        told = await answer(edge)
    (choice,) = told["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "Wörld.",
        "reasoning_content": "Wörld or not?",
        "reasoning": "Wörld or not?",
    }
    assert told["usage"]["completion_tokens_details"] == {"reasoning_tokens": NUM_TAGGED}
    assert told["usage"]["completion_tokens"] == len(BYTES.encode(THINKS)) + 1


@pytest.mark.parametrize("continuous", [False, True])
async def test_streams_send_the_thought_first(continuous: bool) -> None:
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    async with served(THINKS) as edge:
        chunks = await edge.chunks(CHAT, {**ASKED, "stream_options": options})
    *told, last = chunks
    (choice,) = added_up(told)
    assert choice["message"]["reasoning"] == "Wörld or not?"
    assert choice["message"]["reasoning_content"] == "Wörld or not?"
    assert choice["message"]["content"] == "Wörld."
    assert choice["finish_reason"] == "stop"
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": NUM_TAGGED}
    deltas = [chunk["choices"][0]["delta"] for chunk in told]
    thoughts = [index for index, delta in enumerate(deltas) if delta.get("reasoning")]
    texts = [index for index, delta in enumerate(deltas) if delta.get("content")]
    assert len(thoughts) > 1
    assert thoughts[-1] < texts[0]


async def test_calls_follow_the_thought() -> None:
    async with served(CALLS, CALLS) as edge:
        told = await answer(edge, tools=[WEATHER])
        chunks = await edge.chunks(CHAT, {**ASKED, "tools": [WEATHER]})
    streamed = added_up(chunks)[0]
    for choice in (told["choices"][0], streamed):
        message = choice["message"]
        assert choice["finish_reason"] == "tool_calls"
        assert message["reasoning"] == "Wörld or not?"
        assert message["content"] == "Wörld."
        assert message["tool_calls"][0]["function"]["arguments"] == '{"a": "<think>"}'


async def test_a_call_within_a_thought_is_not_a_call() -> None:
    async with served("<think>" + CALLS.removeprefix(THINKS) + "</think>no") as edge:
        told = await answer(edge, tools=[WEATHER])
    assert told["choices"][0]["finish_reason"] == "stop"
    assert "tool_calls" not in told["choices"][0]["message"]
    assert told["choices"][0]["message"]["reasoning"].startswith("<tool_call>")


CALL = '<tool_call>\n{"name": "weather", "arguments": {"a": 1}}\n</tool_call>'


async def test_a_call_in_a_thought_that_never_closes_is_a_call() -> None:
    async with served(f"<think>\nI look.\n{CALL}", f"<think>\nI look.\n{CALL}") as edge:
        told = await answer(edge, tools=[WEATHER])
        (streamed,) = added_up(await edge.chunks(CHAT, {**ASKED, "tools": [WEATHER]}))
    for choice in (told["choices"][0], streamed):
        (call,) = choice["message"]["tool_calls"]
        assert (call["function"]["name"], call["function"]["arguments"]) == ("weather", '{"a": 1}')
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["reasoning"].startswith("I look.")


async def test_a_call_in_tags_in_a_thought_that_never_closes_is_a_call() -> None:
    text = "<think>\nI look.\n<tool_call>\n<function=weather>\n</function>\n</tool_call>"
    async with served(text, tool_call_parser="qwen3_coder") as edge:
        told = await answer(edge, tools=[WEATHER])
    (call,) = told["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("weather", "{}")


@pytest.mark.parametrize(
    "rest", ["<tool_call> would help", CALL[:-22], CALL.replace("weather", "x")]
)
async def test_what_is_no_whole_call_stays_thought(rest: str) -> None:
    async with served(f"<think>\n{rest}") as edge:
        told = await answer(edge, tools=[WEATHER])
    (choice,) = told["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"].keys() == {"role", "content", "reasoning", "reasoning_content"}
    assert choice["message"]["reasoning"] == rest


async def test_a_call_in_a_thought_that_a_limit_cuts_is_not_a_call() -> None:
    text = f"<think>\n{CALL} so"
    async with served(text) as edge:
        told = await answer(edge, tools=[WEATHER], max_tokens=len(BYTES.encode(text)) - 1)
    assert told["choices"][0]["finish_reason"] == "length"
    assert "tool_calls" not in told["choices"][0]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_counts_in_the_answer_and_not_in_the_thought(*, stream: bool) -> None:
    async with served("<think>\nOne END two\n</think>\n\nA END b") as edge:
        body = {**ASKED, "stop": ["END"]}
        if stream:
            (choice,) = added_up(await edge.chunks(CHAT, body))
        else:
            choice = (await edge.answer(CHAT, body))["choices"][0]
    assert choice["message"]["reasoning"] == "One END two"
    assert choice["message"]["content"] == "A "
    assert choice["finish_reason"] == "stop"


async def test_a_template_may_open_the_thought() -> None:
    async with served("Why?\n</think>So.") as edge:
        told = await answer(edge, chat_template_kwargs={"opens": True})
    assert told["choices"][0]["message"]["reasoning"] == "Why?"
    assert told["choices"][0]["message"]["content"] == "So."


async def test_a_user_cannot_open_a_thought() -> None:
    async with served("So.") as edge:
        told = await answer(edge, messages=[{"role": "user", "content": "What is <think>"}])
    assert told["choices"][0]["message"] == {"role": "assistant", "content": "So."}


async def test_a_thought_of_a_message_that_is_continued_goes_on() -> None:
    begun = {"role": "assistant", "content": "<think>I am"}
    async with served(" here</think>So.") as edge:
        told = await answer(edge, messages=[USER, begun])
    assert told["choices"][0]["message"]["reasoning"] == " here"


async def test_the_thought_may_stay_in_the_text_or_be_left_out() -> None:
    plain = {"role": "assistant", "content": "Wörld."}
    async with served(THINKS, THINKS, THINKS) as edge:
        raw = await answer(edge, separate_reasoning=False)
        short = await answer(edge, include_reasoning=False)
        shorter = await answer(edge, reasoning={"exclude": True})
    assert raw["choices"][0]["message"] == {"role": "assistant", "content": THINKS}
    assert "completion_tokens_details" not in raw["usage"]
    assert short["choices"][0]["message"] == shorter["choices"][0]["message"] == plain
    assert short["usage"]["completion_tokens_details"] == {"reasoning_tokens": NUM_TAGGED}


@pytest.mark.parametrize("options", [{"reasoning_parser": "none"}, {"strict_tgi": True}])
async def test_without_a_parser_the_thought_is_text(options: dict[str, Any]) -> None:
    async with served(THINKS, **options) as edge:
        told = await answer(edge)
    assert told["choices"][0]["message"] == {"role": "assistant", "content": THINKS}
    assert "completion_tokens_details" not in told["usage"]


@pytest.mark.parametrize(
    ("body", "end"),
    [
        ({}, "bot "),
        ({"reasoning_effort": "low"}, "bot low "),
        ({"reasoning": {"effort": "high"}}, "bot high "),
        ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "bot low "),
        ({"reasoning_effort": "none"}, "bot <think></think>none "),
        ({"reasoning": {"enabled": False}}, "bot <think></think>none "),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "bot <think></think>"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
         "bot none "),
    ],
)  # fmt: skip
async def test_the_effort_reaches_the_template(body: dict[str, Any], end: str) -> None:
    async with served("So.") as edge:
        await answer(edge, **body)
        assert prompt_of(edge.batcher.requests[0]).endswith(end)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
async def test_past_thoughts_reach_the_template(key: str) -> None:
    turn = {"role": "assistant", "content": "So.", key: "Why?"}
    async with served("Yes.") as edge:
        await answer(edge, messages=[USER, turn, USER])
        assert "<think>Why?</think>So." in prompt_of(edge.batcher.requests[0])


async def test_values_that_are_not_thoughts_are_ignored() -> None:
    turn = {"role": "assistant", "content": "So.", "reasoning": {"effort": 1}, "thinking": [1]}
    async with served("Yes.") as edge:
        await answer(edge, messages=[USER, turn, USER])
        assert "assistant So." in prompt_of(edge.batcher.requests[0])


ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"


async def test_channels_are_distinguished() -> None:
    text = f"{ANALYSIS}Wörld?<|end|><|start|>assistant{FINAL}Wörld."
    tokenizer = channelled()
    end = tokenizer.special_ids[CHANNEL_END]
    script = Generations([*tokenizer.encode(text), end], tokenizer=tokenizer, eos_token_id=end)
    options = {"limits": LIMITS, "tokenizer": tokenizer}
    async with serving(script, template=f"{{{{ 'bot{ANALYSIS}'[:3] }}}}", **options) as edge:
        told = await answer(edge)
    message = told["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Wörld?", "Wörld.")
    spent = len(tokenizer.encode("Wörld?")) + 2
    assert told["usage"]["completion_tokens_details"] == {"reasoning_tokens": spent}


async def test_markers_are_never_shown() -> None:
    text = "<|channel|>commentary to=functions.f<|message|>{}<|call|>So."
    tokenizer = channelled()
    script = Generations(list(tokenizer.encode(text)), tokenizer=tokenizer)
    options = {"limits": LIMITS, "tokenizer": tokenizer}
    async with serving(script, template="bot", reasoning_parser="gpt_oss", **options) as edge:
        told = await answer(edge, max_tokens=len(tokenizer.encode(text)))
    assert told["choices"][0]["message"]["content"] == "{}So."


@pytest.mark.parametrize(
    ("body", "budget"),
    [
        ({"thinking_token_budget": 7}, "{0,7}"),
        ({"reasoning": {"max_tokens": 8}}, "{0,8}"),
        ({"reasoning": {"max_tokens": 8}, "thinking_token_budget": 7}, "{0,7}"),
    ],
)
async def test_a_budget_bounds_the_thought(body: dict[str, Any], budget: str) -> None:
    async with served("So.") as edge:
        await answer(edge, **body)
        grammar = edge.batcher.requests[0].grammar
    assert grammar is not None
    assert budget in grammar.source


async def test_grammars_of_answers_and_calls_begin_behind_the_thought() -> None:
    called = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    async with served("{}", "{}", called) as edge:
        await answer(edge, response_format={"type": "json_object"})
        await answer(
            edge,
            response_format={"type": "json_object"},
            chat_template_kwargs={"enable_thinking": False},
        )
        await answer(edge, tools=[WEATHER], tool_choice="required")
        behind, alone, calls = [request.grammar for request in edge.batcher.requests]
    assert behind is not None
    assert behind.source.startswith("start: ((<[")
    assert alone is not None
    assert alone.kind is GrammarKind.JSON_SCHEMA
    assert calls is not None
    assert calls.source.startswith("start: ((<[")
