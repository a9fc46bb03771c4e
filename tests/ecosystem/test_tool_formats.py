"""Calls in the formats of published models: their chat templates and tokenizers over tiny random weights."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from bench.harness.server import serving
from tests.ecosystem import prepare
from transformers import AutoTokenizer

from millrace_router.tool_calls.formats.registry import format_of
from millrace_router.tool_calls.tool import Tool, ToolChoice
from millrace_testing.models.models import save_tiny
from millrace_testing.text import published
from millrace_testing.text.written_calls import read

pytestmark = pytest.mark.ecosystem

FAMILIES = {
    "deepseek_v3": ("deepseek_v3", None),
    "llama3_1": ("llama3_1", None),
    "qwen3": ("qwen3", None),
    "gpt_oss": ("gptoss", "gpt_oss"),
    "qwen3_coder": ("qwen3", "qwen3_coder"),
    "glm_4_6": ("qwen3", "glm_4_6"),
    "granite_3_3": ("qwen3", "granite_3_3"),
}
"""Tokenizer and published template; None for the template beside the tokenizer."""
CALL = '{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}'
LLAMA = CALL.replace("arguments", "parameters")
LINES = json.dumps(json.loads(CALL), indent=4)
ARGUMENTS = '{"city": "Rome", "days": 2}'
SECTION = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n" + ARGUMENTS + "\n```"
UNTAGGED = [CALL, LINES, f"```json\n{LINES}\n```", f"```\n{CALL}\n```", f"[{CALL}]"]
"""What small and old models of many families write in place of their template's form."""
WRITTEN: dict[str, list[str]] = {
    "qwen3": [f"<tool_call>\n{CALL}\n</tool_call>", f"<tools>\n{CALL}\n</tools>"],
    "llama3_1": [
        LLAMA,
        f"<|reserved_special_token_5|>{LLAMA}",
        f'{{"type": "function", {LLAMA[1:]}',
    ],
    "gemma3": [f"```json\n{LLAMA}\n```<end_of_turn>", f"```json\n[\n{LLAMA}\n]\n```\n"],
    "gpt_oss": [
        f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
        f"<|channel|>commentary to=functions.get_weather json<|message|>{ARGUMENTS}<|call|>",
        f"<|channel|>analysis to=functions.get_weather code<|message|>{ARGUMENTS}<|call|>",
    ],
    "deepseek_v3": [
        f"<｜tool▁calls▁begin｜>{SECTION}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        f"{SECTION}<｜tool▁call▁end｜>",
    ],
    "qwen3_coder": [
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>",
        "<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "</function>",
    ],
    "glm_4_6": [
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>",
    ],
    "granite_3_3": [f"<|tool_call|>[{CALL}]", f"<tool_call>[{CALL}]"],
}
"""What each family writes: by its template, and otherwise."""
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "sure": {"type": "boolean"},
    },
    "required": ["city", "days", "sure"],
}
TOOL = {
    "name": "get_weather",
    "description": "How it is.",
    "parameters": PARAMETERS,
    "strict": True,
}
USER = {"role": "user", "content": "Weather in Rome?"}
SEEDS = range(3)


def source_of(family: str) -> Path:
    """The folder of a family's tokenizer; skips where it is not installed."""
    source = prepare.tokenizer_folder(FAMILIES.get(family, (family, None))[0])
    if source is None:
        pytest.skip(
            "the published tokenizers are missing: make test-all SUITE=ecosystem installs them"
        )
    return source


@dataclass(frozen=True)
class Served:
    """A running server."""

    client: httpx.Client

    def ask(self, **fields: Any) -> httpx.Response:
        body = {
            "messages": [USER],
            "tools": [{"type": "function", "function": TOOL}],
            "max_tokens": 200,
            "temperature": 1.0,
            **fields,
        }
        answer = self.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer


