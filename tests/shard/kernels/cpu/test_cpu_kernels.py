"""The compiled operators against float64 and against themselves: a row alone, in batches, in chunks and threaded."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partialmethod

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from millrace_shard.kernels.agreement import CPU, ragged_batch
from millrace_shard.kernels.base import LayerCache
from millrace_shard.kernels.build import load_operators
from millrace_shard.kernels.cpu.operators import CpuKernels
from millrace_shard.kernels.layer_weights import NormWeights
from millrace_shard.kernels.plain import FixedShapeLinear, PlainKernels
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.kernels.toolchain import find_compiler
from millrace_testing.engines.kernels import (
    CACHE_DTYPES,
    SCALES,
    TILE_UNITS,
    as_kept,
    tiles_by,
)
from millrace_testing.models.models import poison

BF16, FP32 = torch.bfloat16, torch.float32
TOLERANCE = {BF16: 0.02, FP32: 5e-6}
PAGE = 64
CONTEXTS = (300, 65, 191, 1, 129, 64)
SPANS = ((0, 0, 300), (1, 64, 65), (2, 100, 191), (3, 0, 1), (4, 127, 129), (5, 63, 64))
"""A prompt, decodes on both sides of a page boundary, and ends of longer prompts: (sequence, begin, end)."""
COUNTS = [end - begin for _, begin, end in SPANS]


@pytest.fixture(scope="module", autouse=True)
def operators() -> Iterator[None]:
    if find_compiler(os.environ.get("CXX")) is None:
        pytest.skip("no C++ compiler")
    load_operators()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


pytestmark = pytest.mark.usefixtures("seed")


def error(out: Tensor, expected: Tensor) -> float:
    """Greatest distance from float64, in parts of 1 + its size."""
    return float(((out.double() - expected).abs() / (1 + expected.abs())).max())


@pytest.fixture(params=[*TILE_UNITS, "bf16", "fp32"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.dtype]:
    """bfloat16 by tiles, on whatever multiplies them here, and by the operators for CPUs without."""
    if request.param in TILE_UNITS:
        with tiles_by(request.param):
            yield BF16
        return
    if request.param == "bf16":
        without_tiles = partialmethod(CpuKernels.__init__, tiles=False)
        monkeypatch.setattr(CpuKernels, "__init__", without_tiles)
    yield FP32 if request.param == "fp32" else BF16


@pytest.fixture
def kernels() -> CpuKernels:
    return CpuKernels(deterministic=True)


@dataclass(frozen=True)
class Paged:
    """Sequences of random keys, values and queries, stored in pages among pages full of NaN."""

    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]
    tables: Tensor
    cache: LayerCache
    cache_dtype: torch.dtype | None

    @classmethod
    def random(
        cls,
        *,
        heads: int,
        kv_heads: int,
        dim: int,
        dtype: torch.dtype,
        cache_dtype: torch.dtype | None = None,
    ) -> Paged:
        generator = torch.Generator().manual_seed(heads * dim)

        def random(length: int, count: int) -> Tensor:
            return torch.randn(length, count, dim, generator=generator).to(dtype)

        width = max(CONTEXTS) // PAGE + 1
        order = torch.randperm(len(CONTEXTS) * width, generator=generator) + 1
        paged = cls(
            queries=[random(length, heads) for length in CONTEXTS],
            keys=[random(length, kv_heads) for length in CONTEXTS],
            values=[random(length, kv_heads) for length in CONTEXTS],
            tables=order.view(len(CONTEXTS), width).int(),
            cache=CpuKernels(deterministic=True).new_cache(
                num_blocks=len(order) + 1,
                num_kv_heads=kv_heads,
                head_dim=dim,
                dtype=cache_dtype or dtype,
                device=torch.device("cpu"),
                scales=SCALES,
            ),
            cache_dtype=cache_dtype,
        )
        poison(paged.cache)
        paged.fill()
        return paged

    def fill(self) -> None:
        """Clear the pages in use and store everything."""
        used = [row[: -(-n // PAGE)] for row, n in zip(self.tables, CONTEXTS, strict=True)]
        CpuKernels(deterministic=True).zero_blocks(self.cache, torch.cat(used).long())
        whole = self.batch([(b, 0, length) for b, length in enumerate(CONTEXTS)])
        CpuKernels(deterministic=True).store(
            torch.cat(self.keys), torch.cat(self.values), whole, self.cache
        )

    def batch(self, spans: Sequence[tuple[int, int, int]]) -> RaggedBatch:
        positions = [torch.arange(begin, end) for _, begin, end in spans]
        tables = self.tables[[sequence for sequence, _, _ in spans]]
        counts = tuple(end - begin for _, begin, end in spans)
        starts = torch.tensor([0, *counts]).cumsum(0)
        return RaggedBatch(
            ids=torch.zeros(sum(counts), dtype=torch.int64),
            positions=torch.cat(positions),
            cache_rows=torch.cat(
                [
                    row[at // PAGE].long() * PAGE + at % PAGE
                    for row, at in zip(tables, positions, strict=True)
                ]
            ),
            query_starts=starts.int(),
            context_lengths=torch.tensor([end for _, _, end in spans], dtype=torch.int32),
            block_tables=tables,
            logit_rows=starts[1:] - 1,
            num_queries=counts,
            num_context=tuple(end for _, _, end in spans),
        )

    def attend(
        self,
        spans: Sequence[tuple[int, int, int]],
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        queries = torch.cat([self.queries[b][begin:end] for b, begin, end in spans])
        return CpuKernels(deterministic=True).attend(
            queries,
            self.batch(spans),
            self.cache,
            scale=queries.shape[-1] ** -0.5,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )

    def expected(
        self,
        span: tuple[int, int, int],
        window: int | None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention in float64, straight from its definition."""
        sequence, begin, end = span
        queries = self.queries[sequence][begin:end].double()
        group = queries.shape[1] // self.keys[sequence].shape[1]
        keys, values = (
            as_kept(each[sequence][:end], self.cache_dtype, scale).repeat_interleave(group, dim=1)
            for each, scale in zip((self.keys, self.values), SCALES, strict=True)
        )
        scores = torch.einsum("qhd,khd->hqk", queries, keys) / math.sqrt(queries.shape[-1])
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        age = torch.arange(begin, end)[:, None] - torch.arange(end)
        seen = (age >= 0) & (age < (window or end))
        scores = scores.masked_fill(~seen, -math.inf)
        if sinks is not None:
            column = sinks.double().view(-1, 1, 1).expand(-1, end - begin, 1)
            scores = torch.cat((scores, column), dim=-1)
        weights = scores.softmax(-1)[..., :end]
        return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)


