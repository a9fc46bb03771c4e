"""Conversations with tools in the templates of well-known models give the same prompts as transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from millrace_router.errors import TemplateError
from millrace_router.text.chat_template import ChatTemplate
from millrace_router.tool_calls.tool import Tool
from millrace_router.tool_calls.tool_prompt import DEFAULT_TOOL_PROMPT, with_tool_prompt
from millrace_testing.text import chat_templates as sources

Message = dict[str, Any]

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = Tool("weather", "How it is.", PARAMETERS, strict=False)
TOOLS = [WEATHER.as_json()]

SYSTEM = {"role": "system", "content": "Be kind."}
USER = {"role": "user", "content": " What is it like in Paris? "}
BOT = {"role": "assistant", "content": "Fine. "}


def call(id_: str, city: str) -> dict[str, Any]:
    """A call as OpenAI's clients send it."""
    return {
        "id": id_,
        "type": "function",
        "function": {"name": "weather", "arguments": json.dumps({"city": city})},
    }


def turn_of(*calls: dict[str, Any], content: str | None = None) -> Message:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


ROUND = [
    USER,
    turn_of(call("abcdefgh1", "Paris")),
    {"role": "tool", "tool_call_id": "abcdefgh1", "content": '"18 °C"'},
]
TWICE = [
    SYSTEM, USER,
    turn_of(call("abcdefgh1", "Paris"), call("abcdefgh2", "Rome"), content="I look."),
    {"role": "tool", "tool_call_id": "abcdefgh1", "content": "18"},
    {"role": "tool", "tool_call_id": "abcdefgh2", "content": "25"},
    BOT, {**USER, "content": "And now?"},
]  # fmt: skip
CONVERSATIONS = {
    "plain": [SYSTEM, USER],
    "turns": [SYSTEM, USER, BOT, USER],
    "a call": ROUND,
    "calls": TWICE,
}


@dataclass(frozen=True)
class Model:
    """A template with facts from its model's documentation."""

    source: str
    no_content: str | None = ""
    one_call: bool = False
    knows_tools: bool = True
    in_parts: bool = False
    """Whether all content must be a list of parts."""


MODELS = {
    "chatml": Model(sources.CHATML, knows_tools=False),
    "llama-3.1": Model(sources.LLAMA_3_1, one_call=True),
    "qwen-2.5": Model(sources.QWEN_2_5),
    "qwen-3": Model(sources.QWEN_3),
    "hermes-3": Model(sources.HERMES_3_TOOL_USE),
    "mistral-v3": Model(sources.MISTRAL_V3),
    "mistral-v13": Model(sources.MISTRAL_V13),
    "gemma-3": Model(sources.GEMMA_3, knows_tools=False),
    "smol-vlm": Model(sources.SMOL_VLM, knows_tools=False, in_parts=True),
    "deepseek-v3": Model(sources.DEEPSEEK_V3, no_content=None),
}
each_model = pytest.mark.parametrize("name", MODELS)


def template(name: str) -> ChatTemplate:
    return ChatTemplate(MODELS[name].source, special_tokens=TOKENS)


def as_documented(model: Model, message: Message) -> Message:
    """A message in the form of transformers: arguments as an object, results with the function's name."""
    content = model.no_content if message["content"] is None else message["content"]
    made = {
        **message,
        "content": [{"type": "text", "text": content}] if model.in_parts else content,
    }
    if message["role"] == "tool":
        made["name"] = "weather"
    if "tool_calls" in message:
        made["tool_calls"] = [
            {
                **one,
                "function": {
                    **one["function"],
                    "arguments": json.loads(one["function"]["arguments"]),
                },
            }
            for one in message["tool_calls"]
        ]
    return made


def oracle(
    name: str, messages: list[Message], tools: list[dict[str, Any]] | None = None, **options: Any
) -> str:
    """The prompt of transformers."""
    model = MODELS[name]
    rendered, _ = render_jinja_template(
        [[as_documented(model, message) for message in messages]],
        tools=tools,
        chat_template=model.source,
        **options,
        **TOKENS,
    )
    prompt: str = rendered[0]
    return prompt


WITHOUT_CALLS = ["plain", "turns"]
CASES = [
    (name, conversation)
    for name, model in MODELS.items()
    for conversation in (CONVERSATIONS if model.knows_tools else WITHOUT_CALLS)
]


@pytest.mark.parametrize(("name", "conversation"), CASES)
def test_prompts_are_those_of_transformers(name: str, conversation: str) -> None:
    model, messages = MODELS[name], CONVERSATIONS[conversation]
    tools = TOOLS if model.knows_tools else None
    if conversation == "calls" and model.one_call:
        with pytest.raises(TemplateError, match="only supports single tool-calls"):
            template(name).render(messages, tools=tools)
        return
    for asked in (True, False):
        prompt = template(name).render(messages, tools=tools, add_generation_prompt=asked)
        assert prompt == oracle(name, messages, tools, add_generation_prompt=asked)
    if name != "hermes-3" and conversation in WITHOUT_CALLS:
        assert template(name).render(messages) == oracle(name, messages, add_generation_prompt=True)


