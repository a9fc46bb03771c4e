"""The choice of the call format."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from millrace_router.config import RouterConfig
from millrace_router.text.tokenizer import Tokenizer
from millrace_router.tool_calls.formats.registry import ALIASES, NAMES, format_of
from millrace_router.tool_calls.tool import Tool, ToolChoice
from millrace_router.tool_calls.tool_prompt import DEFAULT_TOOL_PROMPT
from millrace_testing.text import chat_templates as sources
from millrace_testing.text import published
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
def test_the_template_tells(template: str | None, expected: str) -> None:
    assert format_of(template).name == expected


@pytest.mark.parametrize("asked", NAMES)
def test_the_flag_is_obeyed(asked: str) -> None:
    assert format_of(sources.QWEN_3, asked).name == ALIASES.get(asked, asked)


def test_the_flag_has_every_name() -> None:
    flag = RouterConfig.model_fields["tool_call_parser"].annotation
    assert get_args(flag) == ("auto", *sorted(NAMES))


def test_glm_s_two_forms_are_distinguished() -> None:
    for name in ("glm_4_6", "glm_4_7"):
        grammar = format_of(published.template(name)).grammar([TOOL], REQUIRED)
        assert grammar is not None
        assert (r'"f" "\n"' in grammar.source) == (name == "glm_4_6")


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


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_asks_for_the_form_that_is_read(name: str) -> None:
    made = format_of(None, name)
    if made.tool_prompt == DEFAULT_TOOL_PROMPT:
        assert name not in {"deepseek_v3", "deepseek_v31", "phi4_mini_json"}
        return
    asked = made.tool_prompt.partition("JSON object:\n")[2].rpartition("\nOtherwise")[0]
    written = asked.replace("function name", '"f"' if "{" in asked else "f")
    parser = made.parser([TOOL], ToolChoice("auto"))
    parsed = [parser.push(re.sub(r"\barguments(?!\")", "{}", written)), parser.finish()]
    assert [call.name for one in parsed for call in one.calls] == ["f"]
