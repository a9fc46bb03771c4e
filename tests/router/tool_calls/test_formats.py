"""Every format: what a model writes is what the client gets, however it is cut, and a grammar's texts are calls."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_router.errors import ToolError
from millrace_router.request.request import GrammarKind
from millrace_router.tool_calls.formats.registry import ALIASES, FORMATS, format_of
from millrace_router.tool_calls.parsing.call_format import CallFormat
from millrace_router.tool_calls.parsing.expression_format import ExpressionFormat
from millrace_router.tool_calls.parsing.xml_format import XmlFormat
from millrace_router.tool_calls.tool import Tool, ToolChoice
from millrace_shard.structured_output.grammar_source import lark_of
from millrace_shard.structured_output.matcher import Matcher
from millrace_shard.structured_output.vocabulary import Vocabulary
from millrace_testing.engines.grammars import lark, mask_of
from millrace_testing.text.written_calls import TEMPLATES, WRITERS, Answer
from millrace_testing.text.written_calls import read as read_calls

WEATHER = Tool(
    "weather",
    None,
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"enum": ["C", "F"]},
            "days": {"type": "integer", "minimum": 0, "maximum": 99},
            "sure": {"type": "boolean"},
            "note": {"type": ["string", "null"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
            "near": {
                "type": "object",
                "properties": {"x": {"type": "number"}, "y": {"$ref": "#/$defs/y"}},
                "required": ["x"],
            },
        },
        "required": ["city"],
        "$defs": {"y": {"type": "boolean"}},
    },
    strict=True,
)
NOW = Tool("get-now_2", None, {"type": "object", "properties": {}}, strict=False)
TOOLS = [WEATHER, NOW]
LOOSE = [replace(WEATHER, strict=False), NOW]
AUTO, REQUIRED, NAMED = ToolChoice("auto"), ToolChoice("required"), ToolChoice("named", "weather")
CHOICES = [AUTO, REQUIRED, NAMED, ToolChoice("auto", parallel=False)]
EOS = 0
MARKERS = sorted({token for made in FORMATS.values() for token in made.tokens})
SPECIAL = {text: index for index, text in enumerate(MARKERS, start=1)}
PIECES = sorted({
    *("</parameter>", "\n</parameter>\n", "</arg_value>", "</function>", "<function=", '", "', "city", "weather", "{}"),
    *(marker[: len(marker) // 2] for marker in MARKERS), *MARKERS,
})  # fmt: skip
TOKENS = [
    b"</s>",
    *(text.encode() for text in MARKERS),
    *(bytes([byte]) for byte in range(256)),
    *(piece.encode() for piece in PIECES),
]
VOCABULARY = Vocabulary.of(TOKENS, special=range(len(SPECIAL) + 1), eos_token_ids=[EOS])
each_format = pytest.mark.parametrize("name", WRITERS)


def made(name: str, *, special: bool = True) -> CallFormat:
    return format_of(
        TEMPLATES.get(name), ALIASES.get(name, name), special_ids=SPECIAL if special else {}
    )


def read(
    call_format: CallFormat, pieces: Iterable[str], choice: ToolChoice = AUTO
) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls of an answer."""
    answer = read_calls(call_format.parser(TOOLS, choice), pieces)
    return answer.text, answer.calls


def test_every_format_is_tested() -> None:
    assert set(FORMATS) == WRITERS.keys() - {"glm47"}


WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["null", "5", "{}", 'a "b"\n', "it's", "\n x\n", "</", "\\n", "<parameter", "é😀", "[1, 2]"]
)
ARGUMENTS = st.fixed_dictionaries(
    {"city": WORDS},
    optional={
        "unit": st.sampled_from("CF"),
        "days": st.integers(0, 99),
        "sure": st.booleans(),
        # Models that write texts without quotes write these words where there is none.
        "note": st.none() | WORDS.filter(lambda text: text not in {"null", "None"}),
        "tags": st.lists(WORDS, max_size=2),
        "near": st.fixed_dictionaries({"x": st.floats(-9, 9)}, optional={"y": st.booleans()}),
    },
)
CALLS = st.lists(
    st.tuples(st.just(WEATHER.name), ARGUMENTS) | st.just((NOW.name, {})), min_size=1, max_size=3
)


