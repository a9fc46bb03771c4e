"""The setting of benchmarks that are made of parts, without a server."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.harness.checkpoints import build_tokenizer
from bench.harness.quiet import Quiet
from bench.parts.fixture import Fixture
from bench.parts.texts import Texts


@pytest.fixture(scope="module")
def texts() -> Texts:
    return Texts(build_tokenizer(32768))


@pytest.fixture(scope="module")
def fixture(texts: Texts) -> Fixture:
    return Fixture(
        model=Path("model"),
        texts=texts,
        most_positions=8192,
        quick=True,
        quiet=Quiet(),
        out=Path("out"),
    )
