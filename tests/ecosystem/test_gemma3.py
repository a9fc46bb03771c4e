"""Gemma 3 270M in a GGUF file that others have made: names, norms, windows and a SentencePiece tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.harness.server import serving
from tests.ecosystem import prepare
from tests.ecosystem.test_smollm2 import check_greedy_tokens

pytestmark = pytest.mark.ecosystem


def test_greedy_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    file = prepare.gguf_file()
    if file is None:
        pytest.skip(f"{prepare.GEMMA} is missing: make test-all SUITE=ecosystem fetches it")
    environment = {"HF_HOME": str(tmp_path)}
    log, flags = tmp_path / "launcher.log", ["--dtype=float32"]
    with serving(file, log=log, flags=flags, environment=environment) as precise:
        check_greedy_tokens(precise, file)
