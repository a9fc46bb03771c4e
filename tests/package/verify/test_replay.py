"""The router replays a journal on shards of this command; both are fakes here."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from millrace.verify.options import read_options
from millrace.verify.replay import replay
from millrace_launcher.settings.commands import Programs
from millrace_testing.launcher import fake_launcher

ROUTER = """
import pathlib, sys
found = next(word for word in sys.argv if word.startswith("--shard-addresses="))
for address in found.partition("=")[2].split(","):
    assert pathlib.Path(address.removeprefix("unix:")).is_socket(), address
pathlib.Path(LOG).write_text(" ".join(sys.argv[1:]))
sys.exit(5)
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    monkeypatch.setenv("FAKE_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", ":".join(path for path in sys.path if path))
    script = tmp_path / "router.py"
    script.write_text(ROUTER.replace("LOG", repr(str(tmp_path / "argv"))))
    shard = (*fake_launcher.CHILDREN, "shard")
    return Programs(shard=shard, router=(sys.executable, str(script)))


def test_the_router_drives_shards_that_are_started_for_it(
    tmp_path: Path, programs: Programs
) -> None:
    argv = ["some/model", "--replay", "journal", "--epoch", "3", "--json", "--", "--num-shard=2"]
    options = read_options(argv, environ={})
    assert options.replay is not None
    assert replay(options, options.replay, programs) == 5
    words = (tmp_path / "argv").read_text().split()
    assert words[0] == "replay"
    assert words[1].count("unix:") == 2
    assert words[2:] == ["journal", "--epoch=3", "--json"]
    pids = [int((tmp_path / f"shard-{rank}.pid").read_text()) for rank in (0, 1)]
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_shards_that_do_not_start_are_explained(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_SHARD", "crash")
    options = read_options(["some/model", "--replay", "journal"], environ={})
    assert options.replay is not None
    assert replay(options, options.replay, programs) == 2
    shown = capsys.readouterr().err
    assert "cannot find its feet" in shown
    assert "error: shard-0: exit code 1" in shown
