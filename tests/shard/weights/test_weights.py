from __future__ import annotations

import json
import logging
import os
from itertools import chain, repeat
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from safetensors.torch import save_file

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.errors import WeightsError
from millrace_shard.weights import read_ahead
from millrace_shard.weights.checkpoint_files import RemoteFile, missing_files, weight_files
from millrace_shard.weights.read_ahead import CHUNK, LoadProgress, ReadAhead, readable_size
from millrace_shard.weights.safetensor_files import SafetensorFiles
from millrace_shard.weights.weights import Columns, Weights
from millrace_testing.engines.kernels import make_kernels
from millrace_testing.models.models import read_model, save_tiny

CPU = torch.device("cpu")
MATRIX = torch.arange(48.0).view(8, 6)


def weights(
    folder: Path, rank: int = 0, world_size: int = 1, dtype: torch.dtype = torch.float32
) -> Weights:
    return Weights(folder, dtype=dtype, device=CPU, group=ProcessGroup(rank, world_size, CPU))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(
        {
            "model.a.weight": MATRIX,
            "model.b.weight": -MATRIX,
            "model.a.bias": MATRIX[:, 0].clone(),
            "model.b.bias": MATRIX[:, 1].clone(),
            "heads": torch.arange(12.0).view(6, 2),
        },
        tmp_path / "model.safetensors",
    )
    return tmp_path


def test_replicated_tensors_are_whole_and_in_the_requested_dtype(folder: Path) -> None:
    read = weights(folder, 1, 2, torch.bfloat16).replicated("model.a.weight", 8, 6)
    assert read.dtype == torch.bfloat16
    assert torch.equal(read, MATRIX.bfloat16())


def test_columns_split_outputs_and_merge_projections(folder: Path) -> None:
    parts = [Columns("model.a.weight", 8), Columns("model.b.weight", 4, 2)]
    for rank in range(2):
        rows = slice(4 * rank, 4 * rank + 4)
        merged = weights(folder, rank, 2).columns(parts, 6)
        assert merged.shape == (8, 6)
        assert torch.equal(merged.copied(), torch.cat([MATRIX[rows], -MATRIX[rows]]))
    biases = [Columns("model.a.bias", 8), Columns("model.b.bias", 4, 2)]
    assert torch.equal(
        weights(folder, 1, 2).biases(biases), torch.cat([MATRIX[4:, 0], MATRIX[4:, 1]])
    )


@pytest.mark.parametrize(
    ("world_size", "heads_of_ranks"),
    [
        (1, [[0, 1, 2]]),
        (3, [[0], [1], [2]]),
        (6, [[0], [0], [1], [1], [2], [2]]),
    ],
)
def test_heads_are_shared_where_there_are_fewer_than_ranks(
    world_size: int, heads_of_ranks: list[list[int]], folder: Path
) -> None:
    heads = torch.arange(12.0).view(3, 2, 2)
    for rank, expected in enumerate(heads_of_ranks):
        read = weights(folder, rank, world_size).columns([Columns("heads", 3, 2)], 2)
        assert torch.equal(read.copied(), heads[expected].flatten(0, 1))


def test_rows_split_inputs(folder: Path) -> None:
    for rank in range(3):
        read = weights(folder, rank, 3).rows("model.a.weight", 8, 6)
        assert torch.equal(read.copied(), MATRIX[:, 2 * rank : 2 * rank + 2])


def test_kept_tensors_are_copies_in_the_requested_dtype(folder: Path) -> None:
    read = weights(folder, dtype=torch.bfloat16)
    stored = read.columns([Columns("model.a.weight", 8), Columns("model.b.weight", 8)], 6)
    kept = stored.copied()
    assert kept.dtype == stored.dtype == torch.bfloat16
    assert torch.equal(kept, torch.cat([MATRIX, -MATRIX]).bfloat16())
    one = read.rows("model.a.weight", 8, 6)
    assert isinstance(one.parts[0], torch.Tensor)
    assert one.copied().data_ptr() != one.parts[0].data_ptr()


def test_released_weights_are_read_again(tmp_path: Path) -> None:
    large = torch.randn(100, 1000)
    save_file({"a": large, "b": -large}, tmp_path / "model.safetensors")
    read = weights(tmp_path)
    stored = read.columns([Columns("a", 100), Columns("b", 100)], 1000)
    assert torch.equal(stored.copied(), torch.cat([large, -large]))
    read.release()
    assert torch.equal(stored.copied(), torch.cat([large, -large]))


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_the_vocabulary_is_padded_with_zeros(world_size: int, folder: Path) -> None:
    parts = [
        weights(folder, r, world_size).vocabulary("model.a.weight", 8, 6) for r in range(world_size)
    ]
    assert len({part.shape for part in parts}) == 1
    whole = torch.cat(parts)
    assert torch.equal(whole[:8], MATRIX)
    assert (whole[8:] == 0).all()


def test_names_are_read_with_and_without_the_prefix(folder: Path) -> None:
    read = weights(folder)
    assert torch.equal(read.replicated("a.weight", 8, 6), MATRIX)
    assert read.replicated("model.heads", 6, 2).shape == (6, 2)
    assert "a.weight" in read
    assert "model.model.heads" not in read


def test_a_missing_tensor_is_named(folder: Path) -> None:
    with pytest.raises(WeightsError, match=r"tensor model\.c\.weight is missing"):
        weights(folder).replicated("model.c.weight", 8, 6)


def test_a_wrong_shape_is_named(folder: Path) -> None:
    with pytest.raises(WeightsError, match=r"model\.a\.weight has shape \[8, 6\].*says \[8, 7\]"):
        weights(folder).rows("model.a.weight", 8, 7)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        WeightsError, match=r"no model\.safetensors and no model\.safetensors\.index"
    ):
        weights(tmp_path)


