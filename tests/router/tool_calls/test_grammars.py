"""Grammars of tool calls, compiled as in shards: allowed texts are parsed as calls that match."""

from __future__ import annotations

import json
import random
import re
from typing import Any, get_args

import jsonschema
import pytest

from millrace_router.config import RouterConfig
from millrace_router.errors import ToolError, ValidationError
from millrace_router.request.grammar import MAX_LEVELS, MAX_PARTS
from millrace_router.request.request import Grammar, GrammarKind
from millrace_router.text.tokenizer import Tokenizer
from millrace_router.tool_calls.formats.registry import ALIASES, NAMES, format_of
from millrace_router.tool_calls.parsing.call_format import CallFormat
from millrace_router.tool_calls.tool import Tool, ToolChoice
from millrace_router.tool_calls.tool_prompt import DEFAULT_TOOL_PROMPT
from millrace_shard.structured_output.grammar_source import GrammarInvalid, lark_of
from millrace_shard.structured_output.matcher import Matcher
from millrace_shard.structured_output.vocabulary import Vocabulary
from millrace_testing.engines.grammars import lark, mask_of
from millrace_testing.text import chat_templates as sources
from millrace_testing.text import published
from millrace_testing.text.texts import byte_level
from millrace_testing.text.written_calls import read

EOS = 0
MARKERS = ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<tool_call>", "</tool_call>"]
SPECIAL = {text: index for index, text in enumerate(MARKERS, start=1)}
PIECES = [
    '{"',
    '": "',
    '"}',
    "}}",
    '": {"',
    "</",
    "tool_call",
    '", "',
    "[{",
    "}]",
    "```",
    "json\n",
    "[TOOL",
    "_CALLS]",
]
TOKENS = [b"</s>", *(text.encode() for text in MARKERS), *(bytes([byte]) for byte in range(256))]
TOKENS += [piece.encode() for piece in PIECES]
VOCABULARY = Vocabulary.of(TOKENS, special=range(len(SPECIAL) + 1), eos_token_ids=[EOS])

WEATHER = Tool(
    "weather",
    "How it is (outside: {",
    {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "maximum": 9, "minimum": 0}},
        "required": ["city"],
    },
    strict=True,
)  # fmt: skip
NOW = Tool('say "now" (', None, {"type": "object", "properties": {}}, strict=False)
TOOLS = [WEATHER, NOW]
REQUIRED, AUTO, NAMED = ToolChoice("required"), ToolChoice("auto"), ToolChoice("named", "weather")
ONE_REQUIRED, ONE_AUTO = ToolChoice("required", parallel=False), ToolChoice("auto", parallel=False)
CHOICES = {
    "required": REQUIRED, "one required": ONE_REQUIRED, "named": NAMED, "auto": AUTO, "one of auto": ONE_AUTO
}  # fmt: skip


def chosen(name: str, *, special: bool = False) -> CallFormat:
    """The format; `named` is Mistral's newer form."""
    source = {"named": "[TOOL_CALLS][ARGS]", "mistral": "[TOOL_CALLS]"}.get(name)
    asked = "mistral" if name == "named" else name
    made = format_of(source, asked, special_ids=SPECIAL if special else {})
    assert isinstance(made, CallFormat)
    return made


def matcher_of(grammar: Grammar | None) -> Matcher:
    """Compile a grammar as shards do."""
    assert grammar is not None
    assert grammar.kind == GrammarKind.LARK
    return Matcher.of(lark_of(lark(grammar.source)), VOCABULARY)


def ids_of(text: str, markers: frozenset[str]) -> list[int]:
    """The tokens of a text: special tokens for markers, bytes for the rest."""
    ids: list[int] = []
    while text:
        marker = next((m for m in markers if text.startswith(m)), None)
        if marker is not None:
            ids.append(SPECIAL[marker])
        else:
            ids += [byte + len(SPECIAL) + 1 for byte in text[0].encode()]
        text = text[len(marker or text[0]) :]
    return ids


