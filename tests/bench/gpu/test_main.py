"""`make bench-gpu` as a whole: stages in processes of their own, none of which takes the others along."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest
from bench.gpu.__main__ import BUDGET_SECONDS, Command, child_environment, default_out, main
from bench.gpu.children import NO_DEVICE, SHARED_MEMORY, run, scratch_prefix
from bench.gpu.stages import STAGES

LIMIT_SECONDS = 60.0
TINY = ["--device=cpu", "--shape=tiny"]


def python(code: str, *arguments: str) -> tuple[str, tuple[str, ...]]:
    ended = run(
        [sys.executable, "-c", code, *arguments],
        environment=os.environ,
        cwd=Path.cwd(),
        limit_seconds=LIMIT_SECONDS,
    )
    return ended.status, ended.tail


class TakesTooLong(subprocess.Popen[str]):
    """A child whose time is up as soon as it has opened the pipe that its last argument names."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait as `Popen` does; with the limit, raise at once."""
        if timeout != LIMIT_SECONDS:
            return super().wait(timeout)
        assert isinstance(self.args, list)
        Path(self.args[-1]).read_bytes()
        raise subprocess.TimeoutExpired(self.args, timeout)


def has_ended(pid: int) -> bool:
    """Whether the process ends: one that was killed may take a moment."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ended, _, _ = select.select([process], [], [], LIMIT_SECONDS)
    os.close(process)
    return bool(ended)


def test_a_child_ends_as_its_status_says() -> None:
    assert python("print('a'); print('b')") == ("ok", ("a", "b"))
    assert python(f"raise SystemExit({NO_DEVICE})")[0] == "no device"
    status, tail = python("raise ValueError('no')")
    assert status == "failed"
    assert tail[-1] == "ValueError: no"


def test_nothing_outlives_a_child_that_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "told")
    monkeypatch.setattr("bench.gpu.children.subprocess.Popen", TakesTooLong)
    # The grandchild is in a session of its own, as a server is.
    code = f"""
import os, signal, subprocess, sys, tempfile
sleeper = [sys.executable, "-c", "import signal; signal.pause()"]
child = subprocess.Popen(sleeper, start_new_session=True, stdout=subprocess.DEVNULL)
folder = tempfile.mkdtemp(prefix=f"millrace-bench-{{os.getpid()}}-", dir={str(SHARED_MEMORY)!r})
print(child.pid, os.getpid(), folder, flush=True)
open(sys.argv[1], "w").close()
signal.pause()
"""
    status, tail = python(code, str(tmp_path / "told"))
    assert status == "timed out"
    grandchild, child, folder = tail[0].split()
    assert has_ended(int(grandchild))
    assert Path(folder).name.startswith(scratch_prefix(int(child)))
    assert not Path(folder).exists()


def test_the_budgets_are_those_of_the_stages() -> None:
    assert list(BUDGET_SECONDS) == list(STAGES)


def test_the_machine_is_measured_with_whatever_was_asked_for() -> None:
    assert Command.read(["--stages=prefill,decode"]).stages == ("machine", "decode", "prefill")
    assert Command.read([]).stages == tuple(BUDGET_SECONDS)
    assert Command.read([]).device == "cuda"


def test_an_unknown_stage_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        Command.read(["--stages=decode,dance"])
    assert "dance" in capsys.readouterr().err


def test_results_go_where_the_environment_says() -> None:
    assert default_out({"OUT": "/somewhere"}) == Path("/somewhere")
    assert default_out({"OUT": ""}).parts[-2:] == ("bench", "out")


def test_bundle_and_sources_come_before_the_users_path() -> None:
    environment = child_environment({"PYTHONPATH": "mine", "A": "b"}, [Path("site")])
    first, *sources, last = environment["PYTHONPATH"].split(os.pathsep)
    assert first == "site"
    assert (last, environment["A"]) == ("mine", "b")
    assert len(sources) == 6
    assert all(Path(folder).is_dir() for folder in sources)


def test_a_stage_that_fails_leaves_the_results_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    flags = ["--shard-flag=--cuda-graphs=many", f"--out={tmp_path}"]
    assert main([*TINY, *flags, "--stages=decode"]) == 1
    content = json.loads((tmp_path / "gpu.json").read_text())
    stages = {name: ended["status"] for name, ended in content["stages"].items()}
    assert stages == {"machine": "ok", "decode": "failed"}
    assert any("cuda-graphs" in line for line in content["stages"]["decode"]["tail"])
    assert "matrix product, bfloat16" in [figure["name"] for figure in content["figures"]]


def test_no_stage_starts_without_time(tmp_path: Path) -> None:
    assert main([*TINY, f"--out={tmp_path}", "--seconds=0", "--stages=machine"]) == 1
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert content["stages"]["machine"]["status"] == "skipped"
