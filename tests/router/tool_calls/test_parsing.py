"""Calls in streamed text, in each format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millrace_router.tool_calls.formats.registry import format_of
from millrace_router.tool_calls.parsing.json_mender import JsonMender
from millrace_router.tool_calls.tool import Tool, ToolChoice
from millrace_testing.text.written_calls import Answer
from millrace_testing.text.written_calls import read as read_calls

ANYTHING: dict[str, Any] = {"type": "object"}
TOOLS = [Tool(name, None, ANYTHING, strict=False) for name in ("weather", "time", "naïve")]
AUTO = ToolChoice("auto")
PARIS = '{"city": "Paris"}'
FORMATS = ["hermes", "llama", "mistral", "json"]
SPECIAL = {"[TOOL_CALLS]": 5, "[ARGS]": 6, "[CALL_ID]": 7, "<|python_tag|>": 8}

Call = tuple[str, str]


def read(
    name: str,
    pieces: Iterable[str],
    *,
    choice: ToolChoice = AUTO,
    special: bool = True,
) -> Answer:
    written = format_of(None, name, special_ids=SPECIAL if special else {})
    return read_calls(written.parser(TOOLS, choice), pieces)


def hermes(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


WEATHER = '{"name": "weather", "arguments": {"city": "Paris"}}'
TIME = '{"name": "time", "arguments": {}}'
LLAMA = '{"name": "weather", "parameters": {"city": "Paris"}}'
BOTH = [("weather", PARIS), ("time", "{}")]

CASES: dict[str, tuple[str, str, str, list[Call]]] = {
    "hermes": ("hermes", hermes(WEATHER), "", BOTH[:1]),
    "hermes, several": ("hermes", hermes(WEATHER) + "\n" + hermes(TIME), "", BOTH),
    "hermes, several in one tag": ("hermes", hermes(f"{WEATHER}\n{TIME}"), "", BOTH),
    "hermes, a list in one tag": ("hermes", hermes(f"[{WEATHER}, {TIME}]"), "", BOTH),
    "hermes, text before": ("hermes", f"I look. \n\n{hermes(WEATHER)}", "I look.", BOTH[:1]),
    "hermes, text after": ("hermes", f"{hermes(WEATHER)}\nSo.", "\nSo.", BOTH[:1]),
    "hermes, text between": ("hermes", f"{hermes(WEATHER)}\nSo {hermes(TIME)}\n", "\nSo", BOTH),
    "hermes, thoughts": ("hermes", f"<think>\nHm\n</think>\n\n{hermes(WEATHER)}", "<think>\nHm\n</think>", BOTH[:1]),
    "hermes, no end tag": ("hermes", f"<tool_call>\n{WEATHER}", "", BOTH[:1]),
    "hermes, no end tag before another": ("hermes", f"<tool_call>\n{WEATHER}\n{hermes(TIME)}", "", BOTH),
    "hermes, last brace forgotten": ("hermes", hermes(WEATHER[:-1]), "", BOTH[:1]),
    "hermes, end tag as an argument": (
        "hermes",
        hermes('{"name": "weather", "arguments": {"city": "</tool_call>"}}'),
        "",
        [("weather", '{"city": "</tool_call>"}')],
    ),
    "hermes, arguments first": (
        "hermes", hermes('{"arguments": {"a": [1]}, "name": "time"}'), "", [("time", '{"a": [1]}')]
    ),
    "hermes, no arguments": ("hermes", hermes('{"name": "time"}'), "", [("time", "{}")]),
    "hermes, arguments of null": ("hermes", hermes('{"name": "time", "arguments": null}'), "", [("time", "{}")]),
    "hermes, arguments as text": (
        "hermes", hermes('{"name": "time", "arguments": "{\\"a\\": 1}"}'), "", [("time", '{"a": 1}')]
    ),
    "hermes, escaped name": ("hermes", hermes('{"name": "na\\u00efve", "arguments": {}}'), "", [("naïve", "{}")]),
    "hermes, more keys": (
        "hermes", hermes('{"id": 7, "name": "time", "arguments": {}, "why": ["x"]}'), "", [("time", "{}")]
    ),
    "hermes, blanks kept in arguments": (
        "hermes", hermes('{"name":"time","arguments":{\n "a" :1 }\n}'), "", [("time", '{\n "a" :1 }')]
    ),
    "hermes, unknown name": (
        "hermes", hermes('{"name": "rain", "arguments": {}}'), hermes('{"name": "rain", "arguments": {}}'), []
    ),
    "hermes, arguments are a list": (
        "hermes", hermes('{"name": "time", "arguments": [1]}'), hermes('{"name": "time", "arguments": [1]}'), []
    ),
    "hermes, text in the tag": ("hermes", "<tool_call>\nI would call", "<tool_call>\nI would call", []),
    "hermes, tag twice": ("hermes", f"<tool_call>{hermes(WEATHER)}", "<tool_call>", BOTH[:1]),
    "hermes, broken in the arguments": (
        "hermes", hermes('{"name": "time", "arguments": {"a": oops}}'), "oops}}\n</tool_call>", [("time", '{"a": ')]
    ),
    "hermes, broken, then right": (
        "hermes", hermes('{"name": "time", "arguments": {"a": oops}}') + hermes(TIME),
        "oops}}\n</tool_call>", [("time", '{"a": '), ("time", "{}")],
    ),
    "hermes, cut in the arguments": ("hermes", hermes(WEATHER)[:57], "", [("weather", '{"city": "Pa')]),
    "hermes, cut in the name": ("hermes", '<tool_call>\n{"name": "wea', '<tool_call>\n{"name": "wea', []),
    "hermes, cut in the end tag": ("hermes", hermes(WEATHER)[:-4], "", BOTH[:1]),
    "hermes, cut in the tag": ("hermes", "so <tool_c", "so <tool_c", []),
    "hermes, no call": ("hermes", "a < b, <tool>, {\"name\": \"time\"}\n", "a < b, <tool>, {\"name\": \"time\"}\n", []),
    "llama": ("llama", LLAMA, "", BOTH[:1]),
    "llama, tagged": ("llama", f"<|python_tag|>{LLAMA}", "", BOTH[:1]),
    "llama, arguments by the other name": ("llama", WEATHER, "", BOTH[:1]),
    "llama, type first": ("llama", '{"type": "function", "name": "time", "parameters": {}}', "", [("time", "{}")]),
    "llama, semicolons": ("llama", f"{LLAMA}; {TIME}", "", BOTH),
    "llama, lines": ("llama", f"\n\n{LLAMA}\n{TIME}\n", "", BOTH),
    "llama, a tag each": ("llama", f"<|python_tag|>{LLAMA}<|python_tag|>{TIME}", "", BOTH),
    "llama, tag after text": ("llama", f"Well.\n<|python_tag|>{LLAMA}", "Well.", BOTH[:1]),
    "llama, python after the tag": ("llama", '<|python_tag|>print("x")', 'print("x")', []),
    "llama, other JSON": ("llama", '{"city": "Paris", "name": "time"}', '{"city": "Paris", "name": "time"}', []),
    "llama, JSON with a name": ("llama", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    "llama, as Python": ("llama", "{'name': 'weather', 'parameters': {'city': 'Paris'}}", "", BOTH[:1]),
    "llama, as Python without arguments": ("llama", "{'name': 'time', 'parameters': None}", "", [("time", "{}")]),
    "llama, a list": ("llama", "[1, 2]", "[1, 2]", []),
    "llama, JSON after text": ("llama", f"So: {LLAMA}", f"So: {LLAMA}", []),
    "llama, on its own line": ("llama", f"So:\n\n{LLAMA}\nDone.", "So:\nDone.", BOTH[:1]),
    "llama, other JSON on a line": ("llama", 'So:\n{"x": 1}\n', 'So:\n{"x": 1}\n', []),
    "llama, other JSON after a call": ("llama", f'{LLAMA}; {{"x": 1}}', '; {"x": 1}', BOTH[:1]),
    "llama, nothing": ("llama", " \n", " \n", []),
    "mistral": ("mistral", f"[TOOL_CALLS][{WEATHER}]", "", BOTH[:1]),
    "mistral, several": ("mistral", f"[TOOL_CALLS] [{WEATHER}, {TIME}]", "", BOTH),
    "mistral, ids": (
        "mistral", '[TOOL_CALLS] [{"name": "time", "arguments": {}, "id": "abcdefghi"}]', "", [("time", "{}")]
    ),
    "mistral, no list": ("mistral", f"[TOOL_CALLS]{WEATHER}", "", BOTH[:1]),
    "mistral, text before": ("mistral", f"Yes [TOOL_CALLS][{WEATHER}]", "Yes", BOTH[:1]),
    "mistral, an empty list": ("mistral", "[TOOL_CALLS][]", "[]", []),
    "mistral, half a list": ("mistral", f"[TOOL_CALLS][{WEATHER}, ", "", BOTH[:1]),
    "mistral, newer": ("mistral", f"[TOOL_CALLS]weather[ARGS]{PARIS}", "", BOTH[:1]),
    "mistral, newer, several": ("mistral", f"[TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]time[ARGS]{{}}", "", BOTH),
    "mistral, newer, ids": ("mistral", f"[TOOL_CALLS]weather[CALL_ID]abc123XYZ[ARGS]{PARIS}", "", BOTH[:1]),
    "mistral, newer, without marker": ("mistral", f"[TOOL_CALLS]weather{PARIS}", "", BOTH[:1]),
    "mistral, newer, blanks": ("mistral", f"[TOOL_CALLS] weather[ARGS] {PARIS}", "", BOTH[:1]),
    "mistral, newer, unknown name": ("mistral", "[TOOL_CALLS]rain[ARGS]{}", "rain{}", []),
    "mistral, newer, no arguments": ("mistral", "[TOOL_CALLS]time, please", "time, please", []),
    "mistral, newer, markers without a call": ("mistral", "[TOOL_CALLS][ARGS]{}", "{}", []),
    "mistral, two openers": ("mistral", f"[TOOL_CALLS][TOOL_CALLS]time[ARGS]{PARIS}", "", [("time", PARIS)]),
    "mistral, a marker in a list": ("mistral", "[TOOL_CALLS] [[CALL_ID]a]", " [a]", []),
    "mistral, newer, cut": ("mistral", "[TOOL_CALLS]time[ARGS]", "time", []),
    "json": ("json", LLAMA, "", BOTH[:1]),
    "json, a list": ("json", f"[{LLAMA},\n{TIME}]", "", BOTH),
    "json, fenced": ("json", f"Sure:\n```json\n{LLAMA}\n```\n", "Sure:", BOTH[:1]),
    "json, a fenced list": ("json", f"```\n[{LLAMA}, {TIME}]\n```", "", BOTH),
    "json, fenced code": ("json", "```json\n{\"a\": 1}\n```\n", "```json\n{\"a\": 1}\n```\n", []),
    "json, on its own line": ("json", f"Sure:\n[{LLAMA}]\n", "Sure:", BOTH[:1]),
    "json, text": ("json", "No tool is needed.", "No tool is needed.", []),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_calls_are_distinguished_from_text(case: tuple[str, str, str, list[Call]]) -> None:
    name, text, expected_text, expected_calls = case
    whole = read(name, [text])
    assert (whole.text, whole.calls) == (expected_text, expected_calls)
    by_character = read(name, text)
    assert (by_character.text, by_character.calls) == (expected_text, expected_calls)


FRAGMENTS = [
    *{part for _, text, _, _ in CASES.values() for part in re.findall(r"\w+|\W", text) if len(part) > 3},
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "```json\n", "```",
    WEATHER, LLAMA, TIME, PARIS, '{"name": "time", ', '"arguments": ', '"parameters": ', "{}", "weather", "rain",
    "{", "}", "[", "]", ",", ";", " ", "\n", "text", '"', " " * 200, "\n" * 60,
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(sorted(FRAGMENTS)), max_size=9).map("".join) | st.sampled_from(
    [text for _, text, _, _ in CASES.values()]
)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), text=TEXTS, special=st.booleans())
def test_any_pieces_give_the_same(name: str, data: st.DataObject, text: str, special: bool) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    one, other = read(name, [text], special=special), read(name, pieces, special=special)
    assert (one.text, one.calls) == (other.text, other.calls)
    other = read(name, text, special=special)
    assert (one.text, one.calls) == (other.text, other.calls)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40, deadline=None)
@given(text=TEXTS)
@example(text='<tool_call>{"name": "time", "arguments": "{\\"\\ud800\\": 1}"}')
def test_parsers_invent_no_text_and_no_tools(name: str, text: str) -> None:
    """Returned text is a subsequence of the answer, and complete arguments are an object."""
    answer = read(name, [text], special=False)
    left = iter(text)
    assert all(char in left for char in answer.text)
    for called, arguments in answer.calls:
        assert called in {tool.name for tool in TOOLS}
        assert arguments.startswith("{")


ARGUMENTS = st.dictionaries(
    st.text(max_size=4),
    st.text(max_size=8) | st.integers() | st.lists(st.booleans(), max_size=2),
    max_size=3,
)
NAMES = st.sampled_from([tool.name for tool in TOOLS])
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3)


def written(name: str, calls: Sequence[tuple[str, str]]) -> str:
    """The call in the format's form."""
    key = "parameters" if name in {"llama", "json"} else "arguments"
    objects = [
        f'{{"name": {json.dumps(called)}, "{key}": {arguments}}}' for called, arguments in calls
    ]
    return {
        "hermes": "\n".join(map(hermes, objects)),
        "llama": "; ".join(objects),
        "mistral": f"[TOOL_CALLS] [{', '.join(objects)}]",
        "named": "".join(f"[TOOL_CALLS]{called}[ARGS]{arguments}" for called, arguments in calls),
        "json": f"[{', '.join(objects)}]" if len(objects) > 1 else objects[0],
    }[name]


