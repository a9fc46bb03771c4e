"""Asynchronous copies, on CPU and, if there is one, on a busy GPU."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from millrace_shard.batch.sequence import PARAMETERS
from millrace_shard.device.transfers import (
    StagedCopies,
    copy_directly,
    copy_to,
    download_on_side_stream,
    start_download,
    upload,
    upload_columns,
    upload_into,
)
from millrace_shard.kernels.stored_weight import StoredWeight

CPU = torch.device("cpu")


def test_an_uploaded_array_is_a_copy() -> None:
    values = np.arange(4)
    result = upload(values, CPU)
    values[:] = 9
    assert result.tolist() == [0, 1, 2, 3]


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


BUFFER_BYTES = 64


@dataclass
class LateCopy:
    """A copy that takes place when it is waited for."""

    out: Tensor
    staged: Tensor
    is_done: bool = False

    def synchronize(self) -> None:
        """Do it now, once."""
        if not self.is_done:
            self.out.copy_(self.staged)
        self.is_done = True


@dataclass
class LateDevice:
    """Remembers the copies that it was sent."""

    sent: list[LateCopy] = field(default_factory=list)

    def send(self, out: Tensor, staged: Tensor) -> LateCopy:
        """Do nothing yet."""
        self.sent.append(LateCopy(out, staged))
        return self.sent[-1]

    def finish(self) -> None:
        """All copies are done at last."""
        for copy in self.sent:
            copy.synchronize()

    def copies(self) -> StagedCopies:
        """Through two buffers."""
        buffers = [torch.empty(BUFFER_BYTES, dtype=torch.uint8) for _ in range(2)]
        return StagedCopies(buffers, self.send)


@pytest.mark.parametrize("shape", [(100,), (33, 4), (5, 16), (1, 1), (0, 4), (3, 2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_buffer_is_filled_again_only_when_it_has_been_read(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    device = LateDevice()
    copies = device.copies()
    outs = [torch.full(shape, -1.0, dtype=dtype) for _ in range(3)]
    values = [torch.randn(shape) for _ in outs]
    for out, value in zip(outs, values, strict=True):
        copies(out, value.clone())
    device.finish()
    for out, value in zip(outs, values, strict=True):
        assert torch.equal(out, value.to(dtype))
    assert all(copy.staged.nbytes <= BUFFER_BYTES for copy in device.sent)


def test_the_host_is_one_buffer_ahead_of_the_device() -> None:
    device = LateDevice()
    device.copies()(torch.empty(5 * BUFFER_BYTES // 4), torch.randn(5 * BUFFER_BYTES // 4))
    assert [copy.is_done for copy in device.sent] == [True, True, True, False, False]


def test_strided_values_and_rows_beyond_a_buffer_are_copied() -> None:
    device = LateDevice()
    copies = device.copies()
    whole = torch.randn(9, 40)
    columns, wide, scalar = torch.empty(9, 7), torch.empty(9, 40), torch.empty(())
    copies(columns, whole[:, 3:10])
    copies(wide, whole)
    copies(scalar, torch.tensor(2.5))
    device.finish()
    assert torch.equal(columns, whole[:, 3:10])
    assert torch.equal(wide, whole)
    assert scalar == 2.5


def test_on_cpu_nothing_is_staged() -> None:
    assert copy_to(CPU) is copy_directly


def test_a_stored_weight_is_copied_by_its_own_method() -> None:
    device = LateDevice()
    parts = (torch.randn(3, 8), torch.randn(5, 8))
    weight = StoredWeight(parts, torch.bfloat16, CPU, device.copies())
    copied = weight.copied()
    device.finish()
    assert torch.equal(copied, torch.cat(parts).bfloat16())
    assert device.sent


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_weights_reach_a_gpu_through_pinned_memory() -> None:
    values = torch.randn(3, 50 << 20).half()
    out = torch.empty(150, 1 << 20, dtype=torch.float16, device="cuda")
    copy_to(out.device)(out, values.view(150, 1 << 20))
    assert torch.equal(out.cpu().view(3, -1), values)
