"""Queries that see later keys, up to an end of their own, against the definition; and bits that depend on no chunk."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from millrace_shard.arrays import Ints
from millrace_shard.kernels.agreement import ragged_batch
from millrace_shard.kernels.base import Kernels, LayerCache
from millrace_testing.engines.kernels import make_kernels

CONTEXTS = (330, 40)
IMAGES = ((20, 90), (250, 301))
"""Of the first sequence: each query of one sees all of its keys. The first one crosses pages and tiles."""
HEADS, KV_HEADS, DIM = 4, 2, 32
KINDS = [
    *(("plain", torch.float32, fixed) for fixed in (True, False)),
    *(("cpu", dtype, True) for dtype in (torch.float32, torch.bfloat16)),
    *(("triton", torch.float32, fixed) for fixed in (True, False)),
]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
Kind = tuple[str, torch.dtype, bool]


def kernels_of(name: str, dtype: torch.dtype, *, deterministic: bool) -> Kernels:
    if name != "triton":
        return make_kernels(name, deterministic=deterministic)
    pytest.importorskip("triton", reason="no Triton for this platform")
    from millrace_shard.kernels.cuda.operators import CudaKernels

    return CudaKernels(deterministic=deterministic)


def ends_of(sequence: int) -> Ints:
    ends = np.arange(1, CONTEXTS[sequence] + 1)
    for start, end in IMAGES if sequence == 0 else ():
        ends[start:end] = end
    return ends


class Prompts:
    """Keys and values of two sequences in a cache, and queries over them."""

    def __init__(self, kind: Kind) -> None:
        name, dtype, deterministic = kind
        self.kernels = kernels_of(name, dtype, deterministic=deterministic)
        self.device = torch.device(
            "cuda" if name == "triton" and torch.cuda.is_available() else "cpu"
        )
        generator = torch.Generator().manual_seed(1)

        def random(heads: int) -> Tensor:
            values = torch.randn(sum(CONTEXTS), heads, DIM, generator=generator)
            return values.to(dtype).to(self.device)

        self.queries, self.keys, self.values = map(random, (HEADS, KV_HEADS, KV_HEADS))
        whole = ragged_batch(
            CONTEXTS, CONTEXTS, block_size=self.kernels.block_size, device=self.device
        )
        count = int(whole.block_tables.max()) + 1
        self.cache: LayerCache = self.kernels.new_cache(
            num_blocks=count, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=dtype, device=self.device
        )
        self.kernels.zero_blocks(self.cache, torch.arange(count, device=self.device))
        self.kernels.store(self.keys, self.values, whole, self.cache)
        self.tables = whole.block_tables

    def attend(
        self, starts: tuple[int, int], contexts: tuple[int, int], window: int | None
    ) -> Tensor:
        """The rows from `starts` up to `contexts` of both sequences in one step."""
        counts = [end - start for start, end in zip(starts, contexts, strict=True)]
        batch = ragged_batch(
            counts, contexts, block_size=self.kernels.block_size, device=self.device
        )
        spans = list(zip(starts, contexts, strict=True))
        ends = np.concatenate([ends_of(row)[slice(*span)] for row, span in enumerate(spans)])
        key_ends = torch.from_numpy(ends.astype(np.int32)).to(self.device)
        begins = (0, CONTEXTS[0])
        queries = torch.cat(
            [self.queries[at + a : at + b] for at, (a, b) in zip(begins, spans, strict=True)]
        )
        return self.kernels.attend(
            queries,
            replace(batch, key_ends=key_ends, block_tables=self.tables),
            self.cache,
            scale=0.2,
            window=window,
        )

    def expected(self, window: int | None) -> Tensor:
        outs = []
        for row, context in enumerate(CONTEXTS):
            own = slice(sum(CONTEXTS[:row]), sum(CONTEXTS[: row + 1]))
            q, k, v = (
                each[own].double().cpu().transpose(0, 1)
                for each in (self.queries, self.keys, self.values)
            )
            k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=0) for each in (k, v))
            at = torch.arange(context)
            seen = at[None, :] < torch.from_numpy(ends_of(row))[:, None]
            if window is not None:
                seen &= at[None, :] > at[:, None] - window
            scores = (q @ k.transpose(1, 2) * 0.2).masked_fill(~seen, -torch.inf)
            outs.append((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
        return torch.cat(outs)


@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_query_sees_the_keys_up_to_its_end(kind: Kind, window: int | None) -> None:
    prompts = Prompts(kind)
    out = prompts.attend((0, 0), CONTEXTS, window)
    tolerance = TOLERANCES[kind[1]]
    torch.testing.assert_close(
        out.double().cpu(), prompts.expected(window), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind[2]], ids=str)
def test_its_bits_depend_neither_on_chunks_nor_on_the_batch(kind: Kind, window: int | None) -> None:
    prompts = Prompts(kind)
    whole = prompts.attend((0, 0), CONTEXTS, window)
    first, second = torch.split(whole, list(CONTEXTS))
    # The second cut is inside of an image whose first keys are cached.
    for begin, end in ((0, 90), (47, 90), (90, 250), (249, 301), (301, 330)):
        part = prompts.attend((begin, 39), (end, 40), window)
        assert torch.equal(part[:-1], first[begin:end])
        assert torch.equal(part[-1], second[39])
