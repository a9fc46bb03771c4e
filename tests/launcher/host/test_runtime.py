"""The output of `--env`."""

from __future__ import annotations

import platform

import pytest

from millrace_launcher.config import HostVariables
from millrace_launcher.host.runtime import runtime_info


def test_facts_of_a_bug_report(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("DOCKER_LABEL", "sha-1"),
        ("VERGEN_GIT_SHA", "abc"),
        ("HF_TOKEN", "secret"),
    ):
        monkeypatch.setenv(name, value)
    text = runtime_info(HostVariables())
    assert f"Python version: {platform.python_version()}" in text
    assert "Commit sha: abc" in text
    assert "Docker label: sha-1" in text
    assert "torch: " in text
    assert "nvidia-smi: " in text
    assert "secret" not in text