@each_format
@settings(max_examples=20, deadline=None)
@given(
    calls=CALLS,
    special=st.booleans(),
    said=st.sampled_from(["", "Let me see. ", "é < b\n\n"]),
    data=st.data(),
)
def test_clients_get_the_models_calls(
    name: str, calls: list[Any], special: bool, said: str, data: st.DataObject
) -> None:
    if name in {"llama", "json", "pythonic"}:
        said = ""
    call_format = made(name, special=special)
    text = said + WRITERS[name](calls)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for parts in ([text], pieces, text):
        got, called = read(call_format, parts)
        assert got == said.rstrip()
        assert [(one, json.loads(arguments)) for one, arguments in called] == calls


FRAGMENTS = sorted({
    *MARKERS, *PIECES, *(opener for one in FORMATS.values() for opener in one.syntax.openers),
    *("functions.weather:0", "function", "weather", "get-now_2", "rain", "\n", " ", "text", '{"', '"', ":", "=", "("),
    *("<tool_call>\n<function=weather>\n<parameter=city>\n", "<tool_call>weather\n<arg_key>days</arg_key>"),
    *("assistant", "commentary", " to=functions.", "json", "```json\n", "```", "1", "5.", "None", "null", "True", ","),
    *('"name": "weather", "arguments": {', "}", "]", "[", "city='", "'", "\\", "\\u12", "call:weather{", "😀"),
    *("[weather(", ")", " " * 300),
})  # fmt: skip
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)


@each_format
@settings(max_examples=50, deadline=None)
@given(text=TEXTS, cut=st.integers(0, 200), special=st.booleans())
def test_any_text_cut_anywhere_is_read_alike(name: str, text: str, cut: int, special: bool) -> None:
    call_format = made(name, special=special)
    whole = read(call_format, [text])
    assert read(call_format, text) == whole
    assert read(call_format, [text[:cut], text[cut:]]) == whole
    got, calls = whole
    left = iter(text)
    assert all(char in left for char in got), "returned text is a part of the answer"
    if not calls:
        markers = "|".join(map(re.escape, call_format.markers)) or r"(?!)"
        assert got == re.sub(markers, "", text)


@each_format
@settings(max_examples=15, deadline=None)
@given(calls=CALLS, length=st.integers(0, 400))
def test_a_cut_answer_begins_the_same_calls(name: str, calls: list[Any], length: int) -> None:
    call_format = made(name)
    text = WRITERS[name](calls)
    _, whole = read(call_format, [text])
    _, begun = read(call_format, [text[:length]])
    for (one, arguments), (other, expected) in zip(begun, whole, strict=False):
        assert one == other
        assert expected.startswith(arguments)


PARIS = ("weather", {"city": "Paris"})
OBJECT = json.dumps({"name": "weather", "arguments": {"city": "Paris"}})
NOW_OBJECT = json.dumps({"name": "get-now_2", "parameters": {}})
UNTAGGED = {
    "bare": OBJECT,
    "over lines": json.dumps(json.loads(OBJECT), indent=2),
    "a list of one": f"[{OBJECT}]",
    "a list": f"[{OBJECT}, {NOW_OBJECT}]",
    "in a fence": f"```json\n{OBJECT}\n```",
    "a list in a fence": f"\n```\n[\n{OBJECT},\n{NOW_OBJECT}\n]\n```\n",
    "in other tags": f"<tools>\n{OBJECT}\n</tools>",
}
BARE_FORMATS = {"llama", "json"}
"""Formats whose calls have no tags: they take several, and text around them."""
NO_CALLS = {
    "text behind": f"{OBJECT}\nSo.",
    "text before": f"So: {OBJECT}",
    "two": f"{OBJECT}\n{OBJECT}",
    "text behind a fence": f"```json\n{OBJECT}\n```\nSo.",
    "an unknown tool": OBJECT.replace("weather", "rain"),
    "an unknown tool in a list": f"[{OBJECT}, {OBJECT.replace('weather', 'rain')}]",
    "broken": OBJECT.replace('"Paris"', "Paris"),
    "cut": OBJECT[:-4],
    "a cut list": f"[{OBJECT}, {NOW_OBJECT[:-3]}",
}


