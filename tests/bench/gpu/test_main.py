"""`make bench-gpu` as a whole: stages in processes of their own, none of which takes the others along."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest
from bench.gpu.__main__ import Command, child_environment, default_out, main
from bench.gpu.children import NO_DEVICE, SHARED_MEMORY, run, scratch_prefix
from bench.gpu.device import find_device
from bench.gpu.page import NO_GPU
from bench.gpu.plan import STAGES, Stage

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


class ExceedsItsBound(subprocess.Popen[str]):
    """A stage named `endless` whose time is up as soon as it has written to the pipe that its output names."""

    is_told = False

    def wait(self, timeout: float | None = None) -> int:
        """Wait as `Popen` does; the first time, raise once the stage has written."""
        assert isinstance(self.args, list)
        if "endless" not in self.args or self.is_told:
            return super().wait(timeout)
        self.is_told = True
        (out,) = (word.partition("=")[2] for word in self.args if word.startswith("--out="))
        reader = os.open(Path(out) / "told", os.O_RDONLY | os.O_NONBLOCK)
        readable, _, _ = select.select([reader], [], [], LIMIT_SECONDS)
        os.close(reader)
        assert readable
        raise subprocess.TimeoutExpired(self.args, timeout or 0.0)


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


def test_the_first_stage_runs_with_whatever_was_asked_for() -> None:
    def names(*argv: str) -> list[str]:
        return [stage.name for stage in Command.read(argv).stages]

    assert names("--stages=prefill,decode") == ["versions", "decode", "prefill"]
    assert names() == [stage.name for stage in STAGES]
    assert Command.read([]).device == "auto"


def test_an_unknown_stage_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        Command.read(["--stages=decode,dance"])
    assert "dance" in capsys.readouterr().err


def test_results_go_where_the_environment_says() -> None:
    assert default_out({"OUT": "/somewhere"}) == Path("/somewhere")
    assert default_out({"OUT": ""}).parts[-2:] == ("bench", "out")


def test_sources_come_before_the_users_path() -> None:
    environment = child_environment({"PYTHONPATH": "mine", "A": "b"})
    *sources, last = environment["PYTHONPATH"].split(os.pathsep)
    assert (last, environment["A"]) == ("mine", "b")
    assert len(sources) == 7
    assert all(Path(folder).is_dir() for folder in sources)


def test_the_device_is_the_one_that_torch_finds(tmp_path: Path) -> None:
    """A torch of one line stands for the installed one."""
    (tmp_path / "torch.py").write_text(
        "class cuda:\n    is_available = staticmethod(lambda: True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert find_device(environment, tmp_path) == "cuda"
    (tmp_path / "torch.py").write_text("raise ImportError('no torch')")
    assert find_device(environment, tmp_path) == "cpu"


GOOD = """
from bench.gpu.figures import check

def run(setting, emit):
    emit(check(f"{__name__} on {setting.device}", 0, "x"))
"""
FAILING = """
from bench.gpu.figures import check

def run(setting, emit):
    emit(check("before the failure", 0, "x"))
    raise ValueError("it is broken")
"""
ENDLESS = """
import signal
from bench.gpu.figures import check

def run(setting, emit):
    emit(check("before the bound", 0, "x"))
    with (setting.out / "told").open("w") as pipe:
        pipe.write("told")
    signal.pause()
"""
SOURCES = {"first": GOOD, "failing": FAILING, "endless": ENDLESS, "last": GOOD}


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Stage]:
    """Stages in a folder of their own, one of which fails, and one of which never ends."""
    sources = tmp_path / "stages"
    sources.mkdir()
    for name, text in SOURCES.items():
        (sources / f"{name}.py").write_text(text)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(sources), os.environ.get("PYTHONPATH", "")])
    )
    os.mkfifo(tmp_path / "told")
    return [Stage(name, f"Does {name} run?", 1, 1) for name in SOURCES]


def test_a_run_goes_on_after_a_stage_that_fails_and_one_that_exceeds_its_bound(
    tmp_path: Path, stages: list[Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.gpu.children.subprocess.Popen", ExceedsItsBound)
    assert main([*TINY, f"--out={tmp_path}"], stages) == 1
    content = json.loads((tmp_path / "gpu.json").read_text())
    ends = {name: ended["status"] for name, ended in content["stages"].items()}
    assert ends == {"first": "ok", "failing": "failed", "endless": "timed out", "last": "ok"}
    assert content["stages"]["failing"]["tail"][-1] == "ValueError: it is broken"
    assert [figure["name"] for figure in content["figures"]] == [
        "first on cpu",
        "before the failure",
        "before the bound",
        "last on cpu",
    ]
    page = (tmp_path / "gpu.md").read_text()
    assert "ValueError: it is broken" in page
    assert NO_GPU in page


def test_a_run_whose_stages_succeed_ends_with_status_0(
    tmp_path: Path, stages: list[Stage], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, f"--out={tmp_path}", "--stages=last"], stages) == 0
    assert NO_GPU in capfd.readouterr().out
    assert NO_GPU in (tmp_path / "gpu.md").read_text()


def test_no_stage_starts_without_time(tmp_path: Path, stages: list[Stage]) -> None:
    assert main([*TINY, f"--out={tmp_path}", "--seconds=0"], stages) == 1
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert {ended["status"] for ended in content["stages"].values()} == {"skipped"}


def test_a_stage_that_finds_no_gpu_ends_the_run(tmp_path: Path, stages: list[Stage]) -> None:
    if find_device(os.environ, tmp_path) == "cuda":
        pytest.skip("there is a GPU")
    assert main(["--device=cuda", "--shape=tiny", f"--out={tmp_path}"], stages) == 1
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert {name: ended["status"] for name, ended in content["stages"].items()} == {
        "first": "no device"
    }