@each_model
@pytest.mark.parametrize("said", ["So", "So \n"])
def test_a_message_is_continued_as_in_transformers(name: str, said: str) -> None:
    messages = [USER, {"role": "assistant", "content": said}]
    tools = TOOLS if MODELS[name].knows_tools else None
    prompt = template(name).render(messages, tools=tools, continue_final_message=True)
    assert prompt == oracle(name, messages, tools, continue_final_message=True)
    implied = template(name).render(messages, tools=tools)
    assert implied == prompt.rstrip()
    assert implied.endswith("So")
    closed = template(name).render(messages, tools=tools, continue_final_message=False)
    assert closed == oracle(name, messages, tools, add_generation_prompt=True)


def test_only_text_can_be_continued() -> None:
    qwen = template("qwen-2.5")
    with pytest.raises(TemplateError, match="text that could be continued"):
        qwen.render([USER, turn_of(call("abcdefgh1", "Rome"))], continue_final_message=True)
    with pytest.raises(TemplateError, match="no generation prompt"):
        qwen.render([USER, BOT], continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(TemplateError, match="leaves out the message"):
        ChatTemplate("x", special_tokens={}).render([USER], continue_final_message=True)
    assert qwen.render([USER, turn_of(call("abcdefgh1", "Rome"))]).endswith(
        "<|im_start|>assistant\n"
    )


PARTS = [{"type": "text", "text": " one"}, {"type": "text", "text": "two "}]


@pytest.mark.parametrize("name", ["mistral-v13", "gemma-3", "smol-vlm"])
def test_parts_are_given_to_templates_that_loop_over_them(name: str) -> None:
    model = MODELS[name]
    rendered, _ = render_jinja_template(
        [[{"role": "user", "content": PARTS}]],
        chat_template=model.source,
        add_generation_prompt=True,
        **TOKENS,
    )
    assert template(name).render([{"role": "user", "content": PARTS}]) == rendered[0]


@pytest.mark.parametrize(
    "name", ["chatml", "llama-3.1", "qwen-2.5", "qwen-3", "mistral-v3", "deepseek-v3"]
)
def test_parts_are_put_together_for_the_others(name: str) -> None:
    in_parts = template(name).render([SYSTEM, {"role": "user", "content": PARTS}])
    assert in_parts == template(name).render([SYSTEM, {"role": "user", "content": " onetwo "}])


def test_parts_are_found_behind_names_and_macros() -> None:
    def loops(source: str) -> bool:
        prompt = ChatTemplate(source, special_tokens={}).render(
            [{"role": "user", "content": PARTS}]
        )
        return "dict" in prompt

    show = "{{ 'dict' if part is mapping else 'text' }}"
    turns = "{% for m in messages %}"
    assert loops(
        f"{turns}{{% set c = m.content %}}{{% for part in c[1:] %}}{show}{{% endfor %}}{{% endfor %}}"
    )
    assert loops(
        "{% macro write(parts) %}{% for part in parts %}" + show + "{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ write(m['content'] | list) }}{% endfor %}"
    )
    assert not loops(
        f"{turns}{{% for part in m.role %}}{{% endfor %}}{{{{ m.content }}}}{{% endfor %}}"
    )


def test_calls_are_text_for_templates_that_know_none() -> None:
    prompt = template("chatml").render(ROUND, add_generation_prompt=False)
    said = prompt.split("<|im_start|>assistant\n")[1].partition("<|im_end|>")[0]
    assert json.loads(said) == [
        {
            "id": "abcdefgh1",
            "type": "function",
            "function": {"description": None, "name": "weather", "arguments": '{"city": "Paris"}'},
        }
    ]
    with_words = template("chatml").render(
        [USER, turn_of(call("abcdefgh1", "Rome"), content="I look."), USER]
    )
    assert '<|im_start|>assistant\nI look.\n[{"id":"abcdefgh1"' in with_words


def test_ids_are_made_short_where_only_short_ones_are_taken() -> None:
    long = [
        USER,
        turn_of(call("call_0123456789", "Rome")),
        {"role": "tool", "tool_call_id": "call_0123456789", "content": "25"},
    ]
    prompt = template("mistral-v3").render(long, tools=TOOLS)
    short = prompt.partition('"call_id": "')[2].partition('"')[0]
    assert len(short) == 9
    assert f'"id": "{short}"' in prompt
    assert short.isalnum()
    other = template("mistral-v3").render(
        json.loads(json.dumps(long).replace("call_0", "call_9")), tools=TOOLS
    )
    assert short not in other
    assert "call_0123456789" not in template("mistral-v3").render(
        [USER, turn_of({**call("", "Rome"), "id": None}), BOT], tools=TOOLS
    )
    assert '"id": "abcdefgh1"' in template("mistral-v3").render(ROUND, tools=TOOLS)


def shown(message: Message, others: tuple[Message, ...] = (), *, source: str = "") -> Message:
    """The last message as the template gets it."""
    asked = "{{ messages[-1] | tojson }}{# #}" + source
    template = ChatTemplate(asked, special_tokens={})
    seen: Message = json.loads(template.render([*others, message], continue_final_message=False))
    return seen


def test_developers_are_the_system_where_they_are_not_known() -> None:
    developer = {"role": "developer", "content": "Be kind."}
    assert shown(developer)["role"] == "system"
    assert (
        shown(developer, source="{% if messages[0].role == 'developer' %}{% endif %}")["role"]
        == "developer"
    )


def test_results_have_the_name_of_their_function() -> None:
    result = {"role": "tool", "tool_call_id": "abcdefgh1", "content": "18"}
    assert shown(result, tuple(ROUND[:2]))["name"] == "weather"
    assert shown({**result, "name": "mine"}, tuple(ROUND[:2]))["name"] == "mine"
    assert "name" not in shown(result)


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ('{"a": [1.5]}', {"a": [1.5]}), ({"a": 1}, {"a": 1}), ("", {}), (None, {}),
        ("[1]", "[1]"), ('{"a": ', '{"a": '), ("text", "text"),
    ],
    ids=str,
)  # fmt: skip
def test_arguments_are_an_object_if_they_can_be(given: object, seen: object) -> None:
    called = {"id": "x", "function": {"name": "f", "arguments": given}}
    message = shown(turn_of(called), source="{% if messages[0].tool_calls %}{% endif %}")
    assert message["tool_calls"] == [
        {"type": "function", "id": "x", "function": {"name": "f", "arguments": seen}}
    ]
    assert message["content"] == ""


