"""Engine processes from both sides: the loop in the child, and the pipe to the parent."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from bench.harness.checkpoints import Shape, write_checkpoint
from bench.harness.paths import ROOT
from bench.peers import revisions
from bench.peers.engines import SHARD_FLAGS
from bench.peers.millrace_engine import MillraceEngine, load
from bench.peers.process import SOURCES, EngineError, EngineProcess
from bench.peers.revisions import PACKAGES, at_revision, environment_of
from bench.peers.worker import Limits, Request, drive
from transformers import AutoModelForCausalLM

STOP_SECONDS = 30.0
LIMITS = Limits(max_streams=2, max_tokens=16, kv_tokens=32, threads=1)
REQUESTS = [Request([1, 2], 3), Request([3], 1), Request([4, 5, 6], 2)]


class Steps:
    """A peer that gives each request in flight one token at each step."""

    def __init__(self, surplus: int = 0) -> None:
        self.most_at_once = 0
        self._left: dict[int, int] = {}
        self._surplus = surplus

    def add(self, number: int, request: Request) -> None:
        self._left[number] = request.new_tokens + self._surplus
        self.most_at_once = max(self.most_at_once, len(self._left))

    def step(self) -> Iterable[tuple[int, int, bool]]:
        for number in list(self._left):
            self._left[number] -= 1
            has_ended = self._left[number] == 0
            if has_ended:
                del self._left[number]
            yield number, 1, has_ended


@pytest.mark.parametrize("concurrency", [1, 2, 8])
def test_the_loop_keeps_its_concurrency_and_stamps_every_token(concurrency: int) -> None:
    steps = Steps()
    moments = drive(steps, REQUESTS, concurrency)
    assert [len(m.arrivals) for m in moments] == [3, 1, 2]
    assert steps.most_at_once == min(concurrency, 3)
    assert all(m.due <= m.arrivals[0] and m.arrivals == sorted(m.arrivals) for m in moments)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineProcess]:
    path = os.pathsep.join(str(ROOT / source) for source in (*SOURCES, "tests/support"))
    process = EngineProcess(
        "fake",
        python=Path(sys.executable),
        module="millrace_testing.fake_bench",
        environment={"PYTHONPATH": path},
        log=tmp_path / "log" / "fake.log",
    )
    yield process
    process.end()


def test_requests_go_out_and_timelines_come_back(engine: EngineProcess, tmp_path: Path) -> None:
    engine.load(tmp_path, LIMITS)
    for _ in range(2):
        timelines = engine.run(REQUESTS, 2)
        assert [len(t.arrivals) for t in timelines] == [3, 1, 2]
        assert all(t.first_token_seconds == pytest.approx(0.5) for t in timelines)


def test_an_engine_is_frozen_between_calls_and_gone_at_the_end(
    engine: EngineProcess, tmp_path: Path
) -> None:
    engine.load(tmp_path, LIMITS)
    (process,) = engine.processes()
    with ThreadPoolExecutor(1) as thread:
        for _ in range(2):
            stopped = thread.submit(os.waitid, os.P_PID, process.pid, os.WSTOPPED)
            try:
                stopped.result(timeout=STOP_SECONDS)
            except TimeoutError:
                process.suspend()
                pytest.fail("it is not frozen")
            assert process.status() == psutil.STATUS_STOPPED
            engine.run(REQUESTS, 1)
    engine.end()
    assert not process.is_running()


def test_an_engine_that_dies_is_an_error_and_stays_one(
    engine: EngineProcess, tmp_path: Path
) -> None:
    engine.load(tmp_path, LIMITS)
    for _ in range(2):
        with pytest.raises(EngineError, match="no thirteen"):
            engine.run([Request([13], 1)], 1)


SHAPE = Shape(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    vocab_size=18_600,
)
ENGINE_LIMITS = Limits(max_streams=4, max_tokens=64, kv_tokens=256, threads=1)
ENGINE_REQUESTS = [Request(list(range(500 + 7 * n, 505 + 9 * n)), 3 + n) for n in range(5)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, SHAPE, seed=3)
    return folder


@pytest.fixture(scope="module")
def millrace_engine(checkpoint: Path) -> Iterator[MillraceEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SHARD_FLAGS, "--disable-custom-kernels --dtype float32 --kv-memory 16MiB")
        millrace_engine = load(checkpoint, ENGINE_LIMITS)
    yield millrace_engine
    millrace_engine.close()


def test_the_tokens_are_the_models(millrace_engine: MillraceEngine, checkpoint: Path) -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    expected = []
    for request in ENGINE_REQUESTS:
        ids = torch.tensor([request.ids])
        tokens = model.generate(
            ids,
            max_new_tokens=request.new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        expected.append(tokens[0, len(request.ids) :].tolist())
    assert millrace_engine.generate(ENGINE_REQUESTS, 5) == expected


COMPILE = "from pathlib import Path\n(Path(__file__).parent / 'generated.py').write_text('')\n"


def git(repository: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=Someone", "-c", "user.email=someone@example.org")
    subprocess.run(["git", "-C", repository, *identity, *arguments], check=True)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two commits of the four packages; `a_module.VALUE` is 1 in the first, with the tag `old`, and 2 after it."""
    root = tmp_path / "repository"
    for package in PACKAGES:
        (root / package).mkdir(parents=True)
        (root / package / "a_file").touch()
    (root / "proto" / "compile.py").write_text(COMPILE)
    git(root, "init", "--quiet")
    for value, tag in ((1, "old"), (2, "new")):
        (root / "router" / "a_module.py").write_text(f"VALUE = {value}\n")
        git(root, "add", ".")
        git(root, "commit", "--quiet", "--message", tag)
        git(root, "tag", tag)
    monkeypatch.setattr(revisions, "ROOT", root)
    monkeypatch.setattr(revisions, "PEERS_FOLDER", tmp_path / "peers")
    return root


def test_an_earlier_revision_runs_its_own_files(repository: Path, tmp_path: Path) -> None:
    server = at_revision("old")
    folder = tmp_path / "peers" / f"at-{server.name}"
    shown = subprocess.run(
        [sys.executable, "-c", "import a_module; print(a_module.VALUE)"],
        env={**os.environ, **environment_of(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == "1\n"
    assert (folder / "proto" / "generated.py").exists()
    assert server.is_installed
    assert at_revision("old").name == server.name != at_revision("new").name
