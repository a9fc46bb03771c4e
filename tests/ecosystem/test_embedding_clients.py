"""Third-party clients of embeddings and rankings; what they get is what sentence-transformers computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.harness.server import RunningServer, serving
from tests.ecosystem import prepare
from tests.ecosystem.running import run_quietly
from tests.ecosystem.test_clients import MODULES, python_or_skip

from millrace_testing.models.pooling_models import save_embedding, save_reranker

pytestmark = pytest.mark.ecosystem

SCRIPTS = prepare.CLIENTS / "embeddings"
Served = tuple[RunningServer, Path]
"""The server, and the file of what is expected."""


def run_script(environment: str, name: str, *arguments: str, expected: Path) -> str:
    command = [python_or_skip(environment), f"{name}.py", *arguments]
    return run_quietly(command, SCRIPTS, **MODULES, EXPECTED=str(expected))


def served(kind: str, folder: Path) -> Iterator[Served]:
    expected = folder / "expected.json"
    model = folder / "model"
    model.mkdir()
    (save_embedding if kind == "embed" else save_reranker)(model)
    script = "sentence_transformers_expected"
    arguments = kind, str(model), str(expected)
    run_script("sentence_transformers", script, *arguments, expected=expected)
    with serving(model, log=folder / "launcher.log", flags=["--dtype=float32"]) as running:
        yield running, expected


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from served("embed", tmp_path_factory.mktemp("embedding"))


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from served("score", tmp_path_factory.mktemp("reranker"))


@pytest.mark.parametrize("name", ["huggingface_hub", "langchain", "llama_index", "openai"])
def test_embedding_clients_get_the_expected_embeddings(embedding: Served, name: str) -> None:
    server, expected = embedding
    assert "passed " in run_script(name, f"{name}_embeddings", server.url, expected=expected)


def test_the_cohere_client_gets_the_expected_ranking(reranker: Served) -> None:
    server, expected = reranker
    assert "passed " in run_script("cohere", "cohere_rerank", server.url, expected=expected)
