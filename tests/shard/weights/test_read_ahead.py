"""Reading ahead requests all files in order, and never more bytes than its limit."""

from __future__ import annotations

import os
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.models.load import load_model
from millrace_shard.weights import read_ahead
from millrace_shard.weights.read_ahead import CHUNK, ReadAhead
from millrace_shard.weights.weights import Weights
from millrace_testing.engines.kernels import make_kernels
from millrace_testing.models.models import save_tiny

LONG = 10
"""Seconds for a thread that has nothing else to do."""


class Asked:
    """Stands in for posix_fadvise; remembers what was asked for, as (file size, offset)."""

    def __init__(self) -> None:
        self.pieces = SimpleQueue[tuple[int, int]]()

    def __call__(self, file: int, offset: int, length: int, advice: int) -> None:
        assert (length, advice) == (CHUNK, os.POSIX_FADV_WILLNEED)
        self.pieces.put((os.fstat(file).st_size, offset))

    def next(self, count: int) -> list[tuple[int, int]]:
        return [self.pieces.get(timeout=LONG) for _ in range(count)]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    asked = Asked()
    monkeypatch.setattr(os, "posix_fadvise", asked)
    return asked


def sparse(path: Path, size: int) -> Path:
    with path.open("wb") as file:
        file.truncate(size)
    return path


def test_files_are_requested_one_after_another(tmp_path: Path, asked: Asked) -> None:
    paths = [sparse(tmp_path / "one", CHUNK + 1), sparse(tmp_path / "two", 5)]
    ahead = ReadAhead(paths, max_bytes=1 << 40)
    assert asked.next(3) == [(CHUNK + 1, 0), (CHUNK + 1, CHUNK), (5, 0)]
    ahead.close()
    assert asked.pieces.empty()


def test_reading_ahead_is_bounded(tmp_path: Path, asked: Asked) -> None:
    size = 6 * CHUNK
    ahead = ReadAhead([sparse(tmp_path / "one", size)], max_bytes=2 * CHUNK)
    assert asked.next(2) == [(size, 0), (size, CHUNK)]
    ahead.used(CHUNK)
    assert asked.next(1) == [(size, 2 * CHUNK)]
    ahead.used(2 * CHUNK)
    assert asked.next(2) == [(size, 3 * CHUNK), (size, 4 * CHUNK)]
    ahead.close()
    assert asked.pieces.empty()


def test_files_that_cannot_be_read_ahead_are_left_to_their_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ReadAhead([tmp_path / "missing"], max_bytes=CHUNK).close()
    monkeypatch.delattr(os, "posix_fadvise")
    ReadAhead([sparse(tmp_path / "one", 1)], max_bytes=CHUNK).close()


def test_weights_are_read_ahead_as_others_are_used(
    tmp_path: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tiny(tmp_path, "llama")
    monkeypatch.setattr(read_ahead, "MEMORY_SHARE", 0)
    cpu = torch.device("cpu")
    weights = Weights(tmp_path, dtype=torch.float32, device=cpu, group=ProcessGroup(0, 1, cpu))
    assert asked.pieces.empty()
    weights.replicated("model.norm.weight", model.config.hidden_size)
    assert asked.next(1) == [((tmp_path / "model.safetensors").stat().st_size, 0)]
    weights.close()


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_both_paths_ask_for_a_model_that_they_load(
    model_type: str, tmp_path: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[int, int]] = []
    close = ReadAhead.close

    def close_once_asked(ahead: ReadAhead) -> None:
        found.extend(asked.next(1))
        close(ahead)

    monkeypatch.setattr(ReadAhead, "close", close_once_asked)
    save_tiny(tmp_path, model_type)
    load_model(
        tmp_path,
        dtype=torch.float32,
        kernels=make_kernels("plain", deterministic=False),
        group=ProcessGroup.single(),
        device=torch.device("cpu"),
    )
    assert found == [((tmp_path / "model.safetensors").stat().st_size, 0)]
