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
from bench.peers.transformers_generate import PaddedBatches, left_padded
from bench.peers.worker import Limits, Request, drive
from transformers import AutoModelForCausalLM, PreTrainedModel

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


def test_another_length_than_asked_for_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="request 0 asked for 3 tokens and got 4"):
        drive(Steps(surplus=1), REQUESTS, 8)


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


def test_between_calls_it_is_frozen_and_in_the_end_it_is_gone(
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


def test_a_model_that_does_not_load_is_an_error_with_its_traceback(
    engine: EngineProcess, tmp_path: Path
) -> None:
    with pytest.raises(
        EngineError, match=r"fake ended with 1:[\s\S]*FileNotFoundError: .*1 thread"
    ):
        engine.load(tmp_path / "missing", LIMITS)


def test_an_engine_that_dies_is_an_error_and_stays_one(
    engine: EngineProcess, tmp_path: Path
) -> None:
    engine.load(tmp_path, LIMITS)
    for _ in range(2):
        with pytest.raises(EngineError, match="no thirteen"):
            engine.run([Request([13], 1)], 1)


def test_an_engine_whose_threads_outlive_it_is_ended(
    engine: EngineProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.peers.process.END_SECONDS", 0.1)
    engine.load(tmp_path, LIMITS)
    (process,) = engine.processes()
    with pytest.raises(EngineError, match="no fourteen"):
        engine.run([Request([14], 1)], 1)
    assert not process.is_running()


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


@pytest.mark.parametrize("concurrency", [1, 3, 5])
def test_every_request_gets_its_tokens_in_order(
    millrace_engine: MillraceEngine, concurrency: int
) -> None:
    moments = millrace_engine.run(ENGINE_REQUESTS, concurrency)
    assert [len(m.arrivals) for m in moments] == [3, 4, 5, 6, 7]
    assert all(m.due < m.arrivals[0] and m.arrivals == sorted(m.arrivals) for m in moments)


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


@pytest.mark.usefixtures("repository")
def test_a_revision_that_git_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match="git: fatal"):
        at_revision("nonsense")


def test_a_revision_whose_code_cannot_be_generated_leaves_nothing(
    repository: Path, tmp_path: Path
) -> None:
    (repository / "proto" / "compile.py").write_text("raise SystemExit('no compiler')")
    git(repository, "commit", "--quiet", "--all", "--message", "broken")
    with pytest.raises(ValueError, match="no compiler"):
        at_revision("HEAD")
    assert not list((tmp_path / "peers").glob("at-*[0-9a-f]"))


STATIC_REQUESTS = [Request(list(range(500, 503 + n)), 3 + n) for n in range(5)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(Path(folder), SHAPE, seed=3)
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return loaded.eval()


def test_prompts_are_padded_on_the_left() -> None:
    ids, mask = left_padded([[7], [8, 9, 10]])
    assert ids.tolist() == [[0, 0, 7], [8, 9, 10]]
    assert mask.tolist() == [[0, 0, 1], [1, 1, 1]]


def test_a_row_of_a_padded_batch_has_the_tokens_that_it_has_alone(model: PreTrainedModel) -> None:
    batches = PaddedBatches(model)
    together = batches.generate(STATIC_REQUESTS)
    assert together.shape == (5, 7 + 7)
    for row, request in zip(together, STATIC_REQUESTS, strict=True):
        (alone,) = batches.generate([request])
        num_new = request.new_tokens
        assert row[7 : 7 + num_new].tolist() == alone[len(request.ids) :].tolist()


def test_requests_have_their_own_lengths_and_the_end_of_their_batch(model: PreTrainedModel) -> None:
    moments = PaddedBatches(model).run(STATIC_REQUESTS, 2)
    assert [len(each.arrivals) for each in moments] == [3, 4, 5, 6, 7]
    assert len({each.due for each in moments}) == 1
    ends = [each.arrivals[0] for each in moments]
    assert all(set(each.arrivals) == {end} for each, end in zip(moments, ends, strict=True))
    assert ends[0] == ends[1] < ends[2] == ends[3] < ends[4]
