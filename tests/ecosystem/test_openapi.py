"""schemathesis over our own document, against a running server."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from bench.harness.server import RunningServer

from millrace_router.api.openapi.document import openapi_json

pytestmark = pytest.mark.ecosystem

ROOT = Path(__file__).parent.parent.parent
PROGRAM = ROOT / ".venvs" / "schemathesis" / "bin" / "schemathesis"
HOOKS = Path(__file__).parent / "clients"
SECONDS = 20
"""The time of each run for generating requests."""


def test_the_document_is_valid(tmp_path: Path) -> None:
    """Schema of OpenAPI 3.1, references, unique operation ids, parameters of paths."""
    validator = PROGRAM.with_name("openapi-spec-validator")
    if not validator.exists():
        pytest.skip("no .venvs/schemathesis: make test-all SUITE=ecosystem makes it")
    document = tmp_path / "openapi.json"
    document.write_bytes(openapi_json())
    answer = subprocess.run([validator, document], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr


@pytest.mark.parametrize(
    ("mode", "phases", "environment"),
    [
        pytest.param("all", "coverage,fuzzing", {}, id="anything"),
        pytest.param("positive", "fuzzing", {"MILLRACE_ACCEPTED": "1"}, id="accepted"),
    ],
)
def test_every_answer_is_documented(
    server: RunningServer, tmp_path: Path, mode: str, phases: str, environment: dict[str, str]
) -> None:
    if not PROGRAM.exists():
        pytest.skip("no .venvs/schemathesis: make test-all SUITE=ecosystem makes it")
    config = str(HOOKS / "schemathesis.toml")
    command = [
        *(str(PROGRAM), "--config-file", config, "run", f"{server.url}/openapi.json"),
        *(f"--mode={mode}", f"--phases={phases}", f"--max-time={SECONDS}", "--max-examples=20"),
        *("--seed=5", "--no-color", "--request-timeout=60"),
        # Of what may stand in a path, much is left out.
        "--suppress-health-check=filter_too_much",
    ]
    answer = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=SECONDS * 8,
        env={
            **os.environ,
            "PYTHONPATH": str(HOOKS),
            "SCHEMATHESIS_HOOKS": "schemathesis_hooks",
            **environment,
        },
        check=False,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "SSE" not in answer.stderr