def takes(made: CallFormat, choice: ToolChoice, text: str, tools: list[Tool] = TOOLS) -> bool:
    """Whether a whole answer may be `text`."""
    matcher = matcher_of(made.grammar(tools, choice))
    return matcher.consume_all(ids_of(text, made.markers)) and matcher.inner.is_accepting()


def object_of(name: str, key: str, arguments: str = '{"city": "Rome"}') -> str:
    return f'{{"name": {json.dumps(name)}, "{key}": {arguments}}}'


def written(name: str, *called: str) -> str:
    """Calls of these tools in the format's form."""
    key = "parameters" if name in {"llama", "json"} else "arguments"
    arguments = {"weather": '{"city": "Rome"}'}
    objects = [object_of(one, key, arguments.get(one, "{}")) for one in called]
    named = "".join(f"[TOOL_CALLS]{one}[ARGS]{arguments.get(one, '{}')}" for one in called)
    return {
        "hermes": "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects),
        "llama": "; ".join(objects),
        "mistral": f"[TOOL_CALLS][{', '.join(objects)}]",
        "named": named,
        "json": f"[{', '.join(objects)}]" if len(objects) > 1 else objects[0],
    }[name]


FORMATS = ["hermes", "llama", "mistral", "named", "json"]
each_format = pytest.mark.parametrize("name", FORMATS)
each_vocabulary = pytest.mark.parametrize("special", [False, True], ids=["text", "special"])


@each_format
@each_vocabulary
def test_required_is_one_call_or_more_and_nothing_else(name: str, special: bool) -> None:
    made, one = chosen(name, special=special), written(name, "weather")
    assert takes(made, REQUIRED, one)
    assert takes(made, REQUIRED, written(name, "weather", NOW.name, "weather"))
    for text in (
        "",
        "Hi",
        f"Hi {one}",
        f"{one}\n",
        f" {one}",
        one.replace("Rome", "Bonn"),
        one.replace("weather", "rain"),
    ):
        assert not takes(made, REQUIRED, text), text


@each_format
@each_vocabulary
def test_one_call_is_one_call(name: str, special: bool) -> None:
    made = chosen(name, special=special)
    for choice in (ONE_REQUIRED, NAMED, ONE_AUTO):
        assert takes(made, choice, written(name, "weather"))
        assert not takes(made, choice, written(name, "weather", "weather"))


@each_format
def test_named_is_that_tool(name: str) -> None:
    made = chosen(name)
    assert takes(made, NAMED, written(name, "weather"))
    assert not takes(made, NAMED, written(name, NOW.name))
    assert takes(made, ToolChoice("named", NOW.name), written(name, NOW.name))


@each_format
@each_vocabulary
def test_auto_with_a_strict_tool_is_text_or_calls_that_match(name: str, special: bool) -> None:
    made, one = chosen(name, special=special), written(name, "weather")
    for text in ("Hi", "a {b} [c]", "1 < 2\n\n", one, written(name, "weather", NOW.name)):
        assert takes(made, AUTO, text), text
    assert not takes(made, AUTO, one.replace("Rome", "Bonn"))
    if name not in {"llama", "json"}:
        assert takes(made, AUTO, f"Let me see.\n\n{one}\nSo.")
        assert not takes(made, AUTO, f"Hi {one}".replace("Rome", "Bonn"))


@each_format
def test_without_need_there_is_no_grammar(name: str) -> None:
    made = chosen(name)
    assert made.grammar(TOOLS, ToolChoice("none")) is None
    assert made.grammar([NOW], AUTO) is None
    assert made.grammar([NOW], REQUIRED) is not None


