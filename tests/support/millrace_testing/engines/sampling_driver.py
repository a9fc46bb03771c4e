"""The sampler on rows of the reference: tables, masks and biases laid out as the runner does it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import Tensor

from millrace_proto.sequence import Grammar, GrammarKind
from millrace_shard.batch.sequence import PARAMETERS, Sequence
from millrace_shard.device import transfers
from millrace_shard.kernels.scores import RowMasks, SamplingKernels
from millrace_shard.sampling import sampler, sampling_rows, warpers
from millrace_shard.sampling.sampler import Sampled, Sampler, SamplingRows
from millrace_shard.sampling.watermark import Watermark
from millrace_testing.engines.sampling_reference import Row

GRAMMAR = Grammar(GrammarKind.REGEX, ".*")
KERNELS: list[SamplingKernels] = []
"""The kernels of the samplers, if any."""
WITHOUT_KERNELS = ("as it is", "few candidates", "nothing read back", "small tiles")
WAYS = (*WITHOUT_KERNELS, "kernels") if find_spec("triton") else WITHOUT_KERNELS


@contextmanager
def going(way: str) -> Iterator[None]:
    """Sample rows in another way, which must not change the results."""
    with pytest.MonkeyPatch.context() as patch:
        if way == "few candidates":
            patch.setattr(warpers, "NUM_CANDIDATES", 8)
            patch.setattr(sampler, "NUM_CANDIDATES", 8)
            patch.setattr(warpers, "BLOCKS", (2,))
        elif way == "nothing read back":
            patch.setattr(transfers, "is_synchronous", lambda _: False)
        elif way == "small tiles":
            patch.setattr(sampling_rows, "TILE_ELEMENTS", 90)
        elif way == "kernels":
            patch.setattr(transfers, "is_synchronous", lambda _: False)
            triton_sampling = importlib.import_module("millrace_shard.kernels.cuda.operators")
            KERNELS.append(triton_sampling.TritonSampling())
        try:
            yield
        finally:
            KERNELS.clear()


def sampler_for(rows: list[Row], top_n: list[int] | None = None) -> tuple[Sampler, SamplingRows]:
    """A history table with the rows in reverse, and garbage wherever there is no token."""
    width = max(row.position for row in rows) + 3
    history = torch.full((len(rows), width), 7, dtype=torch.int32)
    parameters = np.zeros(len(rows), dtype=PARAMETERS)
    for i, row in enumerate(rows):
        ids = row.prompt + row.generated
        slot = len(rows) - 1 - i
        history[slot, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        sequence = Sequence(
            slot=slot,
            request_id=0,
            input_ids=np.array(ids, dtype=np.int64),
            generated_tokens=len(row.generated),
            parameters=row.parameters,
            top_n_tokens=top_n[i] if top_n else 0,
            min_new_tokens=row.min_new_tokens,
            grammar=None if row.allowed is None else GRAMMAR,
        )
        parameters[i] = sequence.columns()
    eos = next((row.eos for row in rows if row.eos), ())
    watermark = Watermark(rows[0].gamma, rows[0].delta)
    sampler = Sampler(history, eos, watermark, KERNELS[0] if KERNELS else None)
    for i, row in enumerate(rows):
        sampler.admit(len(rows) - 1 - i, row.parameters.bias, row.parameters.rules)
    return sampler, SamplingRows(
        parameters=parameters,
        positions=np.array([row.position for row in rows]),
        table_rows=np.arange(len(rows))[::-1].copy(),
    )


def masks_of(rows: list[Row]) -> RowMasks | None:
    """Masks of the rows that have a grammar, in another order than theirs."""
    masked = [i for i, row in enumerate(rows) if row.allowed is not None][::-1]
    if not masked:
        return None
    words = -(-len(rows[0].logits) // 32)
    bits = np.zeros((len(masked), words * 32), dtype=np.uint8)
    for place, i in enumerate(masked):
        bits[place, list(rows[i].allowed or ())] = 1
    packed = np.packbits(bits, axis=1, bitorder="little").view("<i4")
    return RowMasks(rows=np.array(masked), bits=torch.from_numpy(packed.astype(np.int32)))


def sample(rows: list[Row], top_n: list[int] | None = None) -> Sampled:
    """One step of these rows."""
    sampler, columns = sampler_for(rows, top_n)
    return sampler.sample(torch.tensor([row.logits for row in rows]), columns, masks_of(rows))


def columns(sampled: Sampled, row: int) -> tuple[object, ...]:
    """All that a row yields, log probabilities by their bits."""
    top = [
        (id_, bits(torch.tensor([logprob])))
        for owner, id_, logprob in top_of(sampled)
        if owner == row
    ]
    return sampled.ids[row].item(), bits(sampled.logprobs[row : row + 1]), top


def top_of(sampled: Sampled) -> list[tuple[int, int, float]]:
    """Candidates as (row, id, log probability), ascending."""
    parts = [top.chosen(top.best) for top in sampled.top]
    return sorted(
        candidate
        for part in parts
        for candidate in zip(*(column.tolist() for column in part), strict=True)
    )


def bits(values: Tensor) -> list[int]:
    """The bits of float32 values."""
    return [int(value) for value in values.view(torch.int32).tolist()]
