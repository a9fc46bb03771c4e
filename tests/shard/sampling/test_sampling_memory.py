"""The memory of sampling on a device, measured on tensors that have none: device "meta"."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from millrace_proto.sampling import Sampling
from millrace_shard.batch.sequence import PARAMETERS
from millrace_shard.batch.sequence import Sequence as Admitted
from millrace_shard.kernels.scores import RowMasks
from millrace_shard.sampling import processors
from millrace_shard.sampling.sampler import Sampler, SamplingRows

META = torch.device("meta")
VOCAB, LENGTH = 2000, 6000
TILE = 1 << 16
"""Elements; 32 rows of the vocabulary, or 10 of the longest sequences."""
KINDS = {
    "top-p": Sampling(do_sample=True, top_p=0.9),
    "typical-p": Sampling(do_sample=True, typical_p=0.9),
    "top-k": Sampling(do_sample=True, top_k=1500),
    "penalties": Sampling(repetition_penalty=1.1, frequency_penalty=0.1),
    "watermark": Sampling(watermark=True),
    "mask": Sampling(do_sample=True),
}


def reference_of(tensor: Tensor) -> Any:
    """A weak reference to the memory of `tensor`."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Measures the greatest number of bytes of tensors on device "meta" at a time, without `held`."""

    def __init__(self, held: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak: int = 0
        self._held = {reference_of(each).cdata for each in held}
        self._storages: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.device == META:
                reference = reference_of(each)
                if reference.cdata not in self._held:
                    size = each.untyped_storage().nbytes()
                    self._storages[reference.cdata] = reference, size
        self._storages = {
            key: held for key, held in self._storages.items() if not held[0].expired()
        }
        self.peak = max(self.peak, sum(size for _, size in self._storages.values()))
        return result


def peak(kind: Sampling, num_rows: int, *, masked: bool) -> int:
    """Bytes in addition to the logits while `num_rows` rows of the greatest length are sampled."""
    columns = Admitted(
        slot=0, request_id=0, input_ids=np.zeros(LENGTH, dtype=np.int64), parameters=kind
    ).columns()
    rows = SamplingRows(
        parameters=np.full(num_rows, columns, dtype=PARAMETERS),
        positions=np.full(num_rows, LENGTH),
        table_rows=np.arange(num_rows),
    )
    table = torch.zeros(num_rows, LENGTH, dtype=torch.int32, device=META)
    sampler = Sampler(table, ())
    logits = torch.zeros(num_rows, VOCAB, device=META)
    bits = torch.zeros(num_rows, -(-VOCAB // 32), dtype=torch.int32, device=META)
    masks = RowMasks(rows=np.arange(num_rows), bits=bits) if masked else None
    with Meter([table, logits, bits]) as meter:
        sampler.sample(logits, rows, masks)
    return int(meter.peak)


@pytest.mark.parametrize("name", KINDS)
def test_scratch_memory_does_not_grow_with_the_batch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processors, "DEVICE_TILE_ELEMENTS", TILE)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    few, many = (peak(KINDS[name], rows, masked=name == "mask") for rows in (64, 512))
    assert 4 * TILE // 8 < few < 100 * TILE
    # A row's token, log probability and parameters.
    assert many - few < 448 * 200
