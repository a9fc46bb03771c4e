"""Asynchronous copies, on CPU and, if there is one, on a busy GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from millrace_shard.batch.sequence import PARAMETERS
from millrace_shard.device.transfers import (
    download_on_side_stream,
    start_download,
    upload,
    upload_columns,
    upload_into,
)

CPU = torch.device("cpu")


def test_what_is_uploaded_is_a_copy() -> None:
    values = np.arange(4)
    found = upload(values, CPU)
    values[:] = 9
    assert found.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_field_of_wider_rows_arrives(num_rows: int) -> None:
    rows = np.zeros(num_rows, dtype=PARAMETERS)
    rows["top_p"] = 0.5
    rows["temperature"] = 7
    assert upload(rows["top_p"], CPU).tolist() == [0.5] * num_rows


def test_columns_keep_their_lengths() -> None:
    columns = [np.arange(3), np.empty(0, dtype=np.int64), np.array([7])]
    assert [column.tolist() for column in upload_columns(columns, CPU)] == [[0, 1, 2], [], [7]]


def test_a_buffer_stays_where_it_is() -> None:
    buffer = torch.zeros(2, 2, dtype=torch.int64)
    place = buffer.data_ptr()
    upload_into(buffer, np.array([[1, 2], [3, 4]]))
    assert buffer.tolist() == [[1, 2], [3, 4]]
    assert buffer.data_ptr() == place


def test_on_cpu_nothing_is_copied_back() -> None:
    values = torch.arange(3)
    assert start_download(values) is values
    assert download_on_side_stream(values).tolist() == [0, 1, 2]


@pytest.fixture
def gpu() -> torch.device:
    """Skips where there is no GPU: pinned memory belongs to its driver."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    return torch.device("cuda", 0)


def _keep_busy() -> None:
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]


def test_no_copy_in_flight_is_overwritten(gpu: torch.device) -> None:
    """The device is kept busy, so that all copies are submitted before the first of them runs."""
    buffer = torch.zeros(2, 8, dtype=torch.int64, device=gpu)
    torch.cuda.synchronize()
    _keep_busy()
    seen, back = [], []
    column = torch.empty(0)
    for number in range(100):
        upload_into(buffer, np.full((2, 8), number))
        (column, _) = upload_columns([np.full(8, number), np.full(3, -1)], gpu)
        seen.append(buffer.sum() + column.sum())
        back.append(start_download(column))
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    _keep_busy()
    done.synchronize()
    assert [int(b[0]) for b in back] == list(range(100))
    assert download_on_side_stream(column).tolist() == [99] * 8
    assert [int(s) for s in seen] == [24 * number for number in range(100)]
