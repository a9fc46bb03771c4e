"""CUDA's own capture on a fake of `torch.cuda`: the order of its calls, and the end of each failure."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.model_runner.capture_run import Candidate, CaptureRun
from millrace_shard.model_runner.graph_capture import (
    Capture,
    Captured,
    CaptureError,
    CudaCapture,
    CudaCaptures,
    GraphSettings,
    empty_cache,
    ends_failed_captures,
)


@dataclass
class FakeStream:
    """A stream that remembers what it waits for."""

    name: str
    calls: list[str]

    def wait_stream(self, other: FakeStream) -> None:
        self.calls.append(f"{self.name} waits for {other.name}")


@dataclass
class FakeCuda:
    """The part of `torch.cuda` that a capture uses: streams, sync debug mode, graphs."""

    calls: list[str] = field(default_factory=list)
    sync_debug_mode: str = "default"
    end_error: RuntimeError | None = None
    """Raised by the end of a capture."""
    has_warned: bool = False
    num_streams: int = 0

    def __post_init__(self) -> None:
        self.current = FakeStream("caller", self.calls)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        replaced: dict[str, Any] = {
            "graph_pool_handle": lambda: "pool",
            "Stream": self.new_stream,
            "current_stream": lambda: self.current,
            "stream": self.stream,
            "graph": self.graph,
            "CUDAGraph": lambda: self,
            "get_sync_debug_mode": lambda: self.sync_debug_mode,
            "set_sync_debug_mode": self.set_sync_debug_mode,
        }
        for name, value in replaced.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def new_stream(self) -> FakeStream:
        self.num_streams += 1
        return FakeStream("side", self.calls)

    def set_sync_debug_mode(self, mode: str) -> None:
        """As torch's, which warns once in a process, after it has set the mode."""
        self.sync_debug_mode = mode
        if not self.has_warned:
            self.has_warned = True
            text = "Synchronization debug mode is a prototype feature and does not yet detect all"
            warnings.warn(f"{text} synchronizing operations", UserWarning, stacklevel=2)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(
        self, graph: FakeCuda, *, pool: str, stream: FakeStream, capture_error_mode: str
    ) -> Iterator[None]:
        """As torch's, which leaves its stream current if the capture cannot end."""
        assert (graph, pool, capture_error_mode) == (self, "pool", "thread_local")
        self.current = stream
        self.calls.append("begin")
        try:
            yield
        finally:
            self.calls.append("end")
            if self.end_error is not None:
                raise self.end_error
        self.current = FakeStream("caller", self.calls)

    def replay(self) -> None:
        self.calls.append("replay")

    def compute(self) -> Tensor:
        self.calls.append(f"{self.current.name}, waits are {self.sync_debug_mode}")
        return torch.ones(2)

    def waiting(self) -> Tensor:
        """As torch's operators that wait."""
        if self.sync_debug_mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return self.compute()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake


def test_work_is_warmed_up_on_the_stream_of_captures_and_must_not_wait_then(cuda: FakeCuda) -> None:
    CudaCapture().warm_up(cuda.compute)
    assert cuda.calls == [
        "side waits for caller",
        "side, waits are default",
        "side, waits are error",
        "caller waits for side",
    ]
    assert cuda.sync_debug_mode == "default"
    assert cuda.current.name == "caller"


def test_all_captures_of_a_process_share_a_stream(cuda: FakeCuda) -> None:
    new_capture = CudaCaptures()
    assert cuda.num_streams == 0
    for _ in range(3):
        new_capture().warm_up(cuda.compute)
    assert cuda.num_streams == 1


def test_work_that_waits_is_detected_outside_a_capture(cuda: FakeCuda) -> None:
    with pytest.raises(RuntimeError, match="synchronizing") as caught:
        CudaCapture().warm_up(cuda.waiting)
    assert not isinstance(caught.value, CaptureError)
    assert "begin" not in cuda.calls
    assert cuda.calls[-1] == "caller waits for side"
    assert (cuda.sync_debug_mode, cuda.current.name) == ("default", "caller")


def test_a_warning_that_is_an_error_leaves_no_mode_behind(cuda: FakeCuda) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="prototype"):
            CudaCapture().warm_up(cuda.compute)
    assert cuda.sync_debug_mode == "default"


def test_out_of_memory_is_detected_outside_a_capture(cuda: FakeCuda) -> None:
    def run_out() -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        CudaCapture().warm_up(run_out)
    assert "begin" not in cuda.calls


def test_recorded_work_runs_once_and_is_replayed(cuda: FakeCuda) -> None:
    captured = CudaCapture().record(cuda.compute)
    assert cuda.calls == ["begin", "side, waits are default", "end"]
    assert captured.replay().tolist() == [1, 1]
    assert cuda.calls[-1] == "replay"


@pytest.mark.parametrize("at_end", [False, True])
def test_a_failed_capture_names_its_first_error_and_restores_the_stream(
    cuda: FakeCuda, at_end: bool
) -> None:
    def fail() -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    if at_end:
        cuda.end_error = RuntimeError("operation failed due to a previous error during capture")
    with pytest.raises(CaptureError, match=r"^CUDA out of memory$"):
        CudaCapture().record(fail)
    assert cuda.current.name == "caller"


