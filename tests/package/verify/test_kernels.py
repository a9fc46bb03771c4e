"""Servers of millrace-verify with other kernels than the first are an error."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from millrace.server import LocalServers
from millrace.verify.comparison import Verdict
from millrace.verify.inside import verify_model
from millrace.verify.options import read_options

SERVER = """
import sys, threading
from millrace_testing.launcher.verify import fake_server
port = next(int(word.partition("=")[2]) for word in sys.argv if word.startswith("--port="))
attention = "plain" if "--prefix-caching=on" in sys.argv else "cpu"
with fake_server(port=port, attention=attention):
    threading.Event().wait()
"""


def test_a_server_on_other_kernels_breaks_no_promise_and_is_red_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    program = tmp_path / "program.py"
    program.write_text(SERVER)
    servers = LocalServers(model="m", logs=tmp_path, launcher=(str(program),))
    options = read_options(["m", "--requests", "3", "--cases", "chunked,cached"], environ={})
    report = verify_model(options, servers)
    chunked, cached = report.rows
    assert (chunked.verdict, chunked.comparison is None) == (Verdict.NOT_EXERCISED, False)
    assert (cached.verdict, cached.comparison) == (Verdict.NOT_EXERCISED, None)
    assert "plain attention, the first one cpu" in cached.note
    assert report.exit_code == 1