@pytest.mark.parametrize("name", [*FORMATS, "named"])
@settings(max_examples=25, deadline=None)
@given(calls=CALLS, indent=st.sampled_from([None, 2]))
def test_clients_get_the_models_calls(
    name: str, calls: list[tuple[str, dict[str, Any]]], indent: int | None
) -> None:
    texts = [(called, json.dumps(arguments, indent=indent)) for called, arguments in calls]
    answer = read("mistral" if name == "named" else name, written(name, texts))
    assert (answer.text, answer.calls) == ("", texts)


@pytest.mark.parametrize("name", [*FORMATS, "named"])
def test_arguments_are_passed_on_as_they_come(name: str) -> None:
    text = written(name, [("weather", '{"city": "Paris", "days": 12}')])
    parser = format_of(None, "mistral" if name == "named" else name).parser(TOOLS, AUTO)
    so_far, num_missing = "", []
    for position, char in enumerate(text):
        so_far += "".join(delta.arguments for delta in parser.push(char).calls)
        inside = text[: position + 1].partition('{"city')
        if inside[1]:
            # A comma and the blank behind it wait for what follows.
            expected = re.sub(r", ?\Z", "", f"{inside[1]}{inside[2]}")
            num_missing.append(len(expected) - len(so_far))
    assert so_far == '{"city": "Paris", "days": 12}'
    closing = text.partition("12}")[2]
    assert num_missing == [0] * (len(num_missing) - len(closing)) + [*range(1, len(closing) + 1)]


