"""Tokenizers and chat templates of published models, on servers of tiny random weights, beside `transformers`.

The weights are tiny Qwen 3 ones for Qwen 3, and tiny Llama ones for all others: the router does not look at the family.
DeepSeek V3 has a tokenizer and formats here, but the model itself does not start.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from bench.harness.server import serving
from tests.ecosystem import prepare
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from millrace_testing.models.models import save_tiny

pytestmark = pytest.mark.ecosystem

FAMILIES = {
    "qwen3": "qwen3",
    "llama3_1": "llama",
    "gemma3": "llama",
    "gptoss": "llama",
    "deepseek_v3": "llama",
}
POSITIONS = 2048
TEXTS: list[str] = json.loads((prepare.TOKENIZERS / "texts.json").read_text())
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather <now> & 'then' in a città.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
CALL = {"name": "get_weather", "arguments": {"city": "Rome"}}
CONTROL = "<|im_end|>"
"""A control token of Qwen 3: in a client's text it is text."""
CHATS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [{"role": "user", "content": "Hi  there\n"}]},
    "system": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is 2+2?"},
        ]
    },
    "turns": {
        "messages": [
            {"role": "user", "content": f"{CONTROL} é"},
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\n b "},
            {"role": "user", "content": "🙂"},
        ]
    },
    "tools": {"messages": [{"role": "user", "content": "Weather in Rome?"}], "tools": TOOLS},
    "calls": {
        "messages": [
            {"role": "user", "content": "Weather in Rome?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "c1", "type": "function", "function": CALL}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "18 °C"},
        ],
        "tools": TOOLS,
    },
}
TOOL_FORMATS = {"qwen3"}
"""Models whose template renders tools as Millrace hands them over; the others get them in the messages."""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ada", "Grace", "Élodie 🙂"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2},
        "note": {"type": "string", "maxLength": 12},
    },
    "required": ["name", "age", "tags", "note"],
    "additionalProperties": False,
}
REGEX = "[あ-ん]{6}🙂 é[0-9]{3}"


class Served:
    """A running server, and the tokenizer of `transformers` for its model."""

    def __init__(self, name: str, client: httpx.Client, reference: PreTrainedTokenizerBase) -> None:
        self.name = name
        self.client = client
        self.reference = reference

    def post(self, route: str, body: dict[str, Any]) -> Any:
        answer = self.client.post(route, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, prompt: str, seed: int) -> Iterator[dict[str, Any]]:
        parameters = {"max_new_tokens": 48, "do_sample": True, "seed": seed}
        body = {"inputs": prompt, "parameters": parameters}
        with self.client.stream("POST", "/generate_stream", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data:"):
                    yield json.loads(line.removeprefix("data:"))


@pytest.fixture(scope="module", params=FAMILIES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    name = request.param
    source = prepare.tokenizer_folder(name)
    if source is None:
        pytest.skip(
            "the published tokenizers are missing: make test-all SUITE=ecosystem installs them"
        )
    folder = tmp_path_factory.mktemp(name) / "model"
    reference = AutoTokenizer.from_pretrained(source)
    save_tiny(
        folder,
        FAMILIES[name],
        vocab_size=len(reference),
        max_position_embeddings=POSITIONS,
        bos_token_id=reference.bos_token_id,
        eos_token_id=reference.eos_token_id,
        pad_token_id=reference.pad_token_id,
    )
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / file, folder / file)
    with (
        serving(folder, log=folder.parent / "launcher.log") as running,
        httpx.Client(base_url=running.url, timeout=120) as client,
    ):
        yield Served(name, client, reference)


def test_tokens_are_those_of_transformers(served: Served) -> None:
    for text in TEXTS:
        spans = served.post("/tokenize", {"inputs": text}) if text else []
        assert [span["id"] for span in spans] == (served.reference(text).input_ids if text else [])


@pytest.mark.parametrize("chat", CHATS)
def test_chats_are_rendered_as_by_transformers(served: Served, chat: str) -> None:
    if not served.reference.chat_template:
        pytest.skip(f"the package of {served.name} has no chat template")
    body = CHATS[chat]
    if "tools" in body and served.name not in TOOL_FORMATS:
        pytest.skip(f"the template of {served.name} lists no tools")
    answer = served.post("/chat_tokenize", body)
    rendered = {"add_generation_prompt": True, "tools": body.get("tools")}
    expected = served.reference.apply_chat_template(body["messages"], tokenize=False, **rendered)
    assert answer["templated_text"] == expected
    before, control, after = expected, "", ""
    if chat == "turns" and CONTROL in served.reference.get_added_vocab():
        before, control, after = expected.partition(CONTROL)
    ids = [
        *served.reference(before, add_special_tokens=False).input_ids,
        *served.reference(control, add_special_tokens=False, split_special_tokens=True).input_ids,
        *served.reference(after, add_special_tokens=False).input_ids,
    ]
    assert [token["id"] for token in answer["tokenize_response"]] == ids


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_s_texts_join_to_the_decoded_whole(served: Served, seed: int) -> None:
    events = list(served.stream("Say something:", seed))
    tokens = [event["token"] for event in events]
    assert len(tokens) == 48
    ids = [token["id"] for token in tokens]
    whole = served.reference.decode(ids, clean_up_tokenization_spaces=False)
    assert "".join(token["text"] for token in tokens) == whole
    plain = served.reference.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert events[-1]["generated_text"] == plain


def test_a_schema_is_kept(served: Served) -> None:
    for seed in range(3):
        grammar = {"type": "json", "value": SCHEMA}
        parameters = {"max_new_tokens": 400, "do_sample": True, "seed": seed, "grammar": grammar}
        text = served.post("/generate", {"inputs": "A person:", "parameters": parameters})
        jsonschema.validate(json.loads(text["generated_text"]), SCHEMA)


def test_a_regular_expression_of_characters_that_are_several_tokens_is_kept(
    served: Served,
) -> None:
    rng = random.Random(served.name)
    for _ in range(3):
        grammar = {"type": "regex", "value": REGEX}
        parameters = {
            "max_new_tokens": 100,
            "do_sample": True,
            "seed": rng.randrange(1 << 30),
            "grammar": grammar,
        }
        text = served.post("/generate", {"inputs": "It is", "parameters": parameters})
        assert re.fullmatch(REGEX, text["generated_text"]), text