@pytest.fixture(scope="module", params=FAMILIES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    template, source = FAMILIES[request.param][1], source_of(request.param)
    folder = tmp_path_factory.mktemp(request.param) / "model"
    reference = AutoTokenizer.from_pretrained(source)
    save_tiny(
        folder,
        "llama",
        vocab_size=len(reference),
        max_position_embeddings=4096,
        bos_token_id=reference.bos_token_id,
        eos_token_id=reference.eos_token_id,
        pad_token_id=reference.pad_token_id,
    )
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / file, folder / file)
    if template is not None:
        (folder / "chat_template.jinja").write_text(published.template(template), encoding="utf-8")
    # Random weights would think to the end of the tokens; gpt-oss's calls are told apart behind its thoughts.
    flags = [] if request.param == "gpt_oss" else ["--reasoning-parser", "none"]
    with (
        serving(folder, log=folder.parent / "launcher.log", flags=flags) as running,
        httpx.Client(base_url=running.url, timeout=120) as client,
    ):
        yield Served(client)


def is_endless_thought(choice: dict[str, Any]) -> bool:
    """Whether random weights thought up to the last token, as with gpt-oss for some seeds on some processors."""
    message = choice["message"]
    has_answer = bool(message.get("content") or message.get("tool_calls"))
    return choice["finish_reason"] == "length" and bool(message.get("reasoning")) and not has_answer


@pytest.mark.parametrize("seed", SEEDS)
def test_a_required_call_matches_and_goes_on(served: Served, seed: int) -> None:
    choice = served.ask(tool_choice="required", parallel_tool_calls=False, seed=seed).json()[
        "choices"
    ][0]
    if is_endless_thought(choice):
        return
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == TOOL["name"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), PARAMETERS)
    assert not choice["message"]["content"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "18 °C"}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    assert served.ask(messages=messages, tool_choice="none", max_tokens=3).json()["choices"]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stream_has_the_same_call(served: Served, seed: int) -> None:
    fields = {"tool_choice": {"type": "function", "function": {"name": TOOL["name"]}}, "seed": seed}
    choice = served.ask(**fields).json()["choices"][0]
    if is_endless_thought(choice):
        return
    whole = choice["message"]["tool_calls"][0]["function"]
    arguments, names = "", []
    for line in served.ask(**fields, stream=True).text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                for call in choice["delta"].get("tool_calls") or ():
                    names.append(call["function"].get("name"))
                    arguments += call["function"].get("arguments") or ""
    assert [name for name in names if name] == [whole["name"]]
    assert arguments == whole["arguments"]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_strict_tool_is_kept_where_a_call_is_optional(served: Served, seed: int) -> None:
    message = served.ask(tool_choice="auto", seed=seed).json()["choices"][0]["message"]
    for call in (message.get("tool_calls") or ())[:-1]:
        jsonschema.validate(json.loads(call["function"]["arguments"]), PARAMETERS)


@pytest.mark.parametrize("family", WRITTEN)
def test_the_chosen_parser_reads_what_the_family_writes(family: str) -> None:
    reference = AutoTokenizer.from_pretrained(source_of(family))
    template = FAMILIES.get(family, (family, None))[1]
    source = published.template(template) if template else reference.chat_template
    special = {
        one.content: id_ for id_, one in reference.added_tokens_decoder.items() if one.special
    }
    chosen = format_of(source, special_ids=special)
    tools = [Tool("get_weather", None, PARAMETERS, strict=False)]
    hidden = re.compile("|".join(map(re.escape, special.keys() - chosen.markers)) or r"(?!)")
    others = [] if family == "gpt_oss" else UNTAGGED
    for text in [*WRITTEN[family], *others]:
        answer = read(chosen.parser(tools, ToolChoice("auto")), hidden.sub("", text))
        called = [(name, json.loads(arguments)) for name, arguments in answer.calls]
        assert called == [("get_weather", json.loads(ARGUMENTS))], (chosen.name, text)
        assert not answer.text.strip()
