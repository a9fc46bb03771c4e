"""Grammars of thoughts, compiled as in shards: what they allow, budgets, and the answers behind them."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from millrace_router.errors import ValidationError
from millrace_router.reasoning.channels import CONSTRAIN, MARKERS, ChannelReasoning
from millrace_router.reasoning.formats import TAGS
from millrace_router.reasoning.reasoning_format import ReasoningFormat, Start, ThoughtLimit
from millrace_router.reasoning.tags import TaggedReasoning
from millrace_router.request.request import Grammar, GrammarKind
from millrace_shard.structured_output.closing import short_ending
from millrace_shard.structured_output.grammar_source import lark_of
from millrace_shard.structured_output.matcher import Matcher
from millrace_shard.structured_output.vocabulary import Vocabulary
from millrace_testing.engines.grammars import lark, mask_of

EOS = 0
TEXTS = [
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<|channel>", "<channel|>"),
    *("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    *(*MARKERS, CONSTRAIN),
]
IDS = {text: id_ for id_, text in enumerate(TEXTS, start=1)}
PIECES = [*(chr(byte).encode() for byte in range(128)), b"\xc3", b"\xb6", b"analysis", b"final"]
TOKENS = [b"</s>", *(text.encode() for text in TEXTS), *PIECES, b'{"', b'":', b"}\n", b"\n\n"]
FIRST_SPECIAL = IDS["[THINK]"]
VOCABULARY = Vocabulary.of(
    TOKENS, special=[EOS, *range(FIRST_SPECIAL, len(TEXTS) + 1)], eos_token_ids=[EOS]
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
JSON = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
ANSWERS = {
    "json": (JSON, '{"a": 1}', '{"b": 1}'),
    "regex": (Grammar(GrammarKind.REGEX, r"a/b\/[0-9]+"), "a/b/12", "ab"),
    "lark": (Grammar(GrammarKind.LARK, 'start: x y // no\nx: "a"\ny: /b+/'), "abb", "ba"),
}
LIMIT = ThoughtLimit(ends=frozenset({EOS}))
THINK = TaggedReasoning(name="think", tags=TAGS["think"], ids=IDS)
PLAIN = replace(THINK, ids={})
PHRASES = TaggedReasoning(name="granite_phrases", tags=TAGS["granite_phrases"])
COHERE = TaggedReasoning(name="cohere", tags=TAGS["cohere"], ids=IDS)
GEMMA = TaggedReasoning(name="gemma4", tags=TAGS["gemma4"], ids=IDS)
CHANNELS = ChannelReasoning(name="gpt_oss", ids=IDS)
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"


def ids_of(text: str) -> list[int]:
    """Special tokens by name, all else as bytes."""
    ids = []
    while text:
        name = next((one for one in TEXTS if text.startswith(one)), text[:1])
        ids += [IDS[name]] if name in IDS else [TOKENS.index(bytes([b])) for b in name.encode()]
        text = text[len(name) :]
    return ids


def text_of(ids: list[int]) -> str:
    return b"".join(TOKENS[id_] for id_ in ids if id_ != EOS).decode(errors="replace")


def matcher_of(grammar: Grammar | None) -> Matcher:
    assert grammar is not None
    assert grammar.kind == GrammarKind.LARK
    return Matcher.of(lark_of(lark(grammar.source)), VOCABULARY)


def allows(grammar: Grammar | None, text: str) -> bool:
    """Whether the grammar takes the whole text."""
    return matcher_of(grammar).consume_all([*ids_of(text), EOS])


def thinking(
    form: ReasoningFormat,
    answer: Grammar | None = None,
    *,
    start: Start = Start.FREE,
    budget: int | None = None,
    is_text: bool = True,
) -> Grammar | None:
    return form.grammar(start, answer, replace(LIMIT, budget=budget), is_text=is_text)


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("form", [THINK, PLAIN], ids=["token", "text"])
def test_an_answer_is_right_behind_a_thought_and_without_one(
    form: ReasoningFormat, name: str
) -> None:
    answer, right, wrong = ANSWERS[name]
    grammar = thinking(form, answer)
    split = pieces if form is PLAIN else ids_of
    thought = '<think>\n{"a": </thin'
    for text in (right, f"{thought}</think>\n\n{right}", f"<think></think>{right}"):
        assert matcher_of(grammar).consume_all([*split(text), EOS]), text
    for text in (wrong, f"<think>a</think>{wrong}", "<think>a"):
        assert not matcher_of(grammar).consume_all([*split(text), EOS]), text


def pieces(text: str) -> list[int]:
    """Bytes alone."""
    return [TOKENS.index(bytes([byte])) for byte in text.encode()]


@pytest.mark.parametrize(
    ("form", "start", "right", "wrong"),
    [
        (THINK, Start.OPEN, "hm</think>\n{}", "{}"),
        (THINK, Start.CLOSED, "{}", "<think>hm</think>{}"),
        (COHERE, Start.FREE, "<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>{}"
         "<|END_RESPONSE|>", "<|END_THINKING|>{}"),
        (COHERE, Start.CLOSED, "<|START_RESPONSE|>{}<|END_RESPONSE|>", "[THINK]{}"),
        (GEMMA, Start.FREE, "<|channel>thought\nhm<channel|>{}", "<|channel>hm<channel|>{}"),
        (PHRASES, Start.FREE, "Here is my thought process: hm Here is my response: {}",
         "Here is my thought process: {}"),
        (CHANNELS, Start.FREE, f"{ANALYSIS}hm<think>{NEXT}{FINAL}{{}}", f"{ANALYSIS}hm{NEXT}{{}}"),
        (CHANNELS, Start.FREE, f"{FINAL}{{}}", "{}"),
        (CHANNELS, Start.OPEN, f"hm{NEXT}{FINAL}{{}}", f"{FINAL}{{}}"),
    ],
)  # fmt: skip
def test_the_grammar_begins_behind_the_thought_of_each_format(
    form: ReasoningFormat, start: Start, right: str, wrong: str
) -> None:
    empty = Grammar(
        GrammarKind.JSON_SCHEMA, json.dumps({"type": "object", "additionalProperties": False})
    )
    grammar = thinking(form, empty, start=start)
    if grammar is empty:
        grammar = Grammar(GrammarKind.LARK, 'start: "{}"')
    assert allows(grammar, right)
    assert not allows(grammar, wrong)


def test_calls_have_the_channel_of_their_format() -> None:
    calls = Grammar(GrammarKind.LARK, f'start: <[{IDS["<|channel|>"]}]> "commentary"')
    grammar = thinking(CHANNELS, calls, is_text=False)
    assert allows(grammar, f"{ANALYSIS}hm{NEXT}<|channel|>commentary")
    assert not allows(grammar, f"{ANALYSIS}hm{NEXT}{FINAL}<|channel|>commentary")


def test_without_answer_and_budget_there_is_no_grammar() -> None:
    for form in (THINK, PLAIN, CHANNELS):
        assert thinking(form) is None
        assert thinking(form, budget=3, start=Start.CLOSED) is None
    assert thinking(THINK, JSON, start=Start.CLOSED) is JSON


BUDGETED = {
    "think": (THINK, "<think>", "</think>", "Yes <|tool|>[THINK]"),
    "gemma4": (GEMMA, "<|channel>thought\n", "<channel|>", "Yes"),
    "cohere": (COHERE, "<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>Yes"),
    "gpt_oss": (CHANNELS, ANALYSIS, "<|end|>", f"<|start|>assistant{FINAL}Yes"),
}


@pytest.mark.parametrize("name", BUDGETED)
@pytest.mark.parametrize("start", [Start.FREE, Start.OPEN])
@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_budget_closes_the_thought(name: str, start: Start, budget: int) -> None:
    form, opener, closer, rest = BUDGETED[name]
    matcher = matcher_of(thinking(form, start=start, budget=budget))
    if start is Start.FREE:
        assert matcher.consume_all(ids_of(opener))
    within = [IDS["[/THINK]"], TOKENS.index(b"\xc3"), *ids_of("hello")][:budget]
    for count, id_ in enumerate(within):
        # Drafts that are refused leave nothing behind.
        mark = matcher.mark()
        assert matcher.consume_all(within[count : count + 2][: budget - count])
        assert matcher.return_to(mark)
        markers = {IDS[marker] for marker in MARKERS} if form is CHANNELS else set()
        assert set(mask_of(matcher)) == set(range(1, len(TOKENS))) - (markers - set(ids_of(closer)))
        assert matcher.consume(id_)
    assert mask_of(matcher) == ids_of(closer)
    assert matcher.consume_all(ids_of(closer))
    assert len(mask_of(matcher)) == len(TOKENS)
    assert matcher.consume_all([*ids_of(rest), EOS])


@pytest.mark.parametrize("name", BUDGETED)
def test_a_thought_may_end_before_its_budget(name: str) -> None:
    form, opener, closer, rest = BUDGETED[name]
    grammar = thinking(form, budget=100)
    assert allows(grammar, f"{opener}hm{closer}{rest}")
    assert not allows(grammar, f"{opener}hm")


def test_without_a_thought_nothing_is_bounded() -> None:
    assert allows(thinking(THINK, budget=1), "hello")
    assert allows(thinking(THINK, budget=1), "")
    assert not allows(thinking(THINK, budget=1), "h<think>ello</think>")
    call = f"<|channel|>commentary to=functions.f {CONSTRAIN}json<|message|>{{}}<|call|>"
    for text in ("hello", "", f"{FINAL}hello", call):
        assert allows(thinking(CHANNELS, budget=1), text)


def test_a_budget_needs_tags_that_are_tokens() -> None:
    for form in (PLAIN, PHRASES, replace(CHANNELS, ids={})):
        with pytest.raises(ValidationError, match="tags that are single tokens"):
            thinking(form, budget=1)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("form", [THINK, COHERE, GEMMA, CHANNELS], ids=lambda form: form.name)
def test_any_allowed_text_splits_into_a_short_thought_and_a_right_answer(
    form: ReasoningFormat, seed: int
) -> None:
    rng = random.Random(seed)
    start = rng.choice([Start.FREE, Start.OPEN])
    matcher = matcher_of(thinking(form, JSON, start=start, budget=5))
    ids: list[int] = []
    for _ in range(200):
        choices = mask_of(matcher)
        assert choices
        ids.append(rng.choice(choices))
        assert matcher.consume(ids[-1])
        if matcher.has_ended:
            break
    splitter = form.splitter(start)
    split = [splitter.push(text_of([id_])) for id_ in ids]
    split.append(splitter.finish())
    answer = "".join(one.answer for one in split)
    assert json.loads(answer)["a"] in {1, 2}
    assert sum(bool(one.thought) for one in split) <= 6


@pytest.mark.parametrize(
    ("form", "begin"),
    [(THINK, ""), (COHERE, ""), (GEMMA, ""), (CHANNELS, ""), (CHANNELS, "hm")],
    ids=["think", "cohere", "gemma", "channels", "channels-later"],
)
def test_a_limit_closes_a_thought_and_its_answer(form: ReasoningFormat, begin: str) -> None:
    grammar = thinking(form, replace(JSON, closes=True), start=Start.OPEN)
    assert grammar is not None
    assert grammar.closes
    matcher = matcher_of(grammar)
    assert matcher.consume_all(ids_of(begin))
    ending = short_ending(matcher.inner, VOCABULARY.closing, most=60)
    assert ending is not None
    assert '"a"' in text_of(list(ending))
    assert matcher.consume_all(ending)
    assert not getattr(thinking(form, JSON, start=Start.OPEN), "closes", None)
