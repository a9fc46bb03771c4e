"""A real model, served by its short name from a cache, without a network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import torch
from bench.harness.server import RunningServer, serving
from tests.ecosystem import prepare
from tests.ecosystem.operating.first_hour import BLOCKS, recorded_answer
from tests.ecosystem.running import run_cases
from tests.ecosystem.test_clients import MODULES, python_or_skip, script
from transformers import AutoModelForCausalLM, AutoTokenizer

from millrace.verify.__main__ import main as verify
from millrace_shard.weights.published import PUBLISHED_MODELS

pytestmark = pytest.mark.ecosystem

MODEL = PUBLISHED_MODELS["smollm2"]
NUM_TOKENS = 24
PROMPTS = [
    "The capital of France is",
    "Once upon a time, there was a",
    "def fibonacci(n):\n",
    "Water boils at",
    "1, 2, 3, 4,",
    "The three primary colours are red,",
    "In 1969, the first",
    "Dear Sir or Madam,\n\n",
    "Q: What is the largest planet?\nA:",
    "import numpy as np\n",
    "The quick brown fox",
    "To make bread you need flour,",
    "El gato está en la",
    "Photosynthesis is the process by which",
    '{"name": "Ada", "age":',
    "A haiku about rivers:\n",
    "The opposite of hot is",
    "🙂 means",
    "SELECT name FROM",
    "She opened the door and",
]
QUESTIONS = [
    "What is the weather in Rome?",
    "Is it warm in Oslo today? I use Celsius.",
    "Tell me about Ada Lovelace.",
    "Wie ist das Wetter in München?",
]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 30},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "born": {"type": "integer", "minimum": 0, "maximum": 2100},
        "fields": {
            "type": "array",
            "items": {"type": "string", "maxLength": 20},
            "minItems": 1,
            "maxItems": 3,
        },
        "alive": {"type": "boolean"},
    },
    "required": ["name", "born", "fields", "alive"],
    "additionalProperties": False,
}
CLIENTS = ["huggingface_hub", "openai", "openai_tools", "text_generation"]


@pytest.fixture(scope="module")
def file() -> Path:
    """The model's GGUF file, which the preparation has fetched."""
    folder = f"millrace/published/{MODEL.package}-{MODEL.version}"
    path = prepare.HUB_HOME / folder / MODEL.file_name
    if not path.exists():
        pytest.skip("smollm2 is missing: make test-all SUITE=ecosystem fetches it")
    return path


@pytest.fixture(scope="module")
def server(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The server as users get it, in bfloat16."""
    with _serving(tmp_path_factory.mktemp("launcher"), "--enable-prefill-logprobs") as running:
        yield running


@pytest.fixture(scope="module")
def precise(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The same in float32."""
    with _serving(tmp_path_factory.mktemp("launcher"), "--dtype=float32") as running:
        yield running


def _serving(folder: Path, *flags: str) -> Any:
    environment = {"HF_HOME": str(prepare.HUB_HOME), "PIP_NO_INDEX": "1"}
    name = Path(MODEL.name)
    return serving(name, log=folder / "launcher.log", flags=flags, environment=environment)


def post(server: RunningServer, route: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(f"{server.url}{route}", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_greedy_tokens_are_those_of_transformers(precise: RunningServer, file: Path) -> None:
    check_greedy_tokens(precise, file)


def check_greedy_tokens(precise: RunningServer, file: Path) -> None:
    """Compare ids of prompts, and greedy tokens with their log probabilities, with transformers reading `file`."""
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # It dequantises by the package `gguf`, and renames the tensors and reorders their rows by code of its own.
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).eval()
    for prompt in PROMPTS:
        parameters = {"max_new_tokens": NUM_TOKENS, "details": True, "ignore_eos": True}
        answer = post(precise, "/generate", {"inputs": prompt, "parameters": parameters})
        tokens = answer["details"]["tokens"]
        ids = tokenizer(prompt).input_ids
        assert [span["id"] for span in post(precise, "/tokenize", {"inputs": prompt})] == ids
        found = [token["id"] for token in tokens]
        with torch.inference_mode():
            logits = model(torch.tensor([ids + found])).logits[0, len(ids) - 1 : -1]
        assert found == logits.argmax(-1).tolist(), prompt
        expected = logits.log_softmax(-1).gather(1, torch.tensor(found)[:, None])[:, 0]
        logprobs = torch.tensor([token["logprob"] for token in tokens])
        torch.testing.assert_close(logprobs, expected, atol=2e-4, rtol=0)


def test_the_model_has_its_short_name_and_its_own_chat_template(
    precise: RunningServer, file: Path
) -> None:
    server = precise
    with httpx.Client(base_url=server.url) as client:
        assert [each["id"] for each in client.get("/v1/models").json()["data"]] == [MODEL.name]
        assert client.get("/info").json()["model_id"] == MODEL.name
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    rendered = post(server, "/chat_tokenize", {"messages": messages})
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered["templated_text"] == expected
    answer = post(
        server, "/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 100}
    )
    choice = answer["choices"][0]
    assert "Paris" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"
    assert "<|im_end|>" not in choice["message"]["content"]


def test_the_recorded_answer_is_that_of_a_server_with_default_flags(server: RunningServer) -> None:
    body, recorded = recorded_answer(BLOCKS["smollm2"])
    choice = post(server, "/v1/chat/completions", body)["choices"][0]
    assert choice["message"]["content"] == recorded
    assert "Paris" in recorded
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_tool_call_s_arguments_keep_their_schema(
    server: RunningServer, question: str, temperature: float
) -> None:
    function = {"name": "get_weather", "description": "The weather.", "parameters": WEATHER}
    body = {
        "messages": [{"role": "user", "content": question}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "temperature": temperature,
        "seed": 1,
        "max_tokens": 200,
    }
    (call,) = post(server, "/v1/chat/completions", body)["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER)


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_response_keeps_its_schema(
    server: RunningServer, question: str, temperature: float
) -> None:
    body = {
        "messages": [{"role": "user", "content": question}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": PERSON, "strict": True},
        },
        "temperature": temperature,
        "seed": 2,
        "max_tokens": 400,
    }
    choice = post(server, "/v1/chat/completions", body)["choices"][0]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_s_cases_pass(server: RunningServer, name: str) -> None:
    run_cases([python_or_skip(name), script(name), server.url], prepare.CLIENTS, **MODULES)


def test_an_answer_does_not_depend_on_its_company(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    code = verify([server.url, "--requests=8", "--max-new-tokens=24"])
    shown = capsys.readouterr()
    assert code == 0, shown.out + shown.err