@pytest.mark.parametrize(
    ("name", "marker"),
    [
        ("hermes", "<tool_call>"),
        ("llama", "<|python_tag|>"),
        ("mistral", "[TOOL_CALLS]"),
        ("json", "```json\n"),
    ],
)
def test_no_part_of_a_marker_is_text(name: str, marker: str) -> None:
    parser = format_of(None, name).parser(TOOLS, AUTO)
    assert parser.push("Look").text == "Look"
    for char in marker:
        assert parser.push(char).text == ""
    assert parser.push(WEATHER).calls[0].name == "weather"


def test_text_is_held_no_longer_than_it_may_begin_a_call() -> None:
    parser = format_of(None, "hermes").parser(TOOLS, AUTO)
    assert [parser.push(piece).text for piece in ("a", " <", "t", "x", " ", "b")] == [
        "a",
        "",
        "",
        " <tx",
        "",
        " b",
    ]
    parser = format_of(None, "llama").parser(TOOLS, AUTO)
    assert [parser.push(piece).text for piece in (" {", '"ci', 'ty"', ": 1")] == [
        "",
        "",
        ' {"city"',
        ": 1",
    ]


def test_special_tokens_are_no_text() -> None:
    shown = format_of(None, "mistral", special_ids=SPECIAL)
    assert shown.markers == {"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"}
    assert read("mistral", "a[ARGS]b [TOOL_CALLS]c").text == "ab c"
    assert read("mistral", "a[ARGS]b [TOOL_CALLS]c", special=False).text == "a[ARGS]b [TOOL_CALLS]c"
    assert format_of(None, "hermes", special_ids=SPECIAL).markers == frozenset()


