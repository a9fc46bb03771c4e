"""Templates and tokens from strangers: whatever they are, a prompt, a text or a TemplateError."""

from __future__ import annotations

import re
from functools import cache
from itertools import groupby
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from millrace_router.errors import TemplateError
from millrace_router.text.chat_template import ChatTemplate
from millrace_router.text.detokenizer import IncrementalDetokenizer, _WindowSteps
from millrace_router.text.tokenizer import Tokenizer
from millrace_testing.text.texts import KINDS, tokenizer

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
fuzz_templates = settings(
    deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow]
)


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


@fuzz_templates
@given(
    messages=MESSAGES,
    variables=st.dictionaries(NAMES | st.text(max_size=5), VALUES, max_size=3),
    tools=st.none()
    | st.lists(st.dictionaries(st.text(max_size=4), VALUES, max_size=2), max_size=2),
    add_generation_prompt=st.booleans(),
)
@pytest.mark.parametrize("source", [LLAMA_3, CHATML, MISTRAL], ids=["llama-3", "chatml", "mistral"])
def test_any_messages_are_rendered_or_a_template_error(
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


@fuzz_templates
@given(
    turns=st.lists(
        st.text(st.characters(exclude_categories=["Cs", "Co"]), max_size=20), min_size=1, max_size=4
    )
)
@pytest.mark.parametrize("source", [LLAMA_3, CHATML], ids=["llama-3", "chatml"])
def test_text_of_users_is_never_taken_for_a_template(source: str, turns: list[str]) -> None:
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


@settings(fuzz_templates, max_examples=300)
@given(source=SOURCES | EXPRESSIONS | st.text(max_size=40), messages=MESSAGES)
@example(source="{{ " + "(" * 5000 + ")" * 5000 + " }}", messages=[])
@example(source="{{ " + "-" * 20_000 + "1 }}", messages=[])
@example(source="{% for x in [1] %}" * 400 + "{% endfor %}" * 400, messages=[])
@example(source="{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", messages=[])
@example(source="{{ messages.__class__.__mro__ }}{{ '%c' % -1 }}", messages=[])
@example(source="{{ strftime_now('\ud800') }}", messages=[])
def test_any_template_renders_or_raises_a_template_error(
    source: str, messages: list[dict[str, Any]]
) -> None:
    outcome(ChatTemplate(source, special_tokens=TOKENS), messages)


BROKEN = "\N{REPLACEMENT CHARACTER}"
BYTE = re.compile("<0x[0-9A-F]{2}>")
OF_BYTES = ["byte_level", "byte_fallback"]
# Small numbers are special tokens and, with byte fallback, bytes; the last ones are in no vocabulary.
IDS = st.lists(st.integers(0, 60) | st.integers(0, 430), max_size=30)
fuzz_detokenizer = settings(deadline=None, max_examples=150)


def pieces_of(one: Tokenizer, prompt: list[int], ids: list[int]) -> list[str]:
    """Text of each token, and what is left at the end."""
    text = IncrementalDetokenizer(one, prompt)
    return [*(text.step(id_) for id_ in ids), text.flush()]


def library_text(one: Tokenizer, ids: list[int]) -> str:
    """The library's text of `ids` behind a word.

    For a run of byte tokens that is no UTF-8, the library writes one replacement sign for each byte, and Python's
    decoder writes one for each piece of a character. The reference uses Python's decoder for such runs.
    """
    rust = one._rust
    before = one.decode(one.encode("the"), skip_special_tokens=False)
    text = ""
    for is_byte, run in groupby(ids, lambda id_: bool(BYTE.fullmatch(rust.id_to_token(id_) or ""))):
        run_ids = list(run)
        decoded = one.decode([*one.encode("the"), *run_ids], skip_special_tokens=False)
        added = decoded.removeprefix(before)
        if is_byte and BROKEN in added:
            names = [str(rust.id_to_token(id_)) for id_ in run_ids]
            raw = bytes(int(name[3:5], 16) for name in names)
            added = raw.decode(errors="replace")
        text += added
    return text


@fuzz_detokenizer
@given(ids=IDS)
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_join_to_the_decode_of_the_whole(kind: str, ids: list[int]) -> None:
    one = tokenizer(kind)
    known = [id_ for id_ in ids if one._rust.id_to_token(id_) is not None]
    assert "".join(pieces_of(one, [*one.encode("the")], ids)) == library_text(one, known)


@fuzz_detokenizer
@given(text=st.text(max_size=30))
@example(text="\u2581")
# A token of theirs ends the first character and begins the second.
@example(text="\U000650b6\xd7")
@example(text="\U000650b6\xd7" * 20)
@pytest.mark.parametrize("kind", OF_BYTES)
@pytest.mark.parametrize("steps_of", [IncrementalDetokenizer, _WindowSteps])
def test_any_text_comes_back_with_no_character_broken(
    kind: str, steps_of: type[IncrementalDetokenizer | _WindowSteps], text: str
) -> None:
    """By the bytes of tokens, and by decodes of a few of them, which other kinds need."""
    one = tokenizer(kind)
    if kind == "byte_fallback":
        text = text.replace("\u2581", "")  # it stands for a space there
    steps = steps_of(one, one.encode("the"))
    pieces = [*(steps.step(id_) for id_ in one.encode(text)), steps.flush()]
    space = " " if kind == "byte_fallback" and text else ""
    assert "".join(pieces) == space + text
    assert BROKEN in text or not any(BROKEN in piece for piece in pieces)


@fuzz_detokenizer
@given(ids=IDS, cut=st.integers(0, 30))
@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_goes_on_where_it_was(kind: str, ids: list[int], cut: int) -> None:
    """Read again up to any cut, or taken for prompt up to a cut between characters, the rest reads the same."""
    one = tokenizer(kind)
    prompt = [*one.encode("the")]
    pieces = pieces_of(one, prompt, ids)
    again = IncrementalDetokenizer(one, prompt)
    for id_ in ids[:cut]:
        again.step(id_)
    rest = [*(again.step(id_) for id_ in ids[cut:]), again.flush()]
    assert rest == pieces[len(ids[:cut]) :]
    # Where a decode of a few tokens says what one adds, those outside the vocabulary are no prompt to add to.
    is_prompt = one.has_token_bytes or all(
        one._rust.id_to_token(id_) is not None for id_ in ids[:cut]
    )
    if is_prompt and pieces_of(one, prompt, ids[:cut])[-1] == "":
        assert pieces_of(one, [*prompt, *ids[:cut]], ids[cut:]) == rest
