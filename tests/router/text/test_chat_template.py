"""Chat templates: common forms, available functions, and errors."""

from __future__ import annotations

import asyncio
import threading
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_router.errors import TemplateError
from millrace_router.text.chat_template import ChatTemplate
from millrace_router.text.model_files import ModelFiles

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


def test_going_on_finds_words_that_the_template_repeats() -> None:
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


def test_raise_exception_tells_the_client() -> None:
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


def test_tojson_is_plain_json_in_the_order_given() -> None:
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
def test_whatever_goes_wrong_inside_is_a_template_error(source: str) -> None:
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


async def test_a_render_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
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
