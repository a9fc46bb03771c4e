"""Chat templates: common forms, the templates of published models, available functions, and errors."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from millrace_router.errors import TemplateError
from millrace_router.text.chat_template import MAX_RENDERS, ChatTemplate
from millrace_router.text.model_files import ModelFiles
from millrace_router.tool_calls.formats.registry import format_of
from millrace_router.tool_calls.tool import Tool, ToolChoice
from millrace_router.tool_calls.tool_prompt import DEFAULT_TOOL_PROMPT, with_tool_prompt
from millrace_testing.text import chat_templates as sources
from millrace_testing.text import published

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": "Hi there"}
BOT = {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be kind"}

CHATML = """\
{%- for turn in messages %}
{{- '<|im_start|>' ~ turn.role ~ '\\n' ~ turn.content ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

HEADERS = """\
{{ bos_token }}{% for turn in messages %}
{% set part = '<|start|>' + turn['role'] + '<|end|>\\n\\n' + turn['content'] | trim + '<|eot|>' %}
{{ part }}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\\n\\n' }}{% endif %}"""

INST = """\
{%- if messages[0].role == 'system' %}
  {%- set system = messages[0].content + '\\n\\n' %}{% set turns = messages[1:] %}
{%- else %}
  {%- set system = '' %}{% set turns = messages %}
{%- endif %}
{{- bos_token }}
{%- for turn in turns %}
  {%- if (turn.role == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception('Roles must take turns: user, assistant, user, ...') }}
  {%- elif turn.role == 'user' %}
    {{- '[INST] ' + (system if loop.last else '') + turn.content + ' [/INST]' }}
  {%- else %}
    {{- ' ' + turn.content.strip() + eos_token }}
  {%- endif %}
{%- endfor %}"""

ZEPHYR = """\
{% for turn in messages %}
{% if turn['role'] == 'user' %}
{{ '<|user|>\\n' + turn['content'] + eos_token }}
{% elif turn['role'] == 'system' %}
{{ '<|system|>\\n' + turn['content'] + eos_token }}
{% else %}
{{ '<|assistant|>\\n'  + turn['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""


def render(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return ChatTemplate(source, special_tokens=TOKENS).render(messages, **options)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            CHATML,
            "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nHi there<|im_end|>\n"
            "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nHi there<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (
            HEADERS,
            "<s><|start|>system<|end|>\n\nBe kind<|eot|><|start|>user<|end|>\n\nHi there<|eot|>"
            "<|start|>assistant<|end|>\n\nHello<|eot|><|start|>user<|end|>\n\nHi there<|eot|>"
            "<|start|>assistant<|end|>\n\n",
        ),
        (INST, "<s>[INST] Hi there [/INST] Hello</s>[INST] Be kind\n\nHi there [/INST]"),
        (
            ZEPHYR,
            "<|system|>\nBe kind</s>\n<|user|>\nHi there</s>\n<|assistant|>\nHello</s>\n"
            "<|user|>\nHi there</s>\n<|assistant|>\n",
        ),
    ],
)
def test_usual_templates_render_as_expected(source: str, expected: str) -> None:
    assert render(source, [SYSTEM, USER, BOT, USER]) == expected


def test_generation_prompt_is_optional() -> None:
    with_prompt = render(CHATML, [USER])
    without = render(CHATML, [USER], add_generation_prompt=False)
    assert with_prompt == without + "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (CHATML, "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\nHello"),
        (INST, "<s>[INST] Hi there [/INST] Hello"),
        (ZEPHYR, "<|user|>\nHi there</s>\n<|assistant|>\nHello"),
    ],
)
def test_an_assistant_that_spoke_last_goes_on(source: str, expected: str) -> None:
    assert render(source, [USER, BOT]) == expected


def test_a_continuation_handles_words_that_the_template_repeats() -> None:
    source = "{{ messages[-1].content }}|{{ messages[-1].content }} e</e>"
    assert render(source, [USER, {"role": "assistant", "content": "e"}]) == "e|e"
    assert render(CHATML, [USER, {"role": "assistant", "content": "<|im_end|>"}]).endswith(
        "<|im_end|>"
    )
    assert render(CHATML, [USER, {"role": "assistant", "content": "a \n"}]).endswith("assistant\na")
    assert render(CHATML, [USER, {"role": "assistant", "content": ""}]).endswith("assistant")


def test_a_template_that_drops_the_last_turn_is_left_as_it_is() -> None:
    assert render("{{ messages[0].content }} !", [USER, BOT]) == "Hi there !"


def test_loop_controls_are_supported() -> None:
    source = (
        "{% for turn in messages %}{% if turn.role == 'system' %}{% continue %}{% endif %}"
        "{{ turn.content }};{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}"
    )
    assert render(source, [SYSTEM, USER, BOT, USER]) == "Hi there;Hello;"


def test_lines_that_hold_only_a_tag_leave_nothing() -> None:
    source = "a\n  {% for turn in messages %}\n  {{ turn.role }}\n  {% endfor %}\nb"
    assert render(source, [USER, SYSTEM]) == "a\n  user\n  system\nb"


def test_raise_exception_reaches_the_client() -> None:
    with pytest.raises(TemplateError) as raised:
        render(INST, [USER, USER])
    expected = "Template error: Roles must take turns: user, assistant, user, ..."
    assert str(raised.value) == expected
    assert (raised.value.status, raised.value.error_type) == (422, "template_error")


def test_strftime_now_gives_local_time() -> None:
    pattern = "%d %B %Y"
    before = datetime.now().astimezone().strftime(pattern)
    rendered = render("{{ strftime_now('" + pattern + "') }}", [USER])
    assert rendered in {before, datetime.now().astimezone().strftime(pattern)}


def test_tojson_is_plain_json_in_the_original_order() -> None:
    tools = [
        {"type": "function", "function": {"name": "naïve", "description": "<b> & 'q'", "a": 1.5}}
    ]
    expected = '{"type": "function", "function": {"name": "naïve", "description": "<b> & \'q\'", "a": 1.5}}'
    assert render("{{ tools[0] | tojson }}", [USER], tools=tools) == expected
    assert render("{{ {'b': [1], 'a': none} | tojson(indent=2) }}", [USER]) == (
        '{\n  "b": [\n    1\n  ],\n  "a": null\n}'
    )


def test_generation_tags_are_transparent() -> None:
    source = (
        "{% for turn in messages %}{%- generation -%}{{ turn.content }}"
        "{%- endgeneration -%}|{% endfor %}{% generation %}end{% endgeneration %}"
    )
    assert render(source, [USER, SYSTEM]) == "Hi there|Be kind|end"


def test_reversing_and_string_methods_work() -> None:
    source = "{% for turn in messages[::-1] %}{{ turn.content.upper().split(' ')[0] }} {% endfor %}"
    assert render(source, [USER, SYSTEM]) == "BE HI "


def test_variables_reach_the_template_but_hide_nothing() -> None:
    source = "{{ enable_thinking }}{{ messages[0].content }}{{ bos_token }}{{ tools is none }}"
    variables = {"enable_thinking": False, "messages": [], "bos_token": "x", "tools": 1}
    assert render(source, [USER], variables=variables) == "FalseHi there<s>True"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[7].content.nothing }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for i in range(1000000) %}x{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ messages[0].content + 1 }}",
    ],
)
def test_any_failure_inside_a_template_is_a_template_error(source: str) -> None:
    with pytest.raises(TemplateError):
        render(source, [USER])


def test_a_missing_and_a_broken_template_have_different_errors() -> None:
    with pytest.raises(TemplateError, match=r"^Template error: template not found$"):
        ChatTemplate.of(ModelFiles()).render([USER])
    broken = ChatTemplate.of(ModelFiles(chat_template="{% for %}"))
    with pytest.raises(TemplateError, match="the model's chat template is not valid"):
        broken.render([USER])


@settings(deadline=None, max_examples=80)
@given(
    contents=st.lists(
        st.text(st.sampled_from("ab {}%\n好'\"<|>"), max_size=12), min_size=1, max_size=5
    )
)
def test_contents_are_never_interpreted(contents: list[str]) -> None:
    messages = [{"role": "user", "content": content} for content in contents]
    expected = "".join(f"<|im_start|>user\n{content}<|im_end|>\n" for content in contents)
    assert render(CHATML, messages, add_generation_prompt=False) == expected


async def test_a_large_conversation_is_rendered_in_another_thread() -> None:
    seen: list[int] = []

    class Recording(ChatTemplate):
        def render(self, *args: Any, **options: Any) -> str:
            seen.append(threading.get_ident())
            return super().render(*args, **options)

    template = Recording(CHATML, special_tokens={})
    large = {"role": "user", "content": "x" * 50_000}
    small_prompt, large_prompt = await asyncio.gather(
        template.render_async([USER]), template.render_async([large])
    )
    assert small_prompt == template.render([USER])
    assert large_prompt == template.render([large])
    assert (seen[0] == threading.get_ident(), seen[1] == threading.get_ident()) == (True, False)


async def test_few_large_conversations_are_rendered_at_a_time() -> None:
    threads: set[int] = set()

    class Recording(ChatTemplate):
        def render(self, *args: Any, **options: Any) -> str:
            threads.add(threading.get_ident())
            return super().render(*args, **options)

    template, large = (
        Recording(CHATML, special_tokens={}),
        {"role": "user", "content": "x" * 50_000},
    )
    await asyncio.gather(*(template.render_async([large]) for _ in range(8 * MAX_RENDERS)))
    assert threading.get_ident() not in threads
    assert len(threads) <= MAX_RENDERS


async def test_a_render_that_takes_too_long_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    class Stuck(ChatTemplate):
        def render(self, *args: Any, **options: Any) -> str:
            released.wait()
            return ""

    monkeypatch.setattr("millrace_router.text.chat_template._RENDER_SECONDS", 0.01)
    try:
        with pytest.raises(TemplateError, match="took more than"):
            await Stuck(CHATML, special_tokens={}).render_async([{"content": "x" * 50_000}])
    finally:
        released.set()


# They end after some seconds where nothing stops them.
LOOPS = {
    "loop": "{% for a in range(2000) %}{% for b in range(2000) %}{% endfor %}{% endfor %}",
    "condition": "{% for a in range(2000) %}{% for b in range(2000) if false %}{% endfor %}{% endfor %}",
    "recursive": "{% for a in [6] recursive %}{% if a %}{{ loop([a - 1] * 9) }}{% endif %}{% endfor %}",
    "macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(20) }}",
}


@pytest.mark.parametrize("source", LOOPS.values(), ids=LOOPS.keys())
async def test_a_template_that_does_not_end_leaves_the_event_loop_and_is_stopped(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace_router.text.chat_template._MAX_TURNS", 100_000)
    threads: list[int] = []

    class Recording(ChatTemplate):
        def render(self, *args: Any, **options: Any) -> str:
            threads.append(threading.get_ident())
            return super().render(*args, **options)

    with pytest.raises(TemplateError, match="does not come to an end"):
        await Recording(source, special_tokens={}).render_async([USER])
    assert len(set(threads)) == len(threads) == 2
    assert threads[0] == threading.get_ident()


async def test_a_template_with_a_long_loop_is_rendered_whole() -> None:
    source = "{% for a in range(50000) %}a{% endfor %}"
    assert await ChatTemplate(source, special_tokens={}).render_async([USER]) == "a" * 50_000


@pytest.mark.parametrize("expression", ["10 ** (10 ** 9)", "'a' * 10 ** 9", "9 * 10 ** 8 * [0]"])
def test_a_template_cannot_make_a_value_larger_than_any_prompt(expression: str) -> None:
    with pytest.raises(TemplateError, match="too large"):
        render(f"{{{{ {expression} }}}}", [USER])
    assert render("{{ 2 ** 10 * 3 }}{{ 'ab' * 2 }}", [USER]) == "3072abab"


Message = dict[str, Any]

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = Tool("weather", "How it is.", PARAMETERS, strict=False)
TOOLS = [WEATHER.as_json()]

SYSTEM_TURN = {"role": "system", "content": "Be kind."}
USER_TURN = {"role": "user", "content": " What is it like in Paris? "}
BOT_TURN = {"role": "assistant", "content": "Fine. "}


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
    USER_TURN,
    turn_of(call("abcdefgh1", "Paris")),
    {"role": "tool", "tool_call_id": "abcdefgh1", "content": '"18 °C"'},
]
TWICE = [
    SYSTEM_TURN, USER_TURN,
    turn_of(call("abcdefgh1", "Paris"), call("abcdefgh2", "Rome"), content="I look."),
    {"role": "tool", "tool_call_id": "abcdefgh1", "content": "18"},
    {"role": "tool", "tool_call_id": "abcdefgh2", "content": "25"},
    BOT_TURN, {**USER_TURN, "content": "And now?"},
]  # fmt: skip
CONVERSATIONS = {
    "plain": [SYSTEM_TURN, USER_TURN],
    "turns": [SYSTEM_TURN, USER_TURN, BOT_TURN, USER_TURN],
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
    messages = [USER_TURN, {"role": "assistant", "content": said}]
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
        qwen.render([USER_TURN, turn_of(call("abcdefgh1", "Rome"))], continue_final_message=True)
    with pytest.raises(TemplateError, match="generation prompt"):
        qwen.render([USER_TURN, BOT_TURN], continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(TemplateError, match="leaves out the message"):
        ChatTemplate("x", special_tokens={}).render([USER_TURN], continue_final_message=True)
    assert qwen.render([USER_TURN, turn_of(call("abcdefgh1", "Rome"))]).endswith(
        "<|im_start|>assistant\n"
    )


PARTS = [{"type": "text", "text": " one"}, {"type": "text", "text": "two "}]


@pytest.mark.parametrize("name", ["mistral-v13", "gemma-3", "smol-vlm"])
def test_templates_that_loop_over_parts_get_them(name: str) -> None:
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
    in_parts = template(name).render([SYSTEM_TURN, {"role": "user", "content": PARTS}])
    assert in_parts == template(name).render([SYSTEM_TURN, {"role": "user", "content": " onetwo "}])


def test_loops_over_parts_are_recognised_through_names_and_macros() -> None:
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
        [USER_TURN, turn_of(call("abcdefgh1", "Rome"), content="I look."), USER_TURN]
    )
    assert '<|im_start|>assistant\nI look.\n[{"id":"abcdefgh1"' in with_words


def test_call_ids_are_shortened_where_only_short_ones_are_accepted() -> None:
    long = [
        USER_TURN,
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
        [USER_TURN, turn_of({**call("", "Rome"), "id": None}), BOT_TURN], tools=TOOLS
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
        ("[1]", {"arguments": [1]}), ('{"a": ', {}), ('{"a": "b', {"a": "b"}), ("text", {"arguments": "text"}),
    ],
    ids=str,
)  # fmt: skip
def test_arguments_are_an_object_even_if_a_call_was_cut(given: object, seen: object) -> None:
    called = {"id": "x", "function": {"name": "f", "arguments": given}}
    message = shown(turn_of(called), source="{% if messages[0].tool_calls %}{% endif %}")
    assert message["tool_calls"] == [
        {"type": "function", "id": "x", "function": {"name": "f", "arguments": seen}}
    ]
    assert message["content"] == ""


def test_other_fields_of_a_message_reach_the_template() -> None:
    thoughts = {"role": "assistant", "content": "So.", "reasoning_content": "Hm.", "name": "bot"}
    messages = [USER_TURN, thoughts]
    prompt = template("qwen-3").render(messages, continue_final_message=False)
    assert prompt == oracle("qwen-3", messages, add_generation_prompt=True)
    assert shown(thoughts) == {**thoughts, "thinking": "Hm.", "reasoning": "Hm."}


def test_tools_have_a_template_of_their_own() -> None:
    both = ChatTemplate(
        sources.CHATML, special_tokens=TOKENS, tool_source=sources.HERMES_3_TOOL_USE
    )
    assert both.render([USER_TURN]) == template("chatml").render([USER_TURN])
    assert both.render([USER_TURN], tools=[]) == template("chatml").render([USER_TURN])
    assert both.render([USER_TURN], tools=TOOLS) == template("hermes-3").render(
        [USER_TURN], tools=TOOLS
    )
    assert both.lists_tools
    assert both.tool_source == sources.HERMES_3_TOOL_USE
    alone = ChatTemplate(None, special_tokens=TOKENS, tool_source=sources.HERMES_3_TOOL_USE)
    with pytest.raises(TemplateError, match="template not found"):
        alone.render([USER_TURN])


@each_model
def test_whether_a_template_lists_tools_is_known(name: str) -> None:
    tells = MODELS[name].knows_tools and name != "deepseek-v3"
    assert template(name).lists_tools == tells


LISTED = (
    '[{"type":"function","function":{"description":"How it is.","name":"weather",'
    '"arguments":"{\\"type\\":\\"object\\",\\"properties\\":{\\"city\\":{\\"type\\":\\"string\\"}},\\"required\\":[\\"city\\"]}"}}]'
)


def test_tools_follow_the_last_message_as_in_tgi() -> None:
    told = with_tool_prompt([SYSTEM_TURN, USER_TURN], [WEATHER], "Do it.", lists_tools=False)
    assert told == [
        SYSTEM_TURN,
        {**USER_TURN, "content": f"{USER_TURN['content']}\n---\n{LISTED}\nDo it."},
    ]
    assert with_tool_prompt([USER_TURN], [WEATHER], "Do it.", lists_tools=True)[0][
        "content"
    ].endswith("Paris? \n---\nDo it.")
    in_parts = with_tool_prompt(
        [{"role": "user", "content": PARTS}], [WEATHER], "Do it.", lists_tools=True
    )
    assert in_parts[0]["content"] == [*PARTS, {"type": "text", "text": "\n---\nDo it."}]
    assert (
        with_tool_prompt([turn_of()], [WEATHER], "Do it.", lists_tools=True)[0]["content"]
        == "\n---\nDo it."
    )
    assert USER_TURN["content"] == " What is it like in Paris? "
    assert DEFAULT_TOOL_PROMPT.startswith("\nGiven the functions available, ")


WEATHER_TOOL = Tool(
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
WEATHER_QUESTION = {"role": "user", "content": "What is it like?"}
WEATHER_TOOLS = [WEATHER_TOOL.as_json()]
RENDERING = sorted(published.FORMATS.keys() - {"granite_3_3"})
"""Templates that render earlier calls; Granite 3.3's has none."""


def turn(arguments: object, id_: str = "call_1") -> dict[str, Any]:
    function = {"name": WEATHER_TOOL.name, "arguments": arguments}
    call = {"id": id_, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


@pytest.mark.parametrize("name", RENDERING)
def test_the_parser_reads_the_calls_that_a_template_renders(name: str) -> None:
    source = published.template(name)
    rendered = ChatTemplate(source, special_tokens={}).render(
        [WEATHER_QUESTION, turn(json.dumps(ARGUMENTS))],
        tools=WEATHER_TOOLS,
        add_generation_prompt=False,
    )
    # Templates show the form of calls to the model too; the last turn is what the model would have written.
    said = rendered[rendered.rindex("What is it like?") :]
    parser = format_of(source).parser([WEATHER_TOOL], ToolChoice("auto"))
    deltas = [*parser.push(said).calls, *parser.finish().calls]
    assert [delta.name for delta in deltas if delta.name] == [WEATHER_TOOL.name]
    assert json.loads("".join(delta.arguments for delta in deltas)) == ARGUMENTS


@pytest.mark.parametrize("name", RENDERING)
def test_prompts_of_published_templates_are_those_of_transformers(name: str) -> None:
    result = {"role": "tool", "tool_call_id": "call_1", "content": "18 °C"}
    prompt = ChatTemplate(published.template(name), special_tokens={}).render(
        [WEATHER_QUESTION, turn(json.dumps(ARGUMENTS)), result],
        tools=WEATHER_TOOLS,
        add_generation_prompt=True,
    )
    expected, _ = render_jinja_template(
        [[WEATHER_QUESTION, turn(ARGUMENTS), {**result, "name": WEATHER_TOOL.name}]],
        tools=WEATHER_TOOLS,
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
        WEATHER_QUESTION,
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
    prompt = template.render(
        [WEATHER_QUESTION, both, *results, WEATHER_QUESTION], tools=WEATHER_TOOLS
    )
    alone = [turn({"city": "Rome"}, "a"), results[1], turn({"city": "Oslo"}, "b"), results[0]]
    assert prompt == template.render(
        [WEATHER_QUESTION, *alone, WEATHER_QUESTION], tools=WEATHER_TOOLS
    )
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
    assert template.render([WEATHER_QUESTION, turn('{"a":  1}')]) == 'x{"a":  1}y'
    assert template.render([WEATHER_QUESTION, turn({"a": "é"})]) == 'x{"a": "é"}y'
    assert template.render([WEATHER_QUESTION, turn("")]) == "x{}y"
