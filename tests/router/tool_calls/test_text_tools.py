"""The grammar of a text tool's input holds inside calls of every format, compiled as in shards; any input is read."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace_router.errors import ToolError
from millrace_router.request.request import Grammar, GrammarKind
from millrace_router.tool_calls.formats.registry import FORMATS, format_of
from millrace_router.tool_calls.parsing.lark_source import COMMON
from millrace_router.tool_calls.parsing.text_rule import plain_rule, quoted_rule
from millrace_router.tool_calls.text_tool import TextReader, text_tool
from millrace_router.tool_calls.tool import Tool, ToolChoice
from millrace_shard.structured_output.matcher import Matcher
from millrace_testing.engines.grammars import Words, lark, mask_of

PIECES = [
    b"\\n",
    b'\\"',
    b"*** ",
    b"Begin Patch",
    b"End Patch",
    b'{"',
    b'"}',
    b"\\n+",
    b"</",
    "é".encode(),
]
CHARS = [bytes([code]) for code in (*b"\b\f\t\n\r", *range(32, 127))]
CHARS += ["｜".encode(), "▁".encode()]
HASTY = {*PIECES, b'"', b"\n", b"<", b"*"}
WORDS = Words([*PIECES, *CHARS], size=120)
PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF
%import common.LF
"""
"""Of patches, in the form that coding agents ask for."""
PATCHED = '*** Begin Patch\n*** Add File: a/b "c".py\n+print("\\n", \'é\')\t# x\n+\n*** End Patch\n'
SUM = 'start: expr\nexpr: INT (SP OP SP INT)*\nOP: "+" | "-"\nSP: " "\n%import common.INT'
SETTING = """
?start: "set"i (CNAME "=" value -> x)~1..2   // a comment with a "quote"
!value: ESCAPED_STRING
      | [SIGN] INT+
SIGN: "+".."-"
%import common (CNAME, ESCAPED_STRING)
%import common.DIGIT -> INT
"""
REGEX = r'[A-Z]{2}\d+: "[^"\\]*"(?:\n|$)'
CASES: dict[str, tuple[GrammarKind, str, list[str], list[str]]] = {
    "patch": (
        GrammarKind.LARK,
        PATCH,
        [PATCHED, "*** Begin Patch\n*** Delete File: a\n*** End Patch"],
        ["", "*** Begin Patch\n*** End Patch", PATCHED.replace("Add", "Append"), f"{PATCHED}x"],
    ),
    "sum": (GrammarKind.LARK, SUM, ["1", "1 + 22 - 3"], ["", "1 +", "1 * 2", "1\n"]),
    "setting": (
        GrammarKind.LARK,
        SETTING,
        ['SETa="b"', 'seta="b \\" c"', 'set_a1=""a=-12'],
        ["seta=b", 'seta="b', 'seta="b\n"', "seta=1a=1a=1"],
    ),
    "regex": (GrammarKind.REGEX, REGEX, ['AB1: "é/x"', 'AB12: ""\n'], ["", 'AB1: "', 'AB1: "\\"']),
}


def tool_of(name: str) -> Tool:
    kind, source, *_ = CASES[name]
    return text_tool("patch", "Changes files.", Grammar(kind, source))


def takes(matcher: Matcher, text: str) -> bool:
    taken = matcher.copy()
    return taken.consume_all(WORDS.split(text.encode())) and taken.inner.is_accepting()


def matcher_of(source: str) -> Matcher:
    return WORDS.matcher(lark(source))


