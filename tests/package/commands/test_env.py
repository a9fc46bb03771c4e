"""What `millrace env` tells, and what it does not."""

from __future__ import annotations

import getpass
import json
import socket
from pathlib import Path

import pytest
import torch

from millrace.commands.env import main, memory, processor
from millrace_proto.version import VERSION


def test_facts_without_secrets_or_paths(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("API_KEY", "my_secret")
    assert main(["--json"]) == 0
    text = capsys.readouterr().out
    found = json.loads(text)
    assert found["millrace"] == VERSION
    assert found["torch"] == torch.__version__
    assert {"CPU", "CPU features", "cores", "memory", "GPUs", "CPU kernels"} <= found.keys()
    hidden = ("secret", str(Path.home()), socket.gethostname(), f"/{getpass.getuser()}/")
    assert [word for word in hidden if word in text] == []


def test_the_table_has_a_line_for_each_fact(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert f"millrace         {VERSION}\n" in capsys.readouterr().out


def test_memory_and_its_limit(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 4194304 kB\nMemFree: 1 kB\nMemAvailable: 1048576 kB\n")
    assert memory(meminfo, tmp_path) == "4.0 GiB, 1.0 GiB available"
    limit = tmp_path / "memory.max"
    limit.write_text("max\n")
    assert memory(meminfo, tmp_path) == "4.0 GiB, 1.0 GiB available"
    limit.write_text(str(2**31))
    assert memory(meminfo, tmp_path).endswith("limited to 2.0 GiB")


def test_the_processor(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nmodel name : A CPU\nflags : fpu avx2 amx_bf16 other\n")
    assert dict(processor(cpuinfo)) == {"CPU": "A CPU", "CPU features": "avx2 amx_bf16"}
