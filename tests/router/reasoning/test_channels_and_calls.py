"""Calls of gpt-oss behind its thoughts: what the grammar allows is separated, and what the model writes is allowed."""

from __future__ import annotations

import pytest

from millrace_router.reasoning.channels import CONSTRAIN, MARKERS, ChannelReasoning
from millrace_router.reasoning.reasoning_format import Start, ThoughtLimit
from millrace_router.request.request import Grammar, GrammarKind
from millrace_router.tool_calls.formats.registry import format_of
from millrace_router.tool_calls.parsing.call_format import chat_grammar
from millrace_router.tool_calls.tool import Tool, ToolChoice
from millrace_shard.structured_output.grammar_source import lark_of
from millrace_shard.structured_output.matcher import Matcher
from millrace_shard.structured_output.vocabulary import Vocabulary
from millrace_testing.engines.grammars import lark

EOS = 0
IDS = {text: index for index, text in enumerate([*MARKERS, CONSTRAIN], start=1)}
TOKENS = [b"</s>", *(text.encode() for text in IDS), *(bytes([byte]) for byte in range(256))]
VOCABULARY = Vocabulary.of(TOKENS, special=range(len(IDS) + 1), eos_token_ids=[EOS])
REASONING = ChannelReasoning(name="gpt_oss", ids=IDS, special=frozenset(IDS))
FORMAT = format_of(None, "openai", special_ids=IDS)
TOOL = Tool("get_weather", None, {"properties": {"city": {"type": "string"}}}, strict=True)
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome"}'
EARLY = ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>'
FINAL = "<|channel|>final<|message|>"


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


def read(text: str) -> tuple[str, str, str]:
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
    assert takes(grammar, before + CALL)
    assert takes(grammar, before + CALL + "<|call|>")
    assert not takes(grammar, before + FINAL + "Sunny.")
    assert not takes(grammar, before + CALL.replace("Rome", '"'))


@pytest.mark.parametrize("before", ["", THOUGHT])
def test_a_strict_tool_leaves_the_choice(before: str) -> None:
    grammar = FORMAT.grammar([TOOL], ToolChoice("auto"))
    for text in (
        FINAL + "Sunny.",
        CALL,
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + CALL,
    ):
        assert takes(grammar, before + text), text
    schema = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "integer"}')
    either = chat_grammar(FORMAT, [TOOL], ToolChoice("auto"), schema)
    assert takes(either, before + FINAL + "12")
    assert takes(either, before + CALL)
    assert not takes(either, before + FINAL + "twelve")


@pytest.mark.parametrize("call", [CALL, CALL + "<|call|>", EARLY], ids=["cut", "ended", "early"])
@pytest.mark.parametrize("before", ["", THOUGHT])
def test_thought_text_and_call_are_told_apart(before: str, call: str) -> None:
    expected = ("Hm." if before else "", "", '{"city": "Rome"}')
    assert read(before + call) == expected
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    assert read(before + preamble + call) == (expected[0], "I look.", expected[2])
    assert read(before + FINAL + "Sunny.<|return|>") == (expected[0], "Sunny.", "")