@pytest.mark.parametrize(
    "choice", [ToolChoice("auto", parallel=False), ToolChoice("named", "weather")], ids=str
)
def test_calls_after_the_only_one_are_dropped(choice: ToolChoice) -> None:
    text = f"{hermes(WEATHER)}\n{hermes(WEATHER)}"
    answer = read("hermes", text, choice=choice)
    assert (answer.text, answer.calls) == ("", BOTH[:1])


@pytest.mark.parametrize(
    ("name", "pattern"),
    [("hermes", "call_[0-9a-f]{24}"), ("mistral", "[A-Za-z0-9]{9}")],
)
def test_ids_are_unique_and_as_the_model_s_template_wants_them(name: str, pattern: str) -> None:
    text = written(name, [("time", "{}")] * 3)
    ids = {id_ for _ in range(20) for id_ in read(name, [text]).ids}
    assert len(ids) == 60
    assert all(re.fullmatch(pattern, id_) for id_ in ids)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
NEARLY_JSON = st.text('{}[]",:0123.eE+-\\u/btrfalsn \n\t', max_size=14)


def mend(pieces: Iterable[str]) -> tuple[int | None, bool, str]:
    """The number of characters of the value if it ends, whether it is invalid, and its JSON."""
    mender, num_taken, value = JsonMender(), 0, ""
    for piece in pieces:
        stop, given = mender.push(piece)
        num_taken += stop
        value += given
        if mender.ended or mender.failed:
            break
    return num_taken if mender.ended else None, mender.failed, value