HEADS = [(9, 3, 64), (32, 8, 64), (4, 4, 80), (8, 1, 128), (71, 1, 16), (2, 2, 16), (6, 2, 40)]
RULES = [(None, None), (100, None), (1, None), (70, 5.0), (1000, 30.0)]


CASES = [
    (cache_dtype, *heads)
    for cache_dtype in CACHE_DTYPES
    for heads in (HEADS if cache_dtype is None else [(9, 3, 64), (6, 2, 40)])
]


@pytest.mark.parametrize(("window", "softcap"), RULES)
@pytest.mark.parametrize(("cache_dtype", "heads", "kv_heads", "dim"), CASES)
def test_attention_matches_its_definition(
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None,
    heads: int,
    kv_heads: int,
    dim: int,
    window: int | None,
    softcap: float | None,
) -> None:
    paged = Paged.random(
        heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, cache_dtype=cache_dtype
    )
    out = paged.attend(SPANS, window, softcap)
    expected = torch.cat([paged.expected(span, window, softcap) for span in SPANS])
    assert (out.double() - expected).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES[:3])
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 64), (6, 1, 40)])
def test_sinks_join_the_softmax_and_have_no_values(
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None,
    heads: int,
    kv_heads: int,
    dim: int,
    window: int | None,
) -> None:
    paged = Paged.random(
        heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, cache_dtype=cache_dtype
    )
    sinks = torch.tensor([-3.0, 0.0, 1.0, 2.0, 4.0, 30.0])
    out = paged.attend(SPANS, window, sinks=sinks)
    expected = torch.cat([paged.expected(span, window, sinks=sinks) for span in SPANS])
    assert (out.double() - expected).abs().max() < TOLERANCE[dtype]
    assert (paged.attend(SPANS, window).double() - expected).abs().max() > 0.1
    for (sequence, begin, end), rows in zip(SPANS, torch.split(out, COUNTS), strict=True):
        cuts = [(sequence, at, min(end, at + 7)) for at in range(begin, end, 7)]
        assert torch.equal(
            torch.cat([paged.attend([cut], window, sinks=sinks) for cut in cuts]), rows
        )


INVARIANT = [
    (cache_dtype, window, *heads)
    for cache_dtype in CACHE_DTYPES
    for window in ((None, 1, 70, 200) if cache_dtype is None else (None, 70))
    for heads in [(9, 3, 64), (4, 4, 80), (32, 8, 64)][: 3 if cache_dtype is None else 2]
]