@pytest.mark.parametrize("kept", [0, 7, 60, -1])
def test_a_truncated_file_is_named(kept: int, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(WeightsError, match=r"model\.safetensors is damaged or incomplete"):
        weights(folder)


def shard(folder: Path) -> Path:
    save_file({"model.a": MATRIX}, folder / "model-00001-of-00002.safetensors")
    save_file({"model.b": -MATRIX}, folder / "model-00002-of-00002.safetensors")
    index = folder / "model.safetensors.index.json"
    files = {
        "model.a": "model-00001-of-00002.safetensors",
        "model.b": "model-00002-of-00002.safetensors",
    }
    index.write_text(json.dumps({"weight_map": files}))
    return index


def test_whole_weights_are_read_beside_an_index_of_parts(tmp_path: Path) -> None:
    shard(tmp_path)
    save_file({"model.a": MATRIX + 1}, tmp_path / "model.safetensors")
    assert torch.equal(weights(tmp_path).replicated("model.a", 8, 6), MATRIX + 1)


def test_sharded_files_are_read_with_and_without_an_index(tmp_path: Path) -> None:
    index = shard(tmp_path)
    for _ in range(2):
        read = weights(tmp_path)
        assert torch.equal(read.replicated("model.a", 8, 6), MATRIX)
        assert torch.equal(read.replicated("model.b", 8, 6), -MATRIX)
        index.unlink(missing_ok=True)


def test_an_index_of_missing_files_beside_the_whole_is_not_used(tmp_path: Path) -> None:
    shard(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    save_file({"model.a": 2 * MATRIX, "model.b": -MATRIX}, tmp_path / "model.safetensors")
    assert torch.equal(weights(tmp_path).replicated("model.a", 8, 6), 2 * MATRIX)
    assert not {"model-00002-of-00002.safetensors", "model.safetensors"} & {
        *missing_files(tmp_path)
    }
    files = [
        RemoteFile(path, 1) for path in ("model.safetensors", "model-00001-of-00002.safetensors")
    ]
    index = (tmp_path / "model.safetensors.index.json").read_bytes()
    assert [file.path for file in weight_files(files, index=index)] == ["model.safetensors"]


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    shard(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    read = weights(tmp_path)
    assert read.replicated("model.a", 8, 6).shape == (8, 6)
    with pytest.raises(WeightsError, match=r"model-00002-of-00002\.safetensors is named by"):
        read.replicated("model.b", 8, 6)


def test_a_shard_without_its_tensor_is_named(tmp_path: Path) -> None:
    shard(tmp_path)
    save_file({"model.c": MATRIX}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(
        WeightsError, match=r"model-00002-of-00002\.safetensors lacks tensor model\.b"
    ):
        weights(tmp_path).replicated("model.b", 8, 6)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_damaged_index_is_named(content: str, tmp_path: Path) -> None:
    shard(tmp_path).write_text(content)
    with pytest.raises(WeightsError, match=r"model\.safetensors\.index\.json is damaged"):
        weights(tmp_path)


def test_an_index_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    index = shard(tmp_path)
    index.write_text(json.dumps({"weight_map": {"model.a": "../other/model.safetensors"}}))
    with pytest.raises(WeightsError, match=r"index\.json names \.\./other/model\.safetensors"):
        SafetensorFiles(tmp_path)


@pytest.mark.parametrize("rank", [0, 1])
def test_progress_is_of_the_whole_checkpoint_on_every_rank(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("millrace_shard.weights.read_ahead.INTERVAL_SECONDS", 0.0)
    save_file({name: torch.zeros(500, 1000) for name in "ab"}, tmp_path / "model.safetensors")
    read = weights(tmp_path, rank, 2, torch.bfloat16)
    with caplog.at_level(logging.INFO):
        read.rows("a", 500, 1000)
        read.release()
        read.columns([Columns("b", 500)], 1000)
        assert len(caplog.records) == 1
        read.release()
        read.release()
    told = [record.message for record in caplog.records]
    assert told == ["loaded 2 MB of 4 MB", "loaded 4 MB of 4 MB"]


GB = 10**9


def told(caplog: pytest.LogCaptureFixture, *times: float) -> list[str]:
    """Log messages for a checkpoint of 16 GB, read 4 GB at a time; reading begins at the first of `times`."""
    clock = chain(times, repeat(times[-1]))
    progress = LoadProgress(16 * GB, lambda: next(clock))
    with caplog.at_level(logging.INFO):
        for _ in times[1:]:
            progress.add(4 * GB)
    return [record.message for record in caplog.records]


def test_progress_is_logged_every_few_seconds(caplog: pytest.LogCaptureFixture) -> None:
    expected = ["loaded 8.0 GB of 16.0 GB", "loaded 16.0 GB of 16.0 GB"]
    assert told(caplog, 100.0, 103.0, 106.0, 109.0, 112.0) == expected


def test_a_fast_load_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, 100.0, 101.0, 101.5, 102.0, 102.0) == []


def test_sizes_have_a_unit_that_shows_them() -> None:
    assert readable_size(7_300_000) == "7 MB"
    assert readable_size(999_400_000) == "999 MB"
    assert readable_size(1_000_000_000) == "1.0 GB"
    assert readable_size(16_060_000_000) == "16.1 GB"


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
    result: list[tuple[int, int]] = []
    close = ReadAhead.close

    def close_once_asked(ahead: ReadAhead) -> None:
        result.extend(asked.next(1))
        close(ahead)

    monkeypatch.setattr(ReadAhead, "close", close_once_asked)
    save_tiny(tmp_path, model_type)
    read_model(tmp_path, make_kernels("plain", deterministic=False))
    assert result == [((tmp_path / "model.safetensors").stat().st_size, 0)]