def refuse(name: str) -> None:
    raise ValueError(name)


def end_of(text: str) -> int | None:
    """The standard library's result."""
    try:
        return json.JSONDecoder(parse_constant=refuse).raw_decode(text)[1]
    except ValueError:
        return None


@settings(max_examples=60, deadline=None)
@given(
    VALUES,
    st.sampled_from([None, 1]),
    st.booleans(),
    st.sampled_from([" x", "}", "]", ",1", ":", '"']),
)
def test_a_value_ends_where_it_ends_and_stays_as_it_is(
    value: object, indent: int | None, ascii_only: bool, behind: str
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert mend([text + behind]) == (len(text), False, text)
    assert mend(text + behind) == (len(text), False, text)


@given(st.sampled_from('{["'), NEARLY_JSON)
@example("[", "01]")
@example("[", "1.]")
@example("[", "-]")
@example("[", "1e+]")
@example("[", ",1]")
@example("{", "}x")
@example("{", '"a" : [ ] , "b":{"c" : -0.5E+3}} {')
@example("[", "truefalse]")
@example('"', '\\u00e9\\n"')
def test_what_is_json_by_the_standard_is_read_and_all_that_ends_is_json(
    first: str, rest: str
) -> None:
    text = first + rest
    end, has_failed, value = mend(text)
    assert (end, has_failed, value) == mend([text])
    standard = end_of(text)
    if standard is not None:
        assert (end, value) == (standard, text[:standard])
    if end is not None:
        json.loads(value)
    else:
        with pytest.raises(json.JSONDecodeError):
            json.loads(value)


MENDED = {
    "a raw newline and a tab": ('{"a": "x\n\ty"}', '{"a": "x\\n\\ty"}'),
    "another control character": ('"\x00\x1b"', '"\\u0000\\u001b"'),
    "an unknown escape": (r'{"a": "\d+\.x \u12 C:\win"}', r'{"a": "\\d+\\.x \\u12 C:\\win"}'),
    "an escaped apostrophe": (r'"it\'s"', '"it\'s"'),
    "a continued line": ('"a\\\nb"', r'"a\\\nb"'),
    "Python's words": ('[True, False, None, {"a": None}]', '[true, false, null, {"a": null}]'),
    "single quotes": ("""{'a': 'say "x"'}""", r'{"a": "say \"x\""}'),
    "commas before brackets": ('{"a": [1, 2, ], }', '{"a": [1, 2 ] }'),
    "half characters": (r'"\ud83d \ude00 \ud83d\u0041 \ud83d\n"', r'"\ufffd \ufffd \ufffd\u0041 \ufffd\n"'),
    "a whole character": (r'"\ud83d\ude00"', r'"\ud83d\ude00"'),
}  # fmt: skip


@pytest.mark.parametrize("case", MENDED.values(), ids=MENDED)
def test_what_models_write_beside_the_standard_is_mended(case: tuple[str, str]) -> None:
    text, expected = case
    assert mend([text]) == mend(text) == (len(text), False, expected)
    json.loads(expected)


@pytest.mark.parametrize(
    "text", ['{"a": NaN}', "[Infinity]", "{a: 1}", "[nul]", "[+1]", "nope", "]", "[" * 200, "[1 2]"]
)
def test_other_spellings_are_not_json(text: str) -> None:
    assert mend([text])[:2] == (None, True)


@settings(max_examples=40, deadline=None)
@given(VALUES)
def test_a_beginning_is_neither_ended_nor_wrong(value: object) -> None:
    text = json.dumps([value])
    for stop in range(1, len(text)):
        assert mend([text[:stop]])[:2] == (None, False)