def inside(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def rule_of(rule: str) -> Matcher:
    return matcher_of(f"start: text\ntext: {rule}\n")


def check(kind: GrammarKind, source: str, texts: list[str], others: list[str]) -> None:
    """That a grammar has these texts, as they are, before a mark and inside a JSON string."""
    grammar = Grammar(kind, source)
    plain, quoted = rule_of(plain_rule(grammar, "", "")), rule_of(quoted_rule(grammar))
    marked = rule_of(plain_rule(grammar, "\n</a>", "</a>"))
    for text in [*texts, *others]:
        assert takes(plain, text) == (text in texts), text
        assert takes(marked, f"{text}\n</a>") == (text in texts), text
        assert takes(quoted, f'{inside(text)}"') == (text in texts), text
        assert not takes(marked, f"{text}</a>\n</a>"), text


@pytest.mark.parametrize("name", CASES)
def test_the_rules_have_the_texts_of_the_grammar(name: str) -> None:
    check(*CASES[name])


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("name", CASES)
def test_calls_of_every_format_have_inputs_that_match(format_name: str, name: str) -> None:
    """A random call that ends, read as clients get it, and held against the plain grammar."""
    tools = [tool_of(name), text_tool("note", None, None)]
    made, choice = format_of(None, format_name), ToolChoice("named", "patch")
    grammar = made.grammar(tools, choice)
    assert grammar is not None
    rng, start = random.Random(f"{format_name} {name}"), matcher_of(grammar.source)
    walks = (walk(start.copy(), rng, most=600) for _ in range(9))
    text = next(one for one in walks if one is not None).decode()
    parser = made.parser(tools, choice)
    deltas = [*parser.push(text).calls, *parser.finish().calls]
    arguments = "".join(delta.arguments for delta in deltas)
    given = TextReader().push(arguments)
    assert json.loads(arguments) == {"input": given}
    assert takes(rule_of(plain_rule(Grammar(*CASES[name][:2]), "", "")), given), (text, given)


@pytest.mark.parametrize("format_name", FORMATS)
def test_calls_may_be_optional(format_name: str) -> None:
    made = format_of(None, format_name)
    tools = [tool_of("patch"), tool_of("regex"), text_tool("note", None, None)]
    grammar = made.grammar(tools, ToolChoice("auto"))
    assert grammar is not None
    assert takes(matcher_of(grammar.source), "I see.") or format_name == "openai"


def walk(matcher: Matcher, rng: random.Random, *, most: int) -> bytes | None:
    """A text of random tokens, with many of `PIECES`; None if it does not end in time."""
    ids: list[int] = []
    while len(ids) < most:
        choices = mask_of(matcher)
        hasty = [id_ for id_ in choices if id_ in WORDS.eos or WORDS.tokens[id_] in HASTY]
        id_ = rng.choice(hasty if hasty and rng.random() < 0.4 else choices)
        assert matcher.consume(id_)
        if matcher.has_ended:
            return WORDS.text(ids)
        ids.append(id_)
    return None


@pytest.mark.parametrize("name", COMMON)
def test_terminals_of_lark_are_those_of_llguidance(name: str) -> None:
    """Short texts over a small alphabet, compared with the compiler's own definition."""
    source = f"start: {name}\n%import common.{name}"
    theirs, grammar = matcher_of(source), Grammar(GrammarKind.LARK, source)
    ours, quoted = rule_of(plain_rule(grammar, "", "")), rule_of(quoted_rule(grammar))
    rng = random.Random(name)
    texts = ["", '"a"', '"\\""', "/**/", "/* a */", "//a", "--a", "#a", "1e5", "-1.5E-3", "\r\n\n"]
    texts += ["".join(rng.choices('aZ1.e+-_"\\ \t\n\r/*#', k=rng.randint(1, 5))) for _ in range(25)]
    for text in texts:
        assert takes(ours, text) == takes(theirs, text), text
        assert takes(quoted, f'{inside(text)}"') == takes(theirs, text), text


@pytest.mark.parametrize(
    ("source", "texts", "others"),
    [
        (r"[\s\S]", ["\n", '"', "\\", "a", "é"], [""]),
        (r".+", ['a"\\\tb'], ["\n"]),
        (r"(?s:.)(?-s:.)|b", ["\na", "b"], ["a\n"]),
        (r"(?i)a\n[\"x]", ['A\n"', "a\nX"], ['a\\n"']),
        (r"\x41\u0042\x{43}\x22", ['ABC"'], ["ABC"]),
        (r"[^\n]\.\/", ['"./', "a./"], ["\n./"]),
        (r"\\d|\d\\", ["\\d", "1\\"], ["1", "d"]),
        (r"^a[$^]$|^(?:^b$)$", ["a$", "a^", "b"], ["a", "^b", "b$"]),
    ],
)
def test_expressions_match_their_texts_only(
    source: str, texts: list[str], others: list[str]
) -> None:
    check(GrammarKind.REGEX, source, texts, others)


@pytest.mark.parametrize(
    "source",
    [
        'start: %json {"type": "object"}',
        "start: <|end|>",
        "start: @other",
        "start: A\nA: /a+/ & ~/aa/",
        r"start: /\bword/",
        r"start: /[a&&b]/",
        r"start: /\p{L}/",
        r"start: /(?=a)a/",
        "start: /a b/x",
        "start: X\n%import common.TELEPATHY",
        'start: "\\x41"',
        "start: /[z-a]/",
        "start: /a^b/",
        'start: "(" start ")" | "a"',
        'start: "a"\n%ignore " "',
        'start[lazy]: "a"',
        "start: A",
        'begin: "a"',
        pytest.param(f"start: /{'[' * 100_000}/", id="open classes"),
        'start: "ab".."cd"',
    ],
)
def test_constraints_that_cannot_be_kept_are_refused_by_name(source: str) -> None:
    with pytest.raises(ToolError, match="the grammar of a tool"):
        quoted_rule(Grammar(GrammarKind.LARK, source))


def read(arguments: str, cuts: list[int]) -> str:
    """The input, from arguments that come in pieces."""
    reader = TextReader()
    bounds = [0, *sorted(cut % (len(arguments) + 1) for cut in cuts), len(arguments)]
    return "".join(reader.push(arguments[begin:end]) for begin, end in pairwise(bounds))


@given(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.booleans(),
    st.lists(st.integers(0, 1000), max_size=20),
)
def test_any_text_comes_as_it_is(text: str, is_ascii: bool, cuts: list[int]) -> None:
    assert read(json.dumps({"input": text}, ensure_ascii=is_ascii), cuts) == text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ('{"input": "a\\', "a"),
        ('{"input": "a\\u00', "a"),
        ('{"input": "a\\ud83d', "a"),
        ('{"input": "a\\ud83d"}', "a\N{REPLACEMENT CHARACTER}"),
        ('{"input": "\\\\ud83d"}', "\\ud83d"),
        ('{\n  "input" :\t"a" }  ', "a"),
        ('{"in', ""),
        ('{"input": ["a"]}', '{"input": ["a"]}'),
        ('{"patch": "a"}', '{"patch": "a"}'),
        ("{}", "{}"),
    ],
)
def test_texts_are_read_up_to_their_edges(arguments: str, said: str) -> None:
    assert read(arguments, []) == read(arguments, list(range(len(arguments)))) == said


@given(st.text('{}"\\:inputud83 a', max_size=40), st.lists(st.integers(0, 1000), max_size=20))
def test_cuts_change_nothing(arguments: str, cuts: list[int]) -> None:
    assert read(arguments, cuts) == read(arguments, [])
