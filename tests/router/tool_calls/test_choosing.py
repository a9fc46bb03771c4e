"""The choice of the call format."""

from __future__ import annotations

import pytest

from millrace_router.text.tokenizer import Tokenizer
from millrace_router.tool_calls.formats import format_of
from millrace_router.tool_calls.tool import Tool, ToolChoice
from millrace_testing.text import chat_templates as sources
from millrace_testing.text.texts import byte_level

TOOL = Tool("f", None, {"type": "object", "properties": {}}, strict=False)
REQUIRED = ToolChoice("required")

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
}


@pytest.mark.parametrize(("template", "expected"), BY_TEMPLATE.values(), ids=BY_TEMPLATE)
def test_the_template_tells(template: str | None, expected: str) -> None:
    assert format_of(template).name == expected


@pytest.mark.parametrize("asked", ["hermes", "llama", "mistral", "json"])
def test_the_flag_is_obeyed(asked: str) -> None:
    assert format_of(sources.QWEN_3, asked).name == asked


def source_of(template: str | None, special_ids: dict[str, int]) -> str:
    grammar = format_of(template, "mistral", special_ids=special_ids).grammar([TOOL], REQUIRED)
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
    grammar = made.grammar([TOOL], REQUIRED)
    assert grammar is not None
    assert f"<[{rust.token_to_id('[TOOL_CALLS]')}]>" in grammar.source
    assert "ARGS" in grammar.source
    tokenizer.close()
