"""Chat templates are programs of strangers: whatever they and the messages are, a prompt or a TemplateError."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from millrace_router.errors import TemplateError
from millrace_router.text.chat_template import ChatTemplate

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

LLAMA_3 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{%- if strftime_now is defined %}
    {%- set today = strftime_now("%d %b %Y") %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + system + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'tool' or message.role == 'ipython' %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""  # noqa: E501

CHATML = """\
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" and not message.content.startswith('<tool_response>') %}
        {%- set ns.last = messages | length - 1 - loop.index0 %}{%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == "assistant" and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system = messages[0]["content"] %}{%- set turns = messages[1:] %}
{%- else %}{%- set turns = messages %}{%- endif %}
{%- set ns = namespace(index=0) %}
{{- bos_token }}
{%- for turn in turns %}
    {%- if (turn["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("Roles must alternate: user, assistant, user") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
    {%- if turn["role"] == "user" %}
        {%- if loop.last and system is defined %}{{- "[INST] " + system + "\\n\\n" + turn["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + turn["content"] + "[/INST]" }}{%- endif %}
    {%- elif turn["role"] == "assistant" %}{{- " " + turn["content"] | trim + eos_token }}
    {%- else %}{{- raise_exception("Only user and assistant roles are supported!") }}
    {%- endif %}
{%- endfor %}"""

ROLES = st.sampled_from(["user", "assistant", "system", "tool", "ipython", "developer", ""])
WORDS = st.text(max_size=20) | st.sampled_from(
    [
        "{{ 7 * 7 }}",
        "{% raise %}",
        "</think>x",
        "<tool_response>",
        "\ue0f1\ue0f2\ue0f1",
        "\ue0f1",
        "\0",
    ]
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": ROLES | st.text(max_size=4), "content": WORDS},
        optional={"name": WORDS, "tool_call_id": WORDS},
    ),
    max_size=5,
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(
    ["messages", "bos_token", "tools", "add_generation_prompt", "loop", "range", "strftime_now", "enable_thinking"]
)  # fmt: skip
fuzz = settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow])


@cache
def compiled(source: str) -> ChatTemplate:
    """One of the templates above."""
    return ChatTemplate(source, special_tokens=TOKENS)


def outcome(template: ChatTemplate, messages: list[dict[str, Any]], **options: Any) -> str | None:
    """The prompt, or None where there is a TemplateError."""
    try:
        prompt = template.render(messages, **options)
    except TemplateError:
        return None
    assert isinstance(prompt, str)
    return prompt


@fuzz
@given(
    messages=MESSAGES,
    variables=st.dictionaries(NAMES | st.text(max_size=5), VALUES, max_size=3),
    tools=st.none()
    | st.lists(st.dictionaries(st.text(max_size=4), VALUES, max_size=2), max_size=2),
    add_generation_prompt=st.booleans(),
)
@pytest.mark.parametrize("source", [LLAMA_3, CHATML, MISTRAL], ids=["llama-3", "chatml", "mistral"])
def test_any_messages(
    source: str,
    messages: list[dict[str, Any]],
    variables: dict[str, Any],
    tools: list[dict[str, Any]] | None,
    add_generation_prompt: bool,
) -> None:
    outcome(
        compiled(source),
        messages,
        variables=variables,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
    )


@fuzz
@given(
    turns=st.lists(
        st.text(st.characters(exclude_categories=["Cs", "Co"]), max_size=20), min_size=1, max_size=4
    )
)
@pytest.mark.parametrize("source", [LLAMA_3, CHATML], ids=["llama-3", "chatml"])
def test_what_users_say_is_text_and_never_template(source: str, turns: list[str]) -> None:
    messages = [{"role": "user", "content": "{{ 7 * 7 }}{% if %}" + turn + "!"} for turn in turns]
    prompt = outcome(compiled(source), messages)
    assert prompt is not None
    for message in messages:
        assert message["content"] in prompt


TOKENS_OF_JINJA = """
messages is not in if elif else endif for endfor set endset block endblock extends include import
macro endmacro call endcall filter endfilter raw endraw generation endgeneration break continue do
with endwith autoescape trim tojson length loop cycle self caller super varargs __class__ __mro__
mro format raise_exception strftime_now namespace range dict joiner lipsum x none true role content
string map attr join first batch int float
{{ }} {% %} {# #} - [ ] ( ) | . , : 0 ' " ~ + * ** % / // < ==
"""
# Larger numbers would multiply and count until the test ends.
PARTS = st.sampled_from([*TOKENS_OF_JINJA.split(), " ", "\n", "999"])
SOURCES = st.lists(PARTS | st.text(max_size=3), max_size=14).map(" ".join)
EXPRESSIONS = st.lists(PARTS, max_size=7).map(lambda parts: "{{ " + " ".join(parts) + " }}")


@settings(fuzz, max_examples=300)
@given(source=SOURCES | EXPRESSIONS | st.text(max_size=40), messages=MESSAGES)
@example(source="{{ " + "(" * 5000 + ")" * 5000 + " }}", messages=[])
@example(source="{{ " + "-" * 20_000 + "1 }}", messages=[])
@example(source="{% for x in [1] %}" * 400 + "{% endfor %}" * 400, messages=[])
@example(source="{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", messages=[])
@example(source="{{ messages.__class__.__mro__ }}{{ '%c' % -1 }}", messages=[])
@example(source="{{ strftime_now('\ud800') }}", messages=[])
def test_any_template(source: str, messages: list[dict[str, Any]]) -> None:
    outcome(ChatTemplate(source, special_tokens=TOKENS), messages)
