"""Rows of odd vocabularies have one alignment on a device, and nothing beyond the vocabulary is ever chosen."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from millrace_proto.sampling import Sampling
from millrace_shard.batch.sequence import PARAMETERS
from millrace_shard.batch.sequence import Sequence as Admitted
from millrace_shard.sampling.sampler import Sampler, SamplingRows
from millrace_testing.engines.sampling_driver import going, sample, top_of
from millrace_testing.engines.sampling_reference import Row

META = torch.device("meta")
KINDS = [
    Sampling(),
    Sampling(do_sample=True),
    Sampling(do_sample=True, top_p=0.9),
    Sampling(do_sample=True, typical_p=0.9, top_k=2),
    Sampling(do_sample=True, min_p=0.1),
]


class Softmaxes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the bytes of the rows that softmaxes read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.row_bytes: list[int] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in (torch.ops.aten._softmax.default, torch.ops.aten._log_softmax.default):
            self.row_bytes.append(args[0].stride(0) * args[0].itemsize)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("vocab", [5, 501, 502, 503, 504])
@pytest.mark.parametrize("kind", KINDS)
def test_softmax_reads_rows_that_begin_at_16_bytes(
    vocab: int, kind: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    columns = Admitted(slot=0, request_id=0, input_ids=np.zeros(3, np.int64), parameters=kind)
    rows = SamplingRows(
        parameters=np.full(3, columns.columns(), dtype=PARAMETERS),
        positions=np.full(3, 3),
        table_rows=np.arange(3),
    )
    sampler = Sampler(torch.zeros(3, 4, dtype=torch.int32, device=META), ())
    with Softmaxes() as softmaxes:
        sampler.sample(torch.zeros(3, vocab, device=META), rows)
    assert softmaxes.row_bytes
    assert all(size % 16 == 0 for size in softmaxes.row_bytes)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_never_chosen(kind: Sampling) -> None:
    logits = [[1.0, 0.5, 0.9, 0.2, 1.1], [math.nan] * 5, [-math.inf] * 5, [1.0, math.inf, 0, 0, 0]]
    rows = [Row(logits=each, prompt=[0], generated=[], parameters=kind) for each in logits]
    with going("nothing read back"):
        found = sample(rows, [5] * 4)
    assert found.failed.tolist() == [False, True, True, True]
    assert all(0 <= id_ < 5 for id_ in found.ids.tolist())
    assert all(id_ < 5 for _, id_, _ in top_of(found))
    expected = sample(rows[:1], [5])
    assert found.ids[0] == expected.ids[0]
    assert found.logprobs[0].item() == pytest.approx(expected.logprobs[0].item())