@pytest.mark.parametrize(("cache_dtype", "window", "heads", "kv_heads", "dim"), INVARIANT)
def test_a_row_has_the_same_bits_in_any_batch(
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None,
    window: int | None,
    heads: int,
    kv_heads: int,
    dim: int,
) -> None:
    paged = Paged.random(
        heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, cache_dtype=cache_dtype
    )
    together = torch.split(paged.attend(SPANS, window, 20.0), COUNTS)
    for (sequence, begin, end), rows in zip(SPANS, together, strict=True):
        for length in (1, 7, 64):
            pieces = [
                paged.attend([(sequence, at, min(end, at + length))], window, 20.0)
                for at in range(begin, end, length)
            ]
            assert torch.equal(torch.cat(pieces), rows)


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_a_row_has_the_same_bits_on_any_number_of_threads(
    dtype: torch.dtype, cache_dtype: torch.dtype | None
) -> None:
    paged = Paged.random(heads=9, kv_heads=3, dim=64, dtype=dtype, cache_dtype=cache_dtype)
    alone = paged.attend(SPANS)
    torch.set_num_threads(3)
    try:
        assert torch.equal(paged.attend(SPANS), alone)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_values_beyond_the_end_of_a_sequence_never_matter(
    dtype: torch.dtype, cache_dtype: torch.dtype | None
) -> None:
    paged = Paged.random(heads=9, kv_heads=3, dim=64, dtype=dtype, cache_dtype=cache_dtype)
    before = paged.attend(SPANS)
    # Slots past the end of each sequence, in its own pages: left over from others, finite.
    ends = [(b, length, -(-length // PAGE) * PAGE) for b, length in enumerate(CONTEXTS)]
    tails = paged.batch([span for span in ends if span[1] < span[2]])
    junk = torch.full((len(tails.positions), 3, 64), 3e4, dtype=dtype)
    CpuKernels(deterministic=True).store(junk, -junk, tails, paged.cache)
    assert torch.equal(paged.attend(SPANS), before)


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("poisoned", ["keys", "values"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_sequence_that_is_not_finite_fails_visibly_and_affects_no_other(
    dtype: torch.dtype, cache_dtype: torch.dtype | None, poisoned: str, bad: float
) -> None:
    paged = Paged.random(heads=4, kv_heads=2, dim=64, dtype=dtype, cache_dtype=cache_dtype)
    # Positive queries make an infinite key an infinite score, which no fast exponential may swallow.
    paged.queries[2].abs_()
    paged.values[2].mul_(0.1)
    before = torch.split(paged.attend(SPANS), COUNTS)
    getattr(paged, poisoned)[2][120, :, 0] = bad
    paged.fill()
    after = torch.split(paged.attend(SPANS), COUNTS)
    for sequence, (was, now) in enumerate(zip(before, after, strict=True)):
        if sequence != 2:
            assert torch.equal(was, now)
    # Tokens 100 to 190 of it: those from 120 on see the bad one.
    assert not after[2][20:].isfinite().all(-1).any()


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES[1:])
def test_codes_match_plain_torch(
    dtype: torch.dtype, cache_dtype: torch.dtype, kernels: CpuKernels
) -> None:
    plain = PlainKernels(deterministic=True, block_size=PAGE)
    batch = ragged_batch([200], [200], block_size=PAGE)
    new = (
        torch.randn(200, 2, 3, 40)
        * torch.tensor([1e-30, 1e-6, 1.0, 1e6]).repeat(50)[:, None, None, None]
    )
    new[3, :, 1], new[7, :, :, 5], new[8, :, :, 0] = 0.0, math.nan, -math.inf
    keys, values = new.to(dtype).unbind(1)
    caches = []
    for each in (kernels, plain):
        cache = each.new_cache(
            num_blocks=5, num_kv_heads=3, head_dim=40, dtype=cache_dtype, device=CPU, scales=SCALES
        )
        each.zero_blocks(cache, torch.arange(5))
        each.store(keys, values, batch, cache)
        caches.append(cache)
    ours, theirs = caches
    width = 2 if dtype is BF16 else 1
    own_keys = ours.keys.view(torch.uint8).view(5, 3, 40 // width, PAGE, width)
    own_values = ours.values.view(torch.uint8).view(5, 3, PAGE // width, 40, width)
    ours_in_rows = (
        own_keys.permute(0, 3, 1, 2, 4).reshape(5, PAGE, 3, 40),
        own_values.permute(0, 2, 4, 1, 3).reshape(5, PAGE, 3, 40),
    )
    for own, other in zip(ours_in_rows, (theirs.keys, theirs.values), strict=True):
        assert torch.equal(own, other.view(torch.uint8))
    if cache_dtype == torch.int8:
        assert ours.scales is not None
        assert theirs.scales is not None
        for own, other in zip(ours.scales, theirs.scales, strict=True):
            torch.testing.assert_close(own.transpose(1, 2), other, rtol=0, atol=0, equal_nan=True)


def test_indices_out_of_range_are_refused(kernels: CpuKernels) -> None:
    paged = Paged.random(heads=2, kv_heads=2, dim=16, dtype=FP32)
    batch = paged.batch(SPANS)
    queries = torch.cat([paged.queries[b][begin:end] for b, begin, end in SPANS])
    keys = torch.zeros(len(queries), 2, 16)
    for tables in (torch.full_like(batch.block_tables, 99), -batch.block_tables):
        with pytest.raises(RuntimeError, match="block out of range"):
            kernels.attend(queries, replace(batch, block_tables=tables), paged.cache, scale=1.0)
    too_long = replace(batch, context_lengths=batch.context_lengths + 1000)
    with pytest.raises(RuntimeError, match="bad sequence lengths"):
        kernels.attend(queries, too_long, paged.cache, scale=1.0)
    for rows in (batch.cache_rows + 10**6, batch.cache_rows - 10**6):
        with pytest.raises(RuntimeError, match="cache row out of range"):
            kernels.store(keys, keys, replace(batch, cache_rows=rows), paged.cache)
    qkv, rope = torch.zeros(len(queries), 6 * 16), torch.zeros(100, 16)
    with pytest.raises(RuntimeError, match="position out of range"):
        kernels.rope_store(qkv, rope, batch, paged.cache, num_heads=2, num_kv_heads=2)


def stored(cache: LayerCache) -> tuple[Tensor, Tensor]:
    """Keys and values [blocks * 64, heads, dim] out of the layout of pages.h."""
    blocks, heads, _, dim = cache.keys.shape
    pair = 2 if cache.keys.dtype == BF16 else 1
    keys = cache.keys.view(blocks, heads, dim // pair, PAGE, pair).permute(0, 3, 1, 2, 4)
    values = cache.values.view(blocks, heads, PAGE // pair, dim, pair).permute(0, 2, 4, 1, 3)
    return keys.reshape(-1, heads, dim), values.reshape(-1, heads, dim)


@pytest.mark.parametrize(("dim", "rotary_dim"), [(64, 64), (80, 32), (128, 96), (64, 20), (16, 0)])
def test_rope_rotates_halves_and_stores(
    dtype: torch.dtype, kernels: CpuKernels, dim: int, rotary_dim: int
) -> None:
    paged = Paged.random(heads=6, kv_heads=2, dim=dim, dtype=dtype)
    batch = paged.batch(SPANS)
    qkv = torch.randn(len(batch.positions), 10 * dim).to(dtype)
    heads = qkv.clone().view(-1, 10, dim)
    angles = torch.randn(max(CONTEXTS), rotary_dim // 2)
    rope = torch.cat((angles.cos(), angles.sin()), dim=1)
    queries = kernels.rope_store(qkv, rope, batch, paged.cache, num_heads=6, num_kv_heads=2)

    angle = angles[batch.positions].double().unsqueeze(1)
    turned = torch.polar(torch.ones_like(angle), angle) * torch.complex(
        heads[..., : rotary_dim // 2].double(),
        heads[..., rotary_dim // 2 : rotary_dim].double(),
    )
    expected = torch.cat((turned.real, turned.imag, heads[..., rotary_dim:].double()), dim=-1)
    keys, values = stored(paged.cache)
    at = batch.cache_rows
    limit = TOLERANCE[dtype]
    assert (queries.double() - expected[:, :6]).abs().max() < limit
    assert (keys[at].double() - expected[:, 6:8]).abs().max() < limit
    assert torch.equal(values[at], heads[:, 8:])


def test_store_takes_strided_rows(dtype: torch.dtype, kernels: CpuKernels) -> None:
    paged = Paged.random(heads=4, kv_heads=4, dim=64, dtype=dtype)
    batch = paged.batch(SPANS)
    both = torch.randn(4, len(batch.positions), 2, 64).to(dtype).permute(1, 0, 2, 3)
    kernels.store(both[:, :, 0], both[:, :, 1], batch, paged.cache)
    keys, values = stored(paged.cache)
    assert torch.equal(keys[batch.cache_rows], both[:, :, 0])
    assert torch.equal(values[batch.cache_rows], both[:, :, 1])


@pytest.mark.parametrize("width", [8, 64, 100, 576])
def test_norms_match_their_definition(dtype: torch.dtype, kernels: CpuKernels, width: int) -> None:
    x, residual, weight = (torch.randn(37, width).to(dtype) for _ in range(3))

    def expected(values: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(values.double(), (width,), weight.double(), 1e-5)

    total = (x.float() + residual.float()).to(dtype)
    normed = kernels.add_rms_norm(x, residual, weight[0], 1e-5)
    assert torch.equal(residual, total)
    limit = TOLERANCE[dtype]
    assert error(normed, expected(total, weight[0])) < limit
    assert torch.equal(kernels.rms_norm(total, weight[0], 1e-5), normed)
    # Heads of a merged projection, as a query norm gets them.
    heads = torch.randn(5, 9, width).to(dtype)[:, 2:6]
    normed = kernels.rms_norm(heads, weight[1], 1e-5)
    assert normed.shape == heads.shape
    assert error(normed, expected(heads, weight[1])) < limit


@pytest.mark.parametrize("width", [8, 64, 100, 576])
def test_norms_whose_weights_lack_1_are_rounded_once(
    dtype: torch.dtype, kernels: CpuKernels, width: int
) -> None:
    x, residual, weight = (torch.randn(37, width).to(dtype) for _ in range(3))
    norm = NormWeights(weight=weight[0], eps=1e-5, plus_one=True, wide=True)
    total = (x.float() + residual.float()).to(dtype)
    normed = kernels.add_norm(x, residual, norm)
    assert torch.equal(residual, total)
    assert torch.equal(kernels.norm(total, norm), normed)
    expected = F.rms_norm(total.double(), (width,), weight[0].double() + 1, 1e-5)
    assert normed.dtype == dtype
    # Of values that were rounded twice, a fifth would differ.
    assert (normed != expected.to(dtype)).float().mean() < (0.02 if dtype == torch.bfloat16 else 1)
    assert error(normed, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("width", [8, 100, 1536])
def test_silu_mul_matches_its_definition(
    dtype: torch.dtype, kernels: CpuKernels, width: int
) -> None:
    gate_up = (torch.randn(33, 2 * width) * 3).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = F.silu(gate) * up
    assert error(kernels.silu_mul(gate_up), expected) < TOLERANCE[dtype]


def test_silu_of_every_bfloat16_number_is_all_but_exact(kernels: CpuKernels) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    every = every[every.isfinite() & (every > -80) & (every.abs() > 2**-120)]
    every = every[: len(every) // 16 * 16]
    out = kernels.silu_mul(torch.cat([every, torch.ones_like(every)])[None])[0]
    exact = F.silu(every.double())
    assert ((out.double() - exact).abs() <= 2**-8 * exact.abs()).all()
    assert (out == exact.bfloat16()).double().mean() > 0.99


SIZES = [
    (96, 64),
    (576, 576),
    (960, 576),
    (1024, 576),
    (1000, 130),
    (70, 4100),
    (40, 8192),
    (24, 33),
    (1, 16),
]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("out", "inputs"), SIZES)
def test_linear_is_right_and_independent_of_the_batch(
    dtype: torch.dtype, kernels: CpuKernels, out: int, inputs: int, with_bias: bool
) -> None:
    weight = (torch.randn(out, inputs) / math.sqrt(inputs)).to(dtype)
    bias = torch.randn(out).to(dtype) if with_bias else None
    x = torch.randn(600, inputs).to(dtype)
    linear = kernels.linear(weight.clone(), None if bias is None else bias.clone())
    whole = linear(x)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert error(whole, expected) < TOLERANCE[dtype]
    for rows in (1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 511, 512, 513):
        for start in (0, 600 - rows):
            assert torch.equal(linear(x[start : start + rows]), whole[start : start + rows])
    if isinstance(linear, FixedShapeLinear):
        return  # where oneDNN has AMX, it divides the sums of a few outputs among threads
    torch.set_num_threads(3)
    try:
        assert torch.equal(linear(x), whole)
        # Packed for more threads, in narrower blocks.
        assert torch.equal(kernels.linear(weight, bias)(x), whole)
    finally:
        torch.set_num_threads(1)


def test_no_rows_are_accepted(dtype: torch.dtype, kernels: CpuKernels) -> None:
    nothing = torch.empty(0, 64, dtype=dtype)
    assert kernels.linear(torch.randn(40, 64).to(dtype))(nothing).shape == (0, 40)
    assert kernels.rms_norm(nothing, torch.ones(64, dtype=dtype), 1e-5).shape == (0, 64)
    assert kernels.silu_mul(nothing).shape == (0, 32)