def test_what_else_a_message_has_reaches_the_template() -> None:
    thoughts = {"role": "assistant", "content": "So.", "reasoning_content": "Hm.", "name": "bot"}
    messages = [USER, thoughts]
    prompt = template("qwen-3").render(messages, continue_final_message=False)
    assert prompt == oracle("qwen-3", messages, add_generation_prompt=True)
    assert shown(thoughts) == {**thoughts, "thinking": "Hm.", "reasoning": "Hm."}


def test_tools_have_a_template_of_their_own() -> None:
    both = ChatTemplate(
        sources.CHATML, special_tokens=TOKENS, tool_source=sources.HERMES_3_TOOL_USE
    )
    assert both.render([USER]) == template("chatml").render([USER])
    assert both.render([USER], tools=[]) == template("chatml").render([USER])
    assert both.render([USER], tools=TOOLS) == template("hermes-3").render([USER], tools=TOOLS)
    assert both.lists_tools
    assert both.tool_source == sources.HERMES_3_TOOL_USE
    alone = ChatTemplate(None, special_tokens=TOKENS, tool_source=sources.HERMES_3_TOOL_USE)
    with pytest.raises(TemplateError, match="template not found"):
        alone.render([USER])


@each_model
def test_whether_a_template_lists_tools_is_known(name: str) -> None:
    tells = MODELS[name].knows_tools and name != "deepseek-v3"
    assert template(name).lists_tools == tells


LISTED = (
    '[{"type":"function","function":{"description":"How it is.","name":"weather",'
    '"arguments":"{\\"type\\":\\"object\\",\\"properties\\":{\\"city\\":{\\"type\\":\\"string\\"}},\\"required\\":[\\"city\\"]}"}}]'
)


def test_tools_follow_the_last_message_as_in_tgi() -> None:
    told = with_tool_prompt([SYSTEM, USER], [WEATHER], "Do it.", lists_tools=False)
    assert told == [SYSTEM, {**USER, "content": f"{USER['content']}\n---\n{LISTED}\nDo it."}]
    assert with_tool_prompt([USER], [WEATHER], "Do it.", lists_tools=True)[0]["content"].endswith(
        "Paris? \n---\nDo it."
    )
    in_parts = with_tool_prompt(
        [{"role": "user", "content": PARTS}], [WEATHER], "Do it.", lists_tools=True
    )
    assert in_parts[0]["content"] == [*PARTS, {"type": "text", "text": "\n---\nDo it."}]
    assert (
        with_tool_prompt([turn_of()], [WEATHER], "Do it.", lists_tools=True)[0]["content"]
        == "\n---\nDo it."
    )
    assert USER["content"] == " What is it like in Paris? "
    assert DEFAULT_TOOL_PROMPT.startswith("\nGiven the functions available, ")