@each_format
@each_vocabulary
@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_generated_texts_are_parsed_as_calls_that_match(
    name: str, special: bool, choice: ToolChoice
) -> None:
    """Random choices among allowed tokens, with frequent markers and brackets."""
    made, rng = chosen(name, special=special), random.Random(f"{name} {special} {choice}")
    start, num_ended = matcher_of(made.grammar(TOOLS, choice)), 0
    for _ in range(4):
        text = walk(start.copy(), rng, most=160)
        if text is None:
            continue
        num_ended += 1
        answer = read(made.parser(TOOLS, choice), [text])
        said, calls = answer.text, answer.calls
        for called, arguments in calls:
            tool = next(tool for tool in TOOLS if tool.name == called)
            jsonschema.validate(json.loads(arguments), tool.parameters)
        assert not any(marker in said for marker in made.syntax.openers)
        if choice.is_forced:
            assert calls
            assert said == ""
        if choice.is_single:
            assert len(calls) <= 1
        if choice.name:
            assert {called for called, _ in calls} == {choice.name}
    assert num_ended


def walk(matcher: Matcher, rng: random.Random, *, most: int) -> str | None:
    """The text of an answer; None if it does not end within `most` tokens."""
    text = b""
    for _ in range(most):
        choices = [
            id_
            for id_ in mask_of(matcher)
            if id_ in {EOS, *SPECIAL.values()} or TOKENS[id_].isascii()
        ]
        telling = [id_ for id_ in choices if id_ <= len(SPECIAL) or TOKENS[id_][:1] in b'<[{"}]`']
        id_ = rng.choice(telling if telling and rng.random() < 0.4 else choices)
        assert matcher.consume(id_)
        if matcher.has_ended:
            return text.decode()
        text += TOKENS[id_]
    return None


def forced(parameters: dict[str, Any], arguments: str, *, strict: bool) -> bool:
    """Whether the grammar of these parameters allows the call."""
    tool = Tool("t", None, parameters, strict)
    return takes(chosen("llama"), REQUIRED, object_of("t", "parameters", arguments), [tool])


@pytest.mark.parametrize("strict", [False, True], ids=["lenient", "strict"])
def test_arguments_are_objects_of_listed_properties(strict: bool) -> None:
    assert forced({}, '{"a": 1}', strict=strict)
    assert not forced({}, "[1]", strict=strict)
    listed = {"properties": {"a": {"type": "integer"}}}
    assert forced(listed, '{"a": 1}', strict=strict)
    assert forced(listed, "{}", strict=strict)
    assert not forced(listed, '{"a": 1, "b": 2}', strict=strict)
    assert forced({**listed, "additionalProperties": True}, '{"a": 1, "b": 2}', strict=strict)
    assert forced({"type": ["object", "null"]}, "{}", strict=strict)
    assert not forced({"type": ["object", "null"]}, "null", strict=strict)
    referring = {
        "$ref": "#/$defs/A",
        "$defs": {"A": {"type": "object", "properties": {"x": {"$ref": "#/$defs/A"}}}},
    }
    assert forced(referring, '{"x": {"x": {}}}', strict=strict)
    assert not forced(referring, '{"x": 1}', strict=strict)


