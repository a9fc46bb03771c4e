"""Quantised checkpoints through the whole server, and `--quantize`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from millrace_launcher.demo import demo_folder
from millrace_testing.launcher.e2e import END_SECONDS, LAUNCHER, Server, launch
from millrace_testing.models.models import greedy
from millrace_testing.quantized.checkpoints import save_quantized

PROMPT = "What is temperature?"
NUM_TOKENS = 12
SIZES: dict[str, Any] = {
    "vocab_size": 2048,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def save(folder: Path, name: str) -> PreTrainedModel:
    """A checkpoint with the demo model's tokenizer."""
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_folder() / file, folder / file)
    return save_quantized(folder, "llama", name, **SIZES)


def ask(server: Server) -> tuple[list[int], str]:
    """The ids and the text of a greedy answer."""
    parameters = {"max_new_tokens": NUM_TOKENS, "details": True, "ignore_eos_token": True}
    body = {"inputs": PROMPT, "parameters": parameters}
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=END_SECONDS)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return [token["id"] for token in found["details"]["tokens"]], found["generated_text"]


def quantization_of(server: Server) -> tuple[object, ...]:
    """The method, the activations, and the gain that they were chosen by."""
    info = httpx.get(f"{server.url}/info", timeout=END_SECONDS).json()
    return tuple(
        info[name] for name in ("quantize", "quantize_activations", "int8_activation_gain")
    )


@pytest.mark.parametrize(
    ("name", "flags", "method"),
    [
        ("gptq", ("--num-shard=2",), "gptq"),
        pytest.param("awq", ("--quantize=awq",), "awq", marks=pytest.mark.long),
        pytest.param("pack-quantized-asymmetric", (), "compressed-tensors", marks=pytest.mark.long),
        pytest.param("fp8-block", ("--quantize=fp8",), "fp8", marks=pytest.mark.long),
        ("nf4-nested", (), "bitsandbytes-nf4"),
    ],
)
def test_answers_are_those_of_transformers(
    name: str, flags: tuple[str, ...], method: str, tmp_path: Path
) -> None:
    reference = save(tmp_path, name)
    ids = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(PROMPT).ids
    expected, _ = greedy(reference, ids, NUM_TOKENS)
    with launch(f"--model-id={tmp_path}", "--dtype=float32", *flags) as server:
        found, _ = ask(server)
        assert found[: len(expected)] == expected
        assert quantization_of(server) == (method, "exact", None)
        assert f"quantised weights: {method.partition('-')[0]}" in server.log


def test_weights_are_quantized_at_the_start() -> None:
    with launch("--quantize=int4", "--quantize-activations=int8") as server:
        _, text = ask(server)
        assert text.strip()
        assert quantization_of(server) == ("int4", "int8", None)
        assert "--quantize int4: int4 in groups of 64" in server.log


def test_a_contradiction_ends_the_start(tmp_path: Path) -> None:
    save(tmp_path, "gptq")
    argv = [sys.executable, *LAUNCHER, f"--model-id={tmp_path}", "--quantize=awq", "--port=1"]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=END_SECONDS, check=False)
    assert ended.returncode == 1
    assert "--quantize awq contradicts config.json, which says gptq" in ended.stdout + ended.stderr