def test_a_capture_that_fails_only_at_its_end_is_an_error(cuda: FakeCuda) -> None:
    cuda.end_error = RuntimeError("the capture is invalid")
    with pytest.raises(CaptureError, match=r"^the capture is invalid$"):
        CudaCapture().record(cuda.compute)


def test_work_that_triton_cannot_compile_runs_without_graphs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    errors = pytest.importorskip("triton.runtime.errors", reason="no Triton for this platform")

    def fail() -> None:
        raise errors.OutOfResources(300_000, 232_448, "shared memory")

    def candidate(_: Capture, __: int) -> Candidate[None]:
        return Candidate(warm_up=fail, record=lambda: None, compare=lambda _: None)

    settings = GraphSettings(None, RecorderOfNothing)
    run = CaptureRun("graphs", settings, ProcessGroup.single(), torch.device("cpu"))
    assert run.capture([4, 1], candidate) == {}
    assert not settings.may_capture("graphs")
    assert "running without graphs: out of resource: shared memory" in caplog.text


class RecorderOfNothing:
    """A capture that is never used."""

    def warm_up(self, compute: Callable[[], Tensor]) -> None:
        raise AssertionError

    def record(self, compute: Callable[[], Tensor]) -> Captured:
        raise AssertionError


def wait(x: Tensor) -> Tensor:
    """Wait for the device."""
    return x * float(x.sum())


def test_cuda_refuses_work_that_waits_and_captures_the_next(gpu: torch.device) -> None:
    x = torch.ones(4, device=gpu)
    capture = CudaCapture()
    with pytest.raises(RuntimeError, match="synchroniz"):
        capture.warm_up(lambda: wait(x))
    torch.cuda.empty_cache()
    capture.warm_up(lambda: x + 1)
    captured = capture.record(lambda: x + 1)
    x.fill_(5)
    assert captured.replay().tolist() == [6.0] * 4


def test_cuda_survives_a_failed_capture(gpu: torch.device) -> None:
    if not ends_failed_captures(torch.__version__):
        pytest.skip("this torch does not end a capture that fails")
    x = torch.ones(4, device=gpu)
    with pytest.raises(CaptureError):
        CudaCapture().record(lambda: wait(x))
    torch.cuda.empty_cache()
    assert (x + 1).tolist() == [2.0] * 4


CUDA = torch.device("cuda")
BY_8 = [64, 56, 48, 40, 32, 24, 16, 8, 4, 2, 1]


@pytest.mark.parametrize(
    ("max_batch_size", "sizes"),
    [
        (1, [1]),
        (3, [3, 2, 1]),
        (8, [8, 4, 2, 1]),
        (30, [30, 24, 16, 8, 4, 2, 1]),
        (64, BY_8),
        (100, [100, 96, 80, *BY_8]),
        (256, [256, 240, 224, 208, 192, 176, 160, 144, 128, 112, 96, 80, *BY_8]),
    ],
)
def test_there_are_graphs_up_to_the_largest_batch(max_batch_size: int, sizes: list[int]) -> None:
    assert GraphSettings(None, CudaCapture).sizes_up_to(max_batch_size) == sizes


def test_the_number_of_graphs_is_bounded() -> None:
    for max_batch_size in (*range(1, 300), 1000, 100_000):
        sizes = GraphSettings(None, CudaCapture).sizes_up_to(max_batch_size)
        assert len(sizes) <= 24
        assert sizes[0] == min(max_batch_size, 256)


def test_a_kind_that_cannot_be_captured_leaves_the_others() -> None:
    settings = GraphSettings(None, CudaCapture)
    settings.not_capturable.add("pieces")
    assert not settings.may_capture("pieces")
    assert settings.may_capture("graphs")


def test_the_graph_sizes_are_those_that_a_batch_may_need() -> None:
    settings = GraphSettings((4, 1, 32, 2, 2), CudaCapture)
    assert settings.sizes_up_to(8) == [4, 2, 1]
    assert GraphSettings((), CudaCapture).sizes_up_to(8) == []


@pytest.mark.parametrize(
    ("version", "ends"),
    [
        ("2.11.0", False),
        ("2.12.1+cu128", False),
        ("2.13.0+cu130", True),
        ("2.14.0a0+git12", True),
        ("3.0.0", True),
    ],
)
def test_memory_is_released_unless_a_failed_capture_is_open(
    monkeypatch: pytest.MonkeyPatch, version: str, ends: bool
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(None))
    monkeypatch.setattr(torch, "__version__", version)
    assert ends_failed_captures(version) == ends
    settings = GraphSettings(None, CudaCapture)
    empty_cache(CUDA, None)
    empty_cache(CUDA, settings)
    assert len(calls) == 2
    settings.capture_failed = True
    assert not settings.may_capture("graphs")
    assert settings.holds_cache == (not ends)
    empty_cache(CUDA, settings)
    assert len(calls) == (3 if ends else 2)
    empty_cache(torch.device("cpu"), None)
    assert len(calls) == (3 if ends else 2)