def test_white_space_in_arguments_is_limited() -> None:
    parameters = {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    assert forced(parameters, '{"a": 1, "b": 2}', strict=False)
    assert forced(parameters, '{"a":1,"b":2}', strict=False)
    for arguments in ('{ "a": 1}', '{"a":  1}', '{\n"a": 1}', '{"a": 1 }'):
        assert not forced(parameters, arguments, strict=False)


UNSUPPORTED = [
    {"properties": {"a": {"type": "array", "uniqueItems": True}}},
    {"properties": {"a": {"not": {"type": "null"}}}},
    {"properties": {"a": {"type": "array", "items": {"pattern": "(?=x)y", "type": "string"}}}},
    {"properties": {"a": {"oneOf": [{"type": "array"}, {"minItems": 1, "type": "array"}]}}},
    {"properties": {"a": {"type": "array", "items": {"type": "string", "format": 5}}}},
]


@pytest.mark.parametrize("parameters", UNSUPPORTED, ids=str)
def test_constraints_that_cannot_be_kept_are_refused_only_for_strict_tools(
    parameters: dict[str, Any],
) -> None:
    assert forced(parameters, '{"a": ["x"]}', strict=False)
    with pytest.raises(GrammarInvalid) as raised:
        forced(parameters, '{"a": ["x"]}', strict=True)
    assert "call_0" not in str(raised.value)


def test_properties_may_be_named_as_annotations_are() -> None:
    named = {
        "properties": {
            "description": {"type": "integer", "title": "t"},
            "default": {"type": "integer"},
        }
    }
    assert forced(named, '{"description": 1, "default": 2}', strict=True)
    assert not forced(named, '{"description": "x"}', strict=True)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def test_limits_of_grammars_hold() -> None:
    made = chosen("hermes")
    crowded: dict[str, Any] = {"properties": {f"p{index}": {} for index in range(MAX_PARTS)}}
    for parameters in (nested(MAX_LEVELS), nested(5000), {"enum": ["x" * 2**20]}, crowded):
        with pytest.raises(ValidationError, match="grammar is not valid"):
            made.grammar(
                [Tool("t", None, {"type": "object", **parameters}, strict=False)], REQUIRED
            )
    # Brackets in annotations do not count.
    wordy = Tool(
        "t",
        "(" * 300,
        {"type": "object", "properties": {"a": {"enum": ["{[(" * 300]}}},
        strict=False,
    )
    assert made.grammar([wordy], REQUIRED) is not None


def test_invalid_tools_are_refused() -> None:
    made = chosen("hermes")
    with pytest.raises(ToolError, match="Tool with name rain not found"):
        made.grammar(TOOLS, ToolChoice("named", "rain"))
    with pytest.raises(ToolError, match="the parameters of `t` have to describe an object"):
        made.grammar([Tool("t", None, {"type": "array"}, strict=False)], REQUIRED)
    with pytest.raises(ToolError, match="`tools` is empty"):
        made.grammar([], REQUIRED)


TOOL = Tool("f", None, {"type": "object", "properties": {}}, strict=False)
CHOICE_REQUIRED = ToolChoice("required")

BY_TEMPLATE = {
    "chatml": (sources.CHATML, "json"),
    "gemma-3": (sources.GEMMA_3, "json"),
    "llama-3.1": (sources.LLAMA_3_1, "llama"),
    "qwen-2.5": (sources.QWEN_2_5, "hermes"),
    "qwen-3": (sources.QWEN_3, "hermes"),
    "hermes-3": (sources.HERMES_3_TOOL_USE, "hermes"),
    "mistral-v3": (sources.MISTRAL_V3, "mistral"),
    "mistral-v13": (sources.MISTRAL_V13, "mistral"),
    "a tag alone": ("{{ '<|python_tag|>' }}", "llama"),
    "no template": (None, "json"),
    "deepseek-v3": (
        "<｜tool▁calls▁begin｜>{{ tool['type'] }}<｜tool▁sep｜>\n```json",
        "deepseek_v3",
    ),
    "deepseek-v3.1": ("<｜tool▁calls▁begin｜>{{ tool['function']['name'] }}", "deepseek_v31"),
    "kimi-k2": ("<|tool_calls_section_begin|><|tool_call_begin|>", "kimi_k2"),
    "minimax-m2": ("<minimax:tool_call>\n<invoke name=", "minimax_m2"),
    "minimax-m1": (
        "'tool' or role == 'ipython' <tool_calls>\n{\"name\": <tool-name>, \"arguments\": <args-json-object>}",
        "minimax",
    ),
    "minimax-m3, not known": (
        "{% set ns = ']<]minimax[>[' %} ns ~ '<tool_call>' <invoke name=",
        "json",
    ),
    "command-r7b": ("<|START_ACTION|>[ <tool_call>", "cohere_command3"),
    "command-r-plus": ("'Action:```json' {\"tool_name\": ", "json"),
    "phi-4-mini": ("'<|tool|>' + message['tools'] + '<|/tool|>'", "phi4_mini_json"),
    "phi-4-mini, vLLM's": ("functools[{", "phi4_mini_json"),
    "llama-4, vLLM's": ("Use exact format: [func_name1(param1=value1)]", "pythonic"),
    "olmo-3": ("<function_calls>\nf(a='b')\n</function_calls>", "olmo3"),
    "lfm2": ("List of tools: <|tool_list_start|>[", "lfm2"),
    "lfm2.5": ("List of tools: [", "lfm2"),
    "gemma-4": ("'<|tool_call>call:' + name", "gemma4"),
    "functiongemma": ("<start_function_call>call:", "functiongemma"),
    "seed-oss": ("<seed:tool_call>\n<function=f>\n<parameter=a>", "seed_oss"),
    "nemotron-nano-2": ("<TOOLCALL>[", "nemotron_json"),
    **{name: (published.template(name), made) for name, made in published.FORMATS.items()},
}


@pytest.mark.parametrize(("template", "expected"), BY_TEMPLATE.values(), ids=BY_TEMPLATE)
def test_the_template_selects_the_format(template: str | None, expected: str) -> None:
    assert format_of(template).name == expected


@pytest.mark.parametrize("asked", NAMES)
def test_the_flag_selects_the_format(asked: str) -> None:
    assert format_of(sources.QWEN_3, asked).name == ALIASES.get(asked, asked)


def test_the_flag_has_every_name() -> None:
    flag = RouterConfig.model_fields["tool_call_parser"].annotation
    assert get_args(flag) == ("auto", *sorted(NAMES))


def test_glm_s_two_forms_are_distinguished() -> None:
    for name in ("glm_4_6", "glm_4_7"):
        grammar = format_of(published.template(name)).grammar([TOOL], CHOICE_REQUIRED)
        assert grammar is not None
        assert (r'"f" "\n"' in grammar.source) == (name == "glm_4_6")


def source_of(template: str | None, special_ids: dict[str, int]) -> str:
    grammar = format_of(template, "mistral", special_ids=special_ids).grammar(
        [TOOL], CHOICE_REQUIRED
    )
    assert grammar is not None
    return grammar.source


def test_mistral_s_two_formats_are_distinguished() -> None:
    both = {"[TOOL_CALLS]": 9, "[ARGS]": 32}
    assert "name" in source_of(sources.MISTRAL_V3, both)
    assert "name" not in source_of(sources.MISTRAL_V13, {})
    assert "<[32]>" in source_of(None, both)
    assert "name" in source_of(None, {"[TOOL_CALLS]": 9})


def test_special_tokens_come_from_the_tokenizer() -> None:
    rust = byte_level()
    rust.add_special_tokens(["[TOOL_CALLS]", "[UNUSED]"])
    rust.add_tokens(["[ARGS]"])
    tokenizer = Tokenizer(rust)
    made = format_of(sources.MISTRAL_V13, special_ids=tokenizer.special_ids)
    assert made.markers == {"[TOOL_CALLS]"}
    grammar = made.grammar([TOOL], CHOICE_REQUIRED)
    assert grammar is not None
    assert f"<[{rust.token_to_id('[TOOL_CALLS]')}]>" in grammar.source
    assert "ARGS" in grammar.source
    tokenizer.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_asks_for_the_form_that_is_read(name: str) -> None:
    made = format_of(None, name)
    if made.tool_prompt == DEFAULT_TOOL_PROMPT:
        assert name not in {"deepseek_v3", "deepseek_v31", "phi4_mini_json"}
        return
    asked = made.tool_prompt.partition("JSON object:\n")[2].rpartition("\nOtherwise")[0]
    written = asked.replace("function name", '"f"' if "{" in asked else "f")
    answer = read(
        made.parser([TOOL], ToolChoice("auto")), [re.sub(r"\barguments(?!\")", "{}", written)]
    )
    assert [name for name, _ in answer.calls] == ["f"]
