"""The entrypoint of the image for SageMaker with a launcher that prints its arguments and variables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.deploy.containers import ROOT, environment, image

from millrace_launcher.settings.arguments import read_settings
from millrace_launcher.settings.checks import notices

DOCKERFILE = ROOT / "deploy" / "docker" / "launcher.Dockerfile"
SCRIPT = ROOT / "deploy" / "docker" / "sagemaker.py"
LAUNCHER = f"""#!{sys.executable}
import json, os, sys
print(json.dumps([sys.argv, dict(os.environ)]))
"""
OURS = ("MODEL_ID", "REVISION", "QUANTIZE", "TRUST_REMOTE_CODE", "NUM_SHARD")


@pytest.fixture(autouse=True)
def sagemaker_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = tmp_path / "millrace-launcher"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)
    for name in OURS:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment(DOCKERFILE, "sagemaker").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", str(tmp_path))


def run() -> subprocess.CompletedProcess[str]:
    """Start it as SageMaker does."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), "serve"], capture_output=True, text=True, check=False
    )


def test_sagemaker_variables_become_variables_of_the_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_MODEL_ID", "a/b")
    monkeypatch.setenv("HF_MODEL_REVISION", "main")
    monkeypatch.setenv("HF_MODEL_QUANTIZE", "int8")
    monkeypatch.setenv("HF_MODEL_TRUST_REMOTE_CODE", "true")
    monkeypatch.setenv("SM_NUM_GPUS", "2")
    monkeypatch.setenv("MAX_TOTAL_TOKENS", "512")
    argv, given = json.loads(run().stdout)
    assert argv[1:] == []
    for name in os.environ.keys() - given.keys():
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    settings = read_settings(argv[1:])
    assert settings.launcher.model_id == "a/b"
    assert settings.launcher.revision == "main"
    assert settings.launcher.num_shard == 2
    assert settings.shard.quantize == "int8"
    assert settings.shard.trust_remote_code
    assert settings.router.max_total_tokens == 512
    assert settings.router.port == 8080
    told = list(notices(settings, on_cpu=True))
    assert [line.partition(" ")[0] for line in told] == ["--trust-remote-code"]


def test_absent_and_empty_variables_are_left_to_the_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_MODEL_ID", "/opt/ml/model")
    monkeypatch.setenv("HF_MODEL_QUANTIZE", "")
    _, given = json.loads(run().stdout)
    assert {name: given[name] for name in OURS if name in given} == {"MODEL_ID": "/opt/ml/model"}


def test_a_missing_model_id_is_reported() -> None:
    answer = run()
    assert (answer.returncode, answer.stdout) == (1, "")
    assert "HF_MODEL_ID must be set" in answer.stderr


def test_the_image_runs_it() -> None:
    instructions = dict(image(DOCKERFILE, "sagemaker"))
    assert json.loads(instructions["ENTRYPOINT"]) == ["python", f"/opt/millrace/{SCRIPT.name}"]
    assert instructions["EXPOSE"] == "8080"
    copies = [rest for word, rest in image(DOCKERFILE, "sagemaker") if word == "COPY"]
    assert f"--chmod=644 {SCRIPT.relative_to(ROOT)} /opt/millrace/{SCRIPT.name}" in copies
