"""Thoughts with the tokenizers, and where there is one the chat template, of published models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.ecosystem import prepare

from millrace_router.reasoning.formats import reasoning_of
from millrace_router.reasoning.reasoning_format import ReasoningFormat, Start, ThoughtLimit
from millrace_router.request.request import Grammar, GrammarKind
from millrace_router.text.chat_template import ChatTemplate
from millrace_router.text.tokenizer import Tokenizer
from millrace_shard.structured_output.grammar_source import lark_of
from millrace_shard.structured_output.matcher import Matcher
from millrace_shard.structured_output.vocabulary import load_vocabulary
from millrace_testing.engines.grammars import lark, mask_of

pytestmark = pytest.mark.ecosystem

USER = {"role": "user", "content": "Hi <think>"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ENDS = {"qwen3": "<|im_end|>", "gptoss": "<|return|>"}
THOUGHTS = {
    "qwen3": ("<think>", "\nWhy?\n", "</think>", "\n\n", ""),
    "gptoss": (
        *("<|channel|>analysis<|message|>", "Why?", "<|end|>"),
        *("<|start|>assistant<|channel|>final<|message|>", "<|return|>"),
    ),
}
BUDGET = 1000
SCHEMA: dict[str, Any] = {"type": "object", "additionalProperties": False}
JSON = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))


def folder_of(name: str) -> Path:
    folder = prepare.tokenizer_folder(name)
    if folder is None:
        pytest.skip(
            "the published tokenizers are missing: make test-all SUITE=ecosystem installs them"
        )
    return folder


def template_of(name: str) -> str | None:
    config = json.loads((folder_of(name) / "tokenizer_config.json").read_text())
    found: str | None = config.get("chat_template")
    return found


def known(name: str) -> tuple[Tokenizer, ReasoningFormat]:
    """The package of gpt-oss has no template."""
    tokenizer = Tokenizer.load(folder_of(name))
    asked = "gpt_oss" if name == "gptoss" else "auto"
    reasoning = reasoning_of(template_of(name), asked, tokenizer=tokenizer)
    assert reasoning is not None
    return tokenizer, reasoning


@pytest.mark.parametrize("name", ["llama3_1", "gemma3", "deepseek_v3"])
def test_models_that_do_not_think_have_no_format(name: str) -> None:
    assert reasoning_of(template_of(name)) is None


def test_qwen_3_is_switched_and_gets_its_thought_back() -> None:
    _, reasoning = known("qwen3")
    template = ChatTemplate(template_of("qwen3"), special_tokens={})
    starts = {None: Start.FREE, "none": Start.CLOSED, "high": Start.FREE}
    for effort, start in starts.items():
        prompt = template.render([USER], variables=reasoning.variables(effort))
        assert reasoning.start_of(prompt) is start
    turn = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Hm"}
    result = {"role": "tool", "tool_call_id": "c1", "content": "5"}
    assert "<think>\nHm\n</think>" in template.render([USER, turn, result], tools=[TOOL])


@pytest.mark.parametrize("name", THOUGHTS)
def test_thoughts_are_split_and_bounded(name: str) -> None:
    tokenizer, reasoning = known(name)
    opener, thought, closer, behind, end = THOUGHTS[name]
    splitter = reasoning.splitter(Start.FREE)
    ids = tokenizer.encode(f"{opener}{thought}{closer}{behind}{{}}{end}", add_special_tokens=False)
    split = [*(splitter.push(tokenizer.token_text(id_)) for id_ in ids), splitter.finish()]
    assert "".join(one.thought for one in split) == thought.strip()
    assert "".join(one.answer for one in split) == "{}"
    ends = [tokenizer.special_ids[ENDS[name]]]
    vocabulary = load_vocabulary(
        folder_of(name), vocab_size=tokenizer.vocab_size, eos_token_ids=ends
    )
    assert vocabulary is not None
    limit = ThoughtLimit(budget=BUDGET, ends=frozenset(ends))
    grammar = reasoning.grammar(Start.FREE, JSON, limit, is_text=True)
    assert grammar is not None
    matcher = Matcher.of(lark_of(lark(grammar.source)), vocabulary)
    whole = matcher.copy()
    assert whole.consume_all([*ids[: len(ids) - bool(end)], *ends])
    assert whole.has_ended
    assert matcher.consume_all(tokenizer.encode(opener, add_special_tokens=False))
    assert matcher.consume_all([*tokenizer.encode(" a", add_special_tokens=False)] * BUDGET)
    assert mask_of(matcher) == list(tokenizer.encode(closer, add_special_tokens=False))