@each_format
@pytest.mark.parametrize("text", UNTAGGED.values(), ids=UNTAGGED)
def test_an_answer_of_calls_without_tags_is_calls_in_every_format(name: str, text: str) -> None:
    expected = [PARIS, (NOW.name, {})] if "get-now_2" in text else [PARIS]
    for pieces in ([text], text):
        answer = read_calls(made(name).parser(LOOSE, AUTO), pieces)
        assert not answer.text.strip()
        assert [(one, json.loads(arguments)) for one, arguments in answer.calls] == expected
        assert answer.whole == set(range(len(expected)))


@pytest.mark.parametrize("name", sorted(WRITERS.keys() - BARE_FORMATS))
@pytest.mark.parametrize("text", NO_CALLS.values(), ids=NO_CALLS)
def test_another_answer_with_calls_without_tags_is_text(name: str, text: str) -> None:
    for pieces in ([text], text):
        assert read_calls(made(name).parser(LOOSE, AUTO), pieces) == Answer(text=text)


WRONG = st.sampled_from([*"\"'\\{}[](),:=<>|\n\t 0aT", ""])


@each_format
@settings(max_examples=60, deadline=None)
@given(calls=CALLS, place=st.floats(0, 1), wrong=WRONG, length=st.integers(0, 1))
def test_a_call_with_a_wrong_character_is_json_or_no_call(
    name: str, calls: list[Any], place: float, wrong: str, length: int
) -> None:
    call_format, text = made(name), WRITERS[name](calls)
    position = int(place * len(text))
    text = text[:position] + wrong + text[position + length :]
    whole = read_calls(call_format.parser(TOOLS, AUTO), [text])
    answer = read_calls(call_format.parser(TOOLS, AUTO), text)
    assert answer.calls == whole.calls
    for index, (_, arguments) in enumerate(answer.calls):
        if index in answer.whole:
            assert isinstance(json.loads(arguments), dict)
        else:
            with pytest.raises(json.JSONDecodeError):
                json.loads(arguments)
    if not answer.whole:
        markers = "|".join(map(re.escape, call_format.markers)) or r"(?!)"
        left = Counter("".join([whole.text, *whole.written]))
        assert left == Counter(re.sub(markers, "", text)), "nothing is lost"


BROKEN = {
    "an unknown word": ("pythonic", "[weather(city=Paris)]", "Paris)]", '{"city": '),
    "no value": ("pythonic", "[weather(city='a', oops)]", ", oops)]", '{"city": "a"'),
    "a sum": ("lfm2", "<|tool_call_start|>[weather(days=1 + days)]", " + days)]", '{"days": 1'),
    "a key without its end": ("glm45", "<tool_call>weather\n<arg_key>ci ty", "", ""),
    "a key without a value": ("glm45", "<tool_call>weather\n<arg_key>city</arg_key>Rome", "cityRome", ""),
    "a second key": ("minimax_m2",
        '<minimax:tool_call><invoke name="weather"><parameter name="city">Rome</parameter><parameter name="da',
        "", '{"city": "Rome"'),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN.values(), ids=BROKEN)
def test_the_end_of_a_broken_call_is_kept(case: tuple[str, str, str, str]) -> None:
    name, text, said, arguments = case
    for pieces in ([text], text):
        assert read(made(name), pieces) == (said, [("weather", arguments)])


VALUES = {
    "a list of Python": ("tags", "['a', \"b's\"]", ["a", "b's"]),
    "a tuple": ("tags", "('a', 'b',)", ["a", "b"]),
    "an object of Python": ("near", "{'x': 1, 'y': None}", {"x": 1, "y": None}),
    "a word of Python": ("sure", "True", True),
    "a word in capitals": ("sure", "FALSE", False),
    "a number with zeros": ("days", "007", 7),
    "no number": ("days", "some", "some"),
    "text like a list": ("city", "['a']", "['a']"),
    "text like a word": ("city", "True", "True"),
}


