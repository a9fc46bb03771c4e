"""Earlier calls in the published templates: the prompts of transformers, in which our parsers find the same calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from millrace_router.text.chat_template import ChatTemplate
from millrace_router.tool_calls.formats.registry import format_of
from millrace_router.tool_calls.tool import Tool, ToolChoice
from millrace_testing.text import published

WEATHER = Tool(
    "get_weather",
    "How it is.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Where"},
            "days": {"type": "integer"},
            "near": {"type": "object", "properties": {"x": {"type": "number"}}},
        },
        "required": ["city"],
    },
    strict=False,
)
ARGUMENTS = {"city": 'Saint "Émile"\non two lines', "days": 3, "near": {"x": 1.5}}
USER = {"role": "user", "content": "What is it like?"}
TOOLS = [WEATHER.as_json()]
RENDERING = sorted(published.FORMATS.keys() - {"granite_3_3"})
"""Templates that render earlier calls; Granite 3.3's has none."""


def turn(arguments: object, id_: str = "call_1") -> dict[str, Any]:
    function = {"name": WEATHER.name, "arguments": arguments}
    call = {"id": id_, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


@pytest.mark.parametrize("name", RENDERING)
def test_a_call_in_a_prompt_is_the_call_that_the_parser_finds(name: str) -> None:
    source = published.template(name)
    rendered = ChatTemplate(source, special_tokens={}).render(
        [USER, turn(json.dumps(ARGUMENTS))], tools=TOOLS, add_generation_prompt=False
    )
    # Templates show the form of calls to the model too; the last turn is what the model would have written.
    said = rendered[rendered.rindex("What is it like?") :]
    parser = format_of(source).parser([WEATHER], ToolChoice("auto"))
    deltas = [*parser.push(said).calls, *parser.finish().calls]
    assert [delta.name for delta in deltas if delta.name] == [WEATHER.name]
    assert json.loads("".join(delta.arguments for delta in deltas)) == ARGUMENTS


@pytest.mark.parametrize("name", RENDERING)
def test_prompts_are_those_of_transformers(name: str) -> None:
    result = {"role": "tool", "tool_call_id": "call_1", "content": "18 °C"}
    prompt = ChatTemplate(published.template(name), special_tokens={}).render(
        [USER, turn(json.dumps(ARGUMENTS)), result], tools=TOOLS, add_generation_prompt=True
    )
    expected, _ = render_jinja_template(
        [[USER, turn(ARGUMENTS), {**result, "name": WEATHER.name}]],
        tools=TOOLS,
        chat_template=published.template(name),
        add_generation_prompt=True,
    )
    assert prompt == expected[0]


KIMI = (
    "{% for message in messages %}{% for call in message.tool_calls or [] %}<|tool_call_begin|>{{ call['id'] }}"
    "<|tool_call_argument_begin|>{{ call['function']['arguments'] | tojson }}<|tool_call_end|>{% endfor %}"
    "{% if message.role == 'tool' %}## Return of {{ message.tool_call_id }}\n{% endif %}{% endfor %}"
)
"""The parts of Kimi K2's template that have ids."""


def test_kimi_gets_the_ids_that_it_writes() -> None:
    messages = [
        USER,
        turn({}, "call_a"),
        {"role": "tool", "tool_call_id": "call_a", "content": "1"},
        turn({}, "call_b"),
        {"role": "tool", "tool_call_id": "call_b", "content": "2"},
        {"role": "tool", "tool_call_id": "elsewhere", "content": "3"},
    ]
    prompt = ChatTemplate(KIMI, special_tokens={}).render(messages)
    for index in range(2):
        assert f"<|tool_call_begin|>functions.get_weather:{index}<|tool_call_argument" in prompt
        assert f"## Return of functions.get_weather:{index}\n" in prompt
    assert "## Return of elsewhere" in prompt
    assert "call_" not in prompt.replace("tool_call_", "")


def test_several_calls_of_a_message_are_messages_of_their_own_for_gpt_oss() -> None:
    both = turn({"city": "Rome"}, "a")
    both["tool_calls"] += turn({"city": "Oslo"}, "b")["tool_calls"]
    results = [{"role": "tool", "tool_call_id": id_, "content": id_ * 3} for id_ in "ba"]
    template = ChatTemplate(published.template("gpt_oss"), special_tokens={})
    prompt = template.render([USER, both, *results, USER], tools=TOOLS)
    alone = [turn({"city": "Rome"}, "a"), results[1], turn({"city": "Oslo"}, "b"), results[0]]
    assert prompt == template.render([USER, *alone, USER], tools=TOOLS)
    assert '"Oslo"' in prompt


@pytest.mark.parametrize(
    "written",
    [
        "'x' + call['function']['arguments'] + 'y'",
        "'x' ~ call.function.arguments ~ 'y'",
        "'x' }}{{ call.function.arguments }}{{ 'y'",
    ],
)
def test_arguments_are_text_where_a_template_adds_them_to_text(written: str) -> None:
    source = (
        "{% for message in messages %}{% for call in message.tool_calls or [] %}{{ "
        + written
        + " }}{% endfor %}{% endfor %}"
    )
    template = ChatTemplate(source, special_tokens={})
    assert template.render([USER, turn('{"a":  1}')]) == 'x{"a":  1}y'
    assert template.render([USER, turn({"a": "é"})]) == 'x{"a": "é"}y'
    assert template.render([USER, turn("")]) == "x{}y"
