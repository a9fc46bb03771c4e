"""Every format: what a model writes is what the client gets, however it is cut, and a grammar's texts are calls."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable
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
from millrace_testing.text.written_calls import TEMPLATES, WRITERS

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
    parser = call_format.parser(TOOLS, choice)
    text = ""
    calls: list[tuple[str, str]] = []
    ids: list[str] = []
    for parsed in [*(parser.push(piece) for piece in pieces), parser.finish(), parser.finish()]:
        text += parsed.text
        for delta in parsed.calls:
            if delta.id is not None:
                assert delta.name is not None
                assert delta.index == len(calls)
                calls.append((delta.name, ""))
                ids.append(delta.id)
            assert delta.index == len(calls) - 1
            calls[-1] = calls[-1][0], calls[-1][1] + delta.arguments
    assert len(set(ids)) == len(ids)
    return text, calls


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
        "note": st.none() | WORDS.filter(lambda text: text != "null"),
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


BROKEN = {
    "an unknown word": ("pythonic", "[weather(city=Paris)]", "Paris)]", '{"city": '),
    "no value": ("pythonic", "[weather(city='a', oops)]", "oops)]", '{"city": "a"'),
    "a sum": ("lfm2", "<|tool_call_start|>[weather(days=1 + days)]", "+ days)]", '{"days": 1'),
    "a key without its end": ("glm45", "<tool_call>weather\n<arg_key>ci ty", "", '{"ci ty'),
    "a key without a value": ("glm45", "<tool_call>weather\n<arg_key>city</arg_key>Rome", "Rome", '{"city"'),
    "a second key": ("minimax_m2",
        '<minimax:tool_call><invoke name="weather"><parameter name="city">Rome</parameter><parameter name="da',
        "", '{"city": "Rome", "da'),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN.values(), ids=BROKEN)
def test_the_end_of_a_broken_call_is_kept(case: tuple[str, str, str, str]) -> None:
    name, text, said, arguments = case
    for pieces in ([text], text):
        assert read(made(name), pieces) == (said, [("weather", arguments)])


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
def test_whatever_a_grammar_allows_is_read_as_calls_that_match(
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
def test_a_grammar_allows_what_models_write(name: str, special: bool) -> None:
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
def test_invalid_schemas_are_refused_by_formats_that_read_them(
    name: str, schema: dict[str, Any]
) -> None:
    """Formats of JSON leave the schema to the shards."""
    for strict in (False, True):
        tool = Tool("f", None, {"type": "object", "properties": {"a": schema}}, strict=strict)
        if isinstance(made(name), XmlFormat | ExpressionFormat):
            with pytest.raises(ToolError, match="in the parameters"):
                made(name).grammar([tool], REQUIRED)
        else:
            made(name).grammar([tool], REQUIRED)


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 3000 + "]" * 3000, "-1", "truly"])
def test_no_text_of_a_model_is_too_much_for_a_value_without_type(value: str) -> None:
    tool = Tool("f", None, {"type": "object", "properties": {"a": {}}}, strict=False)
    parser = made("qwen3_coder").parser([tool], AUTO)
    text = WRITERS["qwen3_coder"]([("f", {"a": value})])
    parser.push(text)
    parser.finish()