@pytest.mark.parametrize("case", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("name", ["qwen3_coder", "seed_oss", "glm45", "minimax_m2"])
def test_values_in_tags_are_read_by_their_schema(name: str, case: tuple[str, str, object]) -> None:
    key, value, expected = case
    _, calls = read(made(name), WRITERS[name]([("weather", {key: value})]))
    assert [json.loads(arguments) for _, arguments in calls] == [{key: expected}]


UNCLOSED = {
    "before the next": "<parameter=city>\nRome\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    "before the end": "<parameter=city>\nRome\n</parameter>\n<parameter=days>3\n</function>\n</tool_call>",
    "twice": "<parameter=city>Rome<parameter=days>3</function></tool_call>",
    "no end of the function": "<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n</tool_call>",
}


@pytest.mark.parametrize("text", UNCLOSED.values(), ids=UNCLOSED)
def test_a_value_without_its_end_does_not_take_the_next(text: str) -> None:
    tools = [replace(WEATHER, strict=False), NOW]
    for pieces in ([f"<function=weather>\n{text}"], f"<function=weather>\n{text}"):
        answer = read_calls(made("qwen3_coder").parser(tools, AUTO), pieces)
        assert (answer.text, answer.whole) == ("", {0})
        assert json.loads(answer.calls[0][1]) == {"city": "Rome", "days": 3}


@pytest.mark.parametrize("value", ["<parameter=other>", "</function>\nmore", "<parameter"])
def test_a_closed_value_may_contain_tags(value: str) -> None:
    tools = [replace(WEATHER, strict=False), NOW]
    text = WRITERS["qwen3_coder"]([("weather", {"city": value})])
    answer = read_calls(made("qwen3_coder").parser(tools, AUTO), text)
    assert json.loads(answer.calls[0][1]) == {"city": value}


QUOTED = {
    "an array": ('tags:["a"]', {"tags": ["a"]}),
    "an object": ("near:{\"x\": 1, 'y':True}", {"near": {"x": 1, "y": True}}),
    "another sign": ('city="Rome"', {"city": "Rome"}),
    "a quoted key": ('"city": "Rome"', {"city": "Rome"}),
    "a trailing comma": ('city:<|"|>Rome<|"|>, days:3,', {"city": "Rome", "days": 3}),
}


@pytest.mark.parametrize("case", QUOTED.values(), ids=QUOTED)
def test_gemma_may_write_json_in_its_calls(case: tuple[str, object]) -> None:
    text, expected = case
    for pieces in ([text], text):
        got, calls = read(made("gemma4"), ["<|tool_call>call:weather{", *pieces, "}<tool_call|>"])
        assert got == ""
        assert [json.loads(arguments) for _, arguments in calls] == [expected]


@pytest.mark.parametrize(
    "name", [name for name in WRITERS if not isinstance(made(name), XmlFormat)]
)
def test_a_bracket_too_many_behind_a_call_is_not_text(name: str) -> None:
    text = WRITERS[name]([("weather", {"city": "Rome", "tags": []})])
    head, mark, tail = text.rpartition("}" if "}" in text else ")")
    for written in (f"{head}{mark}{mark}{tail}", f"{head}{mark}\n{mark}{tail}"):
        for pieces in ([written], written):
            got, calls = read(made(name), pieces)
            assert got == ""
            assert [json.loads(one) for _, one in calls] == [{"city": "Rome", "tags": []}]


def walk(matcher: Matcher, rng: random.Random, *, most: int) -> str | None:
    """The text of a random answer that the grammar allows; None if it does not end within `most` tokens."""
    text = b""
    for _ in range(most):
        allowed = list(mask_of(matcher))
        # A byte that is not ASCII might begin a character that no token ends.
        choices = [id_ for id_ in allowed if id_ <= len(SPECIAL) or TOKENS[id_].isascii()]
        choices = choices or allowed
        telling = [id_ for id_ in choices if id_ <= len(SPECIAL) or len(TOKENS[id_]) > 1]
        telling = telling or [id_ for id_ in choices if TOKENS[id_] in b"\"'}])<"]
        id_ = rng.choice(telling if telling and rng.random() < 0.6 else choices)
        assert matcher.consume(id_)
        if matcher.has_ended:
            return text.decode()
        text += TOKENS[id_]
    return None


@each_format
@pytest.mark.parametrize("special", [False, True], ids=["text", "special"])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_texts_that_a_grammar_allows_are_read_as_calls_that_match(
    name: str, special: bool, choice: ToolChoice
) -> None:
    call_format, rng = made(name, special=special), random.Random(f"{name}{special}{choice}")
    grammar = call_format.grammar(TOOLS, choice)
    assert grammar is not None
    assert grammar.kind == GrammarKind.LARK
    start, num_ended, num_called = Matcher.of(lark_of(lark(grammar.source)), VOCABULARY), 0, 0
    for _ in range(20):
        if num_ended == 5:
            break
        text = walk(start.copy(), rng, most=300)
        if text is None:
            continue
        num_ended += 1
        said, calls = read(call_format, [text], choice)
        num_called += len(calls)
        for called, arguments in calls:
            tool = next(tool for tool in TOOLS if tool.name == called)
            jsonschema.validate(json.loads(arguments), tool.parameters)
        if choice.is_forced:
            assert calls, text
            assert said == "", text
        assert len(calls) <= (1 if choice.is_single else 99)
        assert choice.name in {None, *(called for called, _ in calls)}
    assert num_ended
    assert num_called or not choice.is_forced


@each_format
@pytest.mark.parametrize("special", [False, True], ids=["text", "special"])
def test_a_grammar_allows_calls_as_models_write_them(name: str, special: bool) -> None:
    calls = [
        (
            "weather",
            {"city": "Rome", "unit": "C", "days": 3, "sure": True, "tags": ["a"], "near": {"x": 1, "y": False}},
        ),
        ("get-now_2", {}),
    ]  # fmt: skip
    if name == "openai":
        del calls[1]
    call_format = made(name, special=special)
    grammar = call_format.grammar(TOOLS, REQUIRED)
    assert grammar is not None
    matcher = Matcher.of(lark_of(lark(grammar.source)), VOCABULARY)
    # Keys, and strings with further keywords, are in double quotes.
    text = WRITERS[name](calls).replace("['a']", '["a"]').replace("{'x': 1, 'y'", '{"x": 1, "y"')
    ids: list[int] = []
    while text:
        marker = next((one for one in call_format.markers if text.startswith(one)), None)
        ids += (
            [SPECIAL[marker]] if marker else [1 + len(SPECIAL) + byte for byte in text[0].encode()]
        )
        text = text[len(marker or text[0]) :]
    for position, id_ in enumerate(ids):
        assert matcher.consume(id_), b"".join(TOKENS[one] for one in ids[: position + 1])
    assert matcher.inner.is_accepting()


@each_format
def test_slashes_and_line_ends_of_a_schema_stay_in_their_terminal(name: str) -> None:
    parameters = {
        "type": "object",
        "properties": {
            "path": {"type": "string", "pattern": r"^/a\/b$"},
            "a\n/b": {"type": "boolean"},
        },
        "required": ["path"],
        "additionalProperties": True,
    }
    grammar = made(name).grammar([Tool("open", None, parameters, strict=True)], REQUIRED)
    assert grammar is not None
    Matcher.of(lark_of(lark(grammar.source)), VOCABULARY)


MALFORMED = [
    {"type": "foo"},
    {"type": ["foo"]},
    {"type": [{}]},
    {"type": "array", "items": {}, "minItems": "2"},
    {"type": "string", "maxLength": "1})/ | /"},
    {"type": "string", "minLength": True},
    {"enum": 5},
    {"type": "object", "properties": {}, "required": [1, "a"]},
    {"type": "object", "properties": {}, "required": "a"},
]


@each_format
@pytest.mark.parametrize("schema", MALFORMED, ids=str)
def test_invalid_schemas_of_strict_tools_are_refused_by_formats_that_read_them(
    name: str, schema: dict[str, Any]
) -> None:
    """Formats of JSON leave the schema to the shards. Other tools go without what is wrong."""
    parameters = {"type": "object", "properties": {"a": schema}}
    tool, strict = (Tool("f", None, parameters, strict=strict) for strict in (False, True))
    assert made(name).grammar([tool], REQUIRED)
    if isinstance(made(name), XmlFormat | ExpressionFormat):
        with pytest.raises(ToolError, match="in the parameters"):
            made(name).grammar([strict], REQUIRED)
    else:
        made(name).grammar([strict], REQUIRED)


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 3000 + "]" * 3000, "-1", "truly"])
def test_no_text_of_a_model_is_too_much_for_a_value_without_type(value: str) -> None:
    tool = Tool("f", None, {"type": "object", "properties": {"a": {}}}, strict=False)
    parser = made("qwen3_coder").parser([tool], AUTO)
    text = WRITERS["qwen3_coder"]([("f", {"a": value})])
    parser.push(text)
    parser.finish()
