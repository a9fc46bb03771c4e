"""Thought and answer in streamed text, in each format."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_router.reasoning.channels import CONSTRAIN, MARKERS, ChannelReasoning, ChannelSplitter
from millrace_router.reasoning.formats import TAGS, reasoning_of
from millrace_router.reasoning.reasoning_format import Split, Splitter, Start, ThoughtLimit
from millrace_router.reasoning.tags import Tags, TagSplitter
from millrace_router.request.request import Grammar, GrammarKind
from millrace_router.text.chat_template import ChatTemplate
from millrace_router.tool_calls.formats.registry import format_of
from millrace_router.tool_calls.parsing.call_format import chat_grammar
from millrace_router.tool_calls.tool import Tool, ToolChoice
from millrace_shard.structured_output.grammar_source import lark_of
from millrace_shard.structured_output.matcher import Matcher
from millrace_shard.structured_output.vocabulary import Vocabulary
from millrace_testing.engines.grammars import lark

STARTS = list(Start)


def read(splitter: Splitter, pieces: Iterable[str]) -> Split:
    """Join the parts of all pieces."""
    splits = [*map(splitter.push, pieces), splitter.finish()]
    assert splitter.finish() == Split("", "")
    return Split("".join(s.thought for s in splits), "".join(s.answer for s in splits))


def cut(text: str, positions: Iterable[int]) -> list[str]:
    """Cut `text` at `places`, as far as it reaches."""
    at = [0, *sorted(position % (len(text) + 1) for position in positions), len(text)]
    return [text[start:stop] for start, stop in pairwise(at)]


def expected(tags: Tags, start: Start, text: str) -> Split:
    """Split a whole text with regular expressions."""
    either = "|".join(map(re.escape, tags.openers))
    opened = re.match(rf"[ \t\r\n]*(?:{either})", text)
    if opened is not None:
        text = text[opened.end() :]
    elif start is not Start.OPEN:
        return Split("", answer_of(tags, text))
    text = text.lstrip(tags.trimmed)
    thought, *rest = re.split("|".join(map(re.escape, tags.closers)), text, maxsplit=1)
    if not rest:
        return Split(text, "")
    return Split(thought.rstrip(tags.trimmed), answer_of(tags, rest[0].lstrip(tags.trimmed)))


def answer_of(tags: Tags, text: str) -> str:
    if not tags.answer_opener or not text.startswith(tags.answer_opener):
        return text
    text = text.removeprefix(tags.answer_opener).lstrip(tags.trimmed)
    answer, closer, rest = text.partition(tags.answer_closer)
    return answer.rstrip(tags.trimmed) + rest if closer else answer


@st.composite
def texts(draw: st.DrawFn, tags: tuple[str, ...]) -> str:
    """Words, blanks, tags, and parts of tags."""
    tag = st.sampled_from(tags)
    part = st.tuples(tag, st.integers(1, 9)).map(lambda cut: cut[0][: cut[1]])
    word = st.sampled_from(["a", "wörld", "<", "</", "\n", "\n\n", " ", "é日", "<|", "{}"])
    return "".join(draw(st.lists(st.one_of(word, part, tag, st.text(max_size=3)), max_size=12)))


@pytest.mark.parametrize("name", TAGS)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), start=st.sampled_from(STARTS), places=st.lists(st.integers(0, 400)))
def test_cuts_make_no_difference_and_no_character_is_lost(
    name: str, data: st.DataObject, start: Start, places: list[int]
) -> None:
    tags = TAGS[name]
    text = data.draw(texts(tags.texts))
    assert read(TagSplitter(tags, start), cut(text, places)) == expected(tags, start, text)


@pytest.mark.parametrize(
    ("start", "text", "thought", "answer"),
    [
        (Start.FREE, "<think>\nWhy?\n</think>\n\nSo.", "Why?", "So."),
        (Start.FREE, "\n <think>Why?</think>So.", "Why?", "So."),
        (Start.OPEN, "Why?\n\nOh.\n</think>\nSo.\n", "Why?\n\nOh.", "So.\n"),
        (Start.OPEN, "<think>\nWhy?</think>", "Why?", ""),
        (Start.OPEN, "Why?\n", "Why?\n", ""),
        (Start.FREE, "<think>Why? </thi", "Why? </thi", ""),
        (Start.CLOSED, "So. <think>no</think>", "", "So. <think>no</think>"),
        (Start.FREE, " So.", "", " So."),
        (Start.FREE, "<thi", "", "<thi"),
        (Start.FREE, "<think></think>So.", "", "So."),
    ],
)
def test_a_thought_ends_at_its_tag(start: Start, text: str, thought: str, answer: str) -> None:
    for pieces in ([text], list(text)):
        assert read(TagSplitter(TAGS["think"], start), pieces) == (thought, answer)


def test_a_thought_is_streamed_while_it_is_written() -> None:
    splitter = TagSplitter(TAGS["think"], Start.OPEN)
    thinks = [splitter.thinks]
    assert splitter.push("I am\n") == ("I am", "")
    assert splitter.push("here </") == ("\nhere ", "")
    assert splitter.push("think>\n") == ("", "")
    assert [*thinks, splitter.thinks] == [True, False]
    assert splitter.push("\nyes") == ("", "yes")


def test_blanks_without_end_are_not_kept() -> None:
    splitter = TagSplitter(TAGS["think"], Start.OPEN)
    assert len(splitter.push("a" + "\n" * 1000).thought) > 700
    assert read(TagSplitter(TAGS["think"], Start.FREE), [" " * 300, "<think>"]).thought == ""


ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
COMMENTARY = "<|channel|>commentary<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        (f"{ANALYSIS}Why?{NEXT}{FINAL}So.<|return|>", "Why?", "So."),
        (f"{ANALYSIS}A{NEXT}{ANALYSIS}B{NEXT}{FINAL}C", "A\nB", "C"),
        (f"{ANALYSIS}A{NEXT}{COMMENTARY}I look.{NEXT}{CALL}", "A", f"I look.{CALL}"),
        (f"{ANALYSIS}A{NEXT} to=functions.f<|channel|>commentary<|message|>{{}}<|call|>", "A",
         " to=functions.f<|channel|>commentary<|message|>{}<|call|>"),
        (" to=functions.f<|channel|>commentary<|message|>{}<|call|>", "",
         " to=functions.f<|channel|>commentary<|message|>{}<|call|>"),
        ("So.", "", "So."),
        ("So.<|end|> Yes.", "", "So. Yes."),
        (f"{ANALYSIS}Why? <|en", "Why? <|en", ""),
        (f"{ANALYSIS}Why?{NEXT}<|channel|>fin", "Why?", ""),
        ("<|channel|>final<|end|>So.", "", "finalSo."),
        (" so", "", " so"),
        (f"<|start|>assistant{FINAL}So.", "", "So."),
        (f"<|channel|>{'n' * 300}", "", "n" * 300),
    ],
)  # fmt: skip
def test_channels_are_split_into_thought_and_answer(text: str, thought: str, answer: str) -> None:
    for pieces in ([text], list(text), re.split(r"(?<=\|>)", text)):
        splitter = ChannelSplitter(Start.FREE, keeps_calls=True)
        assert read(splitter, pieces) == (thought, answer)


def test_calls_are_text_where_none_is_expected() -> None:
    splitter = ChannelSplitter(Start.FREE, keeps_calls=False)
    assert read(splitter, [f"{ANALYSIS}A{NEXT}{CALL}"]) == ("A", '{"a": 1}')


@settings(max_examples=300, deadline=None)
@given(
    text=texts((*MARKERS, "analysis", "final", "commentary", "assistant", " to=functions.f")),
    start=st.sampled_from(STARTS),
    keeps=st.booleans(),
    places=st.lists(st.integers(0, 400)),
)
def test_cuts_between_channels_make_no_difference(
    text: str, start: Start, keeps: bool, places: list[int]
) -> None:
    whole = read(ChannelSplitter(start, keeps_calls=keeps), [text])
    assert read(ChannelSplitter(start, keeps_calls=keeps), cut(text, places)) == whole


SAID = st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]), max_size=8)


@settings(max_examples=200, deadline=None)
@given(
    messages=st.lists(st.tuples(st.sampled_from([ANALYSIS, FINAL, COMMENTARY]), SAID)),
    places=st.lists(st.integers(0, 400)),
)
def test_no_character_of_a_message_is_lost(
    messages: list[tuple[str, str]], places: list[int]
) -> None:
    text = NEXT.join(header + said for header, said in messages)
    split = read(ChannelSplitter(Start.FREE, keeps_calls=True), cut(text, places))
    assert split.thought == "\n".join(said for header, said in messages if header == ANALYSIS)
    assert split.answer == "".join(said for header, said in messages if header != ANALYSIS)


def test_formats_are_recognised_by_their_templates() -> None:
    for name, tags in TAGS.items():
        written = "".join(tags.openers[:1]) + " … " + tags.closers[0]
        if name == "granite":
            written += " <response></response>"
        reasoning = reasoning_of(f"{{{{ '{written}' }}}}")
        assert reasoning is not None
        assert reasoning.name == name
    assert reasoning_of("{{ '<|im_start|>' }}") is None
    assert reasoning_of(None) is None
    assert reasoning_of("<think>", "none") is None
    named = reasoning_of(None, "qwen3")
    assert named is not None
    assert named.name == "think"


TURNS = "{% for turn in messages %}"
TEMPLATES = {
    "qwen3": TURNS + "{% if turn.reasoning_content is string %}<think>\n"
    "{{ turn.reasoning_content }}\n</think>\n\n{% endif %}{{ turn.content }}{% endfor %}",
    "gpt_oss": TURNS + "{% if 'thinking' in turn %}<think>\n{{ turn.thinking }}\n</think>\n\n"
    "{% endif %}{{ turn.content }}{% endfor %}",
    "reasoning": TURNS + "{% if turn.reasoning %}<think>\n{{ turn['reasoning'] }}\n</think>\n\n"
    "{% endif %}{{ turn.content }}{% endfor %}",
    "mistral": TURNS + "{% if turn.content is string %}{{ turn.content }}{% else %}"
    "{% for block in turn.content %}{% if block.type == 'text' %}{{ block.text }}"
    "{% elif block.type == 'thinking' %}[THINK]{{ block.thinking }}[/THINK]{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}",
    "none": TURNS + "{{ turn.content }}{% endfor %}",
}
WRITTEN = {"mistral": "[THINK]Why?[/THINK]So.", "none": "So."}
USER = {"role": "user", "content": ""}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("content", ["So.", [{"type": "text", "text": "So."}]])
def test_a_thought_is_where_its_template_looks(name: str, content: Any) -> None:
    turn = {"role": "assistant", "content": content, "reasoning_content": "Why?"}
    prompt = ChatTemplate(TEMPLATES[name], special_tokens={}).render([turn, USER])
    assert prompt == WRITTEN.get(name, "<think>\nWhy?\n</think>\n\nSo.")


@pytest.mark.parametrize("name", TEMPLATES)
def test_without_a_thought_nothing_is_added(name: str) -> None:
    turn = {"role": "assistant", "content": "So."}
    prompt = ChatTemplate(TEMPLATES[name], special_tokens={}).render([turn, USER])
    assert prompt == "So."


EOS = 0
IDS = {text: index for index, text in enumerate([*MARKERS, CONSTRAIN], start=1)}
TOKENS = [b"</s>", *(text.encode() for text in IDS), *(bytes([byte]) for byte in range(256))]
VOCABULARY = Vocabulary.of(TOKENS, special=range(len(IDS) + 1), eos_token_ids=[EOS])
REASONING = ChannelReasoning(name="gpt_oss", ids=IDS, special=frozenset(IDS))
FORMAT = format_of(None, "openai", special_ids=IDS)
TOOL = Tool("get_weather", None, {"properties": {"city": {"type": "string"}}}, strict=True)
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CHANNEL_CALL = (
    '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome"}'
)
EARLY = ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>'
FINAL_CHANNEL = "<|channel|>final<|message|>"


def takes(grammar: Grammar | None, text: str) -> bool:
    limit = ThoughtLimit(budget=None, ends=frozenset({EOS}))
    behind = REASONING.grammar(Start.FREE, grammar, limit, is_text=False)
    assert behind is not None
    matcher = Matcher.of(lark_of(lark(behind.source)), VOCABULARY)
    ids = []
    while text:
        marker = next((one for one in IDS if text.startswith(one)), None)
        ids += [IDS[marker]] if marker else [1 + len(IDS) + byte for byte in text[0].encode()]
        text = text[len(marker or text[0]) :]
    return matcher.consume_all(ids) and bool(matcher.inner.is_accepting())


def read_with_calls(text: str) -> tuple[str, str, str]:
    """Thought, answer and arguments."""
    splitter = REASONING.splitter(Start.FREE, keeps_calls=True)
    parser = FORMAT.parser([TOOL], ToolChoice("auto"))
    thought = answer = arguments = ""
    for piece in [*text, None]:
        split = splitter.finish() if piece is None else splitter.push(piece)
        parts = [parser.push(split.answer), *([parser.finish()] if piece is None else [])]
        thought += split.thought
        answer += "".join(part.text for part in parts)
        arguments += "".join(call.arguments for part in parts for call in part.calls)
    return thought, answer, arguments


@pytest.mark.parametrize("before", ["", THOUGHT])
def test_a_required_call_may_follow_a_thought(before: str) -> None:
    grammar = FORMAT.grammar([TOOL], ToolChoice("required"))
    assert takes(grammar, before + CHANNEL_CALL)
    assert takes(grammar, before + CHANNEL_CALL + "<|call|>")
    assert not takes(grammar, before + FINAL_CHANNEL + "Sunny.")
    assert not takes(grammar, before + CHANNEL_CALL.replace("Rome", '"'))


@pytest.mark.parametrize("before", ["", THOUGHT])
def test_a_strict_tool_leaves_the_choice(before: str) -> None:
    grammar = FORMAT.grammar([TOOL], ToolChoice("auto"))
    for text in (
        FINAL_CHANNEL + "Sunny.",
        CHANNEL_CALL,
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + CHANNEL_CALL,
    ):
        assert takes(grammar, before + text), text
    schema = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "integer"}')
    either = chat_grammar(FORMAT, [TOOL], ToolChoice("auto"), schema)
    assert takes(either, before + FINAL_CHANNEL + "12")
    assert takes(either, before + CHANNEL_CALL)
    assert not takes(either, before + FINAL_CHANNEL + "twelve")


@pytest.mark.parametrize(
    "call", [CHANNEL_CALL, CHANNEL_CALL + "<|call|>", EARLY], ids=["cut", "ended", "early"]
)
@pytest.mark.parametrize("before", ["", THOUGHT])
def test_thoughts_text_and_calls_are_separated(before: str, call: str) -> None:
    expected = ("Hm." if before else "", "", '{"city": "Rome"}')
    assert read_with_calls(before + call) == expected
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    assert read_with_calls(before + preamble + call) == (expected[0], "I look.", expected[2])
    assert read_with_calls(before + FINAL_CHANNEL + "Sunny.<|return|>") == (
        expected[0],
        "Sunny.",
        "",
    )
