"""Third-party clients against a server of forty adapters."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from bench.harness.server import RunningServer, serving
from tests.ecosystem import prepare
from tests.ecosystem.conftest import DEMO_MODEL
from tests.ecosystem.running import SECONDS, run_cases
from tests.ecosystem.test_clients import MODULES, python_or_skip

from millrace.verify.adapter_files import linears, write_adapter

pytestmark = pytest.mark.ecosystem

ADAPTERS = prepare.CLIENTS / "adapters"
VOICES = prepare.ROOT / "demo" / "adapters"
RANKS = (1, 4, 8, 16, 24)
NUM_RANDOM = 38
ALPHA = 400
KEY = "operator"
PROMPT = "The mill stands by the river and"
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The adapters by name: two voices, and random ones of several ranks and targets."""
    folder, shapes = tmp_path_factory.mktemp("adapters"), linears(DEMO_MODEL)
    narrow = {name: shape for name, shape in shapes.items() if name.endswith(("q_proj", "v_proj"))}
    found = {name: VOICES / name for name in ("pirate", "butler")}
    for number in range(NUM_RANDOM):
        modules = narrow if number % 3 == 2 else shapes
        path = folder / f"adapter-{number}"
        found[path.name] = write_adapter(path, modules, rank=RANKS[number % len(RANKS)])
        # Strong enough to change the text.
        config = path / "adapter_config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "lora_alpha": ALPHA}))
    return found


@pytest.fixture(scope="module")
def forty(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """A launcher with all of them, and slots for twelve."""
    folder = tmp_path_factory.mktemp("launcher")
    flags = [
        f"--adapter-cache={folder / 'cache'}",
        f"--admin-key={KEY}",
        "--max-loras=12",
        *(f"--lora-modules={name}={path}" for name, path in folders.items()),
    ]
    with serving(DEMO_MODEL, log=folder / "launcher.log", flags=flags) as running:
        yield running


def generated(server: RunningServer, adapter: str) -> str:
    """The greedy continuation of PROMPT, over plain HTTP."""
    parameters = {"max_new_tokens": NEW_TOKENS, "adapter_id": adapter}
    body = {"inputs": PROMPT, "parameters": parameters}
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["generated_text"]
    return text


@pytest.fixture(scope="module")
def texts(forty: RunningServer, folders: dict[str, Path]) -> dict[str, str]:
    return {name: generated(forty, name) for name in ("", *folders)}


@pytest.mark.parametrize("name", ["huggingface_hub", "lorax", "openai", "text_generation"])
def test_an_adapter_client_passes_its_cases(
    forty: RunningServer, texts: dict[str, str], name: str
) -> None:
    command = [python_or_skip(name), f"{name}_adapters.py", forty.url, json.dumps(texts)]
    run_cases(command, ADAPTERS, **MODULES)


def curl(url: str, body: dict[str, object], *more: str) -> tuple[int, str]:
    """Status and text of what vLLM's documentation sends by curl."""
    command = ["curl", "-s", "-w", "\n%{http_code}", "-X", "POST", url]
    command += ["-H", "Content-Type: application/json", *more, "-d", json.dumps(body)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    text, _, status = answer.stdout.rpartition("\n")
    return int(status), text


def test_curl_loads_and_unloads_adapters_in_the_form_of_vllm(
    forty: RunningServer, folders: dict[str, Path], texts: dict[str, str]
) -> None:
    load, unload = f"{forty.url}/v1/load_lora_adapter", f"{forty.url}/v1/unload_lora_adapter"
    key = ("-H", f"Authorization: Bearer {KEY}")
    body: dict[str, object] = {"lora_name": "loaded", "lora_path": str(folders["adapter-3"])}
    assert curl(load, body)[0] == 401
    assert curl(load, body, *key) == (200, "Success: LoRA adapter 'loaded' added successfully.")
    assert generated(forty, "loaded") == texts["adapter-3"]
    assert curl(load, body, *key)[0] == 400
    other = body | {"lora_path": str(folders["adapter-4"]), "load_inplace": True}
    assert curl(load, other, *key)[0] == 200
    assert generated(forty, "loaded") == texts["adapter-4"]
    assert curl(unload, {"lora_name": "loaded"}, *key) == (
        200,
        "Success: LoRA adapter 'loaded' removed successfully.",
    )
    gone = httpx.post(f"{forty.url}/v1/completions", json={"model": "loaded", "prompt": PROMPT})
    assert gone.status_code == 404
