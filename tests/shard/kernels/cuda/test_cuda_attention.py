"""The Triton attention against its definition and against itself: on a GPU, or else in Triton's interpreter."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from millrace_testing.router.pages import Pages, Span

pytest.importorskip("triton", reason="no Triton for this platform")

import triton
import triton.language as tl

from millrace_shard.kernels.cuda import cuda_attention
from millrace_shard.kernels.cuda.cuda_attention import (
    SharedMemory,
    fixed_tiling,
    max_spans,
    span_tiling,
    tile_tiling,
)
from millrace_shard.kernels.cuda.operators import CudaKernels
from millrace_shard.kernels.cuda.triton_attention import sequence_of
from millrace_shard.kernels.cuda.triton_softmax import (
    LONG_SPAN,
    MIDDLE_SPAN,
    NUM_MIDDLE_SPANS,
    NUM_SHORT_SPANS,
    SHORT_SPAN,
    span_of,
    span_start,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# The interpreter casts to bfloat16 by cutting off, as numpy has none.
TOLERANCE = {BF16: 0.03, FP16: 0.003, FP32: 5e-6}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONTEXTS = (275, 257, 17, 1, 256)
SPANS: tuple[Span, ...] = ((0, 268, 275), (1, 256, 257), (2, 0, 17), (3, 0, 1), (4, 255, 256))
"""Ends of prompts, and single queries on both sides of the end of a span. Few: the interpreter is slow.

Seven queries in groups of three, and seventeen alone, are a tile and a part of one.
"""
COUNTS = [end - begin for _, begin, end in SPANS]


def pages(
    heads: tuple[int, int, int] = (3, 1, 32),
    dtype: torch.dtype = FP32,
    *,
    deterministic: bool = True,
    contexts: tuple[int, ...] = CONTEXTS,
) -> Pages:
    kernels = CudaKernels(deterministic=deterministic)
    return Pages.random(kernels, contexts, heads=heads, dtype=dtype, device=DEVICE)


def distance(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected).abs().max())


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "fixed"])
@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        *(((9, 3, 64), BF16), ((2, 2, 80), FP16), ((12, 1, 16), FP32), ((2, 1, 256), BF16)),
        *(((7, 1, 16), FP16), ((10, 2, 16), FP32), ((40, 1, 16), FP16)),
    ],
    ids=lambda each: "-".join(map(str, each)) if isinstance(each, tuple) else str(each)[6:],
)
def test_attention_matches_its_definition(
    heads: tuple[int, int, int], dtype: torch.dtype, deterministic: bool
) -> None:
    paged = pages(heads, dtype, deterministic=deterministic)
    assert distance(paged.attend(SPANS), paged.expected(SPANS)) < TOLERANCE[dtype]


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "fixed"])
@pytest.mark.parametrize(("window", "softcap"), [(1, None), (20, 5.0), (None, 2.0)])
def test_windows_and_caps_match_their_definitions(
    window: int | None, softcap: float | None, deterministic: bool
) -> None:
    paged = pages(deterministic=deterministic)
    out = paged.attend(SPANS, window, softcap)
    assert distance(out, paged.expected(SPANS, window, softcap)) < TOLERANCE[FP32]


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "fixed"])
@pytest.mark.parametrize("window", [None, 20])
def test_sinks_join_the_softmax_and_have_no_values(window: int | None, deterministic: bool) -> None:
    paged = pages((6, 2, 16), deterministic=deterministic)
    sinks = torch.tensor([-3.0, 0.0, 1.0, 2.0, 4.0, 30.0], device=DEVICE)
    out = paged.attend(SPANS, window, sinks=sinks)
    expected = paged.expected(SPANS, window, sinks=sinks)
    assert distance(out, expected) < TOLERANCE[FP32]
    assert distance(paged.attend(SPANS, window), expected) > 0.1
    for span, rows in zip(SPANS, torch.split(out, COUNTS), strict=True):
        assert torch.equal(paged.attend([span], window, sinks=sinks), rows)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dtype", [FP16, FP32], ids=["fp16", "fp32"])
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_chunks(
    dtype: torch.dtype, window: int | None
) -> None:
    paged = pages(dtype=dtype)
    together = torch.split(paged.attend(SPANS, window), COUNTS)
    for (sequence, begin, end), rows in zip(SPANS, together, strict=True):
        cuts = sorted({begin, max(begin, end - 9), max(begin, end - 2), end - 1, end})
        pieces = [paged.attend([(sequence, a, b)], window) for a, b in itertools.pairwise(cuts)]
        assert torch.equal(torch.cat(pieces), rows)


def test_a_prompt_that_crosses_a_span_has_the_same_bits_whole_and_cut() -> None:
    paged = pages((2, 1, 16), contexts=(259,))
    whole = paged.attend([(0, 250, 259)])
    pieces = [paged.attend([(0, begin, end)]) for begin, end in ((250, 256), (256, 259))]
    singles = [paged.attend([(0, at, at + 1)]) for at in (255, 256)]
    assert torch.equal(torch.cat(pieces), whole)
    assert torch.equal(torch.cat(singles), whole[5:7])


def test_a_window_that_begins_within_a_span_is_right_and_batch_invariant() -> None:
    paged, window = pages((2, 1, 16), FP16, contexts=(700,)), 300
    prompt = paged.attend([(0, 690, 700)], window)
    assert distance(prompt, paged.expected([(0, 690, 700)], window)) < TOLERANCE[FP16]
    for at in (690, 699):
        assert torch.equal(paged.attend([(0, at, at + 1)], window)[0], prompt[at - 690])


def test_a_single_query_has_the_same_bits_in_any_batch_in_fast_mode_too() -> None:
    paged = pages(deterministic=False)
    together = torch.split(paged.attend(SPANS), COUNTS)
    for span, rows in zip(SPANS, together, strict=True):
        if len(rows) == 1:
            assert torch.equal(paged.attend([span]), rows)


@pytest.mark.parametrize("programs", [1, 2])
def test_how_many_programs_share_the_spans_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, programs: int
) -> None:
    paged = pages((2, 1, 16), FP16, contexts=(900,))
    singles = [(0, 899, 900)]
    expected = paged.attend(singles)
    monkeypatch.setattr(cuda_attention, "PROGRAMS", programs)
    assert torch.equal(paged.attend(singles), expected)


@pytest.mark.parametrize("window", [None, 2500])
def test_long_contexts_are_split_into_longer_spans(window: int | None) -> None:
    edge = SHORT_SPAN * NUM_SHORT_SPANS
    length = edge + LONG_SPAN + 60
    paged = pages((2, 1, 16), FP16, contexts=(length,))
    single = [(0, length - 1, length)]
    out = paged.attend(single, window)
    assert distance(out, paged.expected(single, window)) < TOLERANCE[FP16]


def test_padding_and_width_of_a_graph_change_nothing() -> None:
    paged = pages()
    singles = [(1, 256, 257), (4, 255, 256), (2, 16, 17)]
    alone = paged.attend(singles)
    batch = paged.batch(singles)
    tables = torch.zeros(5, 200, dtype=torch.int32, device=DEVICE)
    tables[:3, : batch.block_tables.shape[1]] = batch.block_tables
    padded = replace(
        batch,
        query_starts=torch.arange(6, dtype=torch.int32, device=DEVICE),
        context_lengths=torch.cat([batch.context_lengths, batch.context_lengths.new_ones(2)]),
        block_tables=tables,
        num_queries=(1,) * 5,
        num_context=(*batch.num_context, 1, 1),
    )
    out = paged.attend_batch([*singles, (3, 0, 1), (3, 0, 1)], padded)
    assert torch.equal(out[:3], alone)


def test_queries_may_be_a_view_into_a_merged_projection() -> None:
    paged = pages()
    spans = SPANS[1:3]
    batch = paged.batch(spans)
    queries = torch.cat([paged.queries[b][begin:end] for b, begin, end in spans])
    merged = torch.cat([queries, torch.full_like(queries, math.nan)], dim=1)[:, : queries.shape[1]]
    by_head = queries.transpose(0, 1).contiguous().transpose(0, 1)
    expected = paged.attend(spans)
    for view in (merged, by_head):
        out = paged.kernels.attend(view, batch, paged.cache, scale=32**-0.5)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "fixed"])
def test_values_beyond_the_end_of_a_sequence_never_matter(deterministic: bool) -> None:
    paged = pages(deterministic=deterministic)
    before = paged.attend(SPANS)
    stored = torch.zeros(paged.cache.keys.shape[:2], dtype=torch.bool, device=DEVICE)
    whole = paged.batch([(b, 0, length) for b, length in enumerate(CONTEXTS)])
    stored.view(-1)[whole.cache_rows] = True
    for each in (paged.cache.keys, paged.cache.values):
        each[~stored] = 3e4
    assert before.isfinite().all()
    assert torch.equal(paged.attend(SPANS), before)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_sequence_that_is_not_finite_fails_visibly_and_affects_no_other(bad: float) -> None:
    paged = pages(contexts=(40, 33, 17))
    spans = [(0, 33, 40), (1, 32, 33), (2, 0, 17)]
    counts = [end - begin for _, begin, end in spans]
    before = torch.split(paged.attend(spans), counts)
    # Positive queries make an infinite key an infinite score.
    paged.queries[2].abs_()
    block, offset = divmod(10, 16)
    paged.cache.keys[paged.tables[2, block], offset] = bad
    after = torch.split(paged.attend(spans), counts)
    for sequence, (was, now) in enumerate(zip(before, after, strict=True)):
        if sequence != 2:
            assert torch.equal(was, now)
    assert not after[2][10:].isfinite().all(-1).any()


@triton.jit  # type: ignore[untyped-decorator]
def _spans(positions, spans, begins, ends, size: tl.constexpr):  # type: ignore[no-untyped-def]
    lane = tl.arange(0, size)
    span = span_of(tl.load(positions + lane))
    tl.store(spans + lane, span)
    tl.store(begins + lane, span_start(span))
    tl.store(ends + lane, span_start(span + 1))


@triton.jit  # type: ignore[untyped-decorator]
def _owners(starts, owners, num_sequences, tokens_per_tile: tl.constexpr):  # type: ignore[no-untyped-def]
    slot = tl.program_id(0)
    tl.store(owners + slot, sequence_of(slot, starts, num_sequences, tokens_per_tile))


def test_every_tile_has_a_slot() -> None:
    counts = torch.randint(1, 12, (140,), generator=torch.Generator().manual_seed(0))
    counts[130] = 40
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    owners = torch.empty(int(starts[-1]) // 4 + 140, dtype=torch.int32, device=DEVICE)
    _owners[(len(owners),)](starts.int().to(DEVICE), owners, 140, tokens_per_tile=4)
    result = owners.tolist()
    for sequence, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=False)):
        first = start // 4 + sequence
        num_tiles = -(-count // 4)
        assert result[first : first + num_tiles] == [sequence] * num_tiles
        assert result.index(sequence) == first


def test_spans_tile_the_positions() -> None:
    edge = SHORT_SPAN * NUM_SHORT_SPANS
    last = edge + MIDDLE_SPAN * NUM_MIDDLE_SPANS
    near = [SHORT_SPAN, edge, edge + MIDDLE_SPAN, last, last + LONG_SPAN, last + 50 * LONG_SPAN]
    positions = torch.tensor([max(0, at + step) for at in near for step in (-2, -1, 0, 1)])
    positions = torch.cat([positions, positions.new_tensor([5000] * 8)]).int().to(DEVICE)
    spans, begins, ends = (torch.empty_like(positions) for _ in range(3))
    _spans[(1,)](positions, spans, begins, ends, size=32)
    assert ((begins <= positions) & (positions < ends)).all()
    assert (begins % SHORT_SPAN == 0).all()
    assert spans.tolist() == [max_spans(at + 1) - 1 for at in positions.tolist()]
    assert [max_spans(n) for n in (0, 1, 256, 257, edge, edge + 1)] == [0, 1, 1, 2, 32, 33]
    assert [max_spans(n) for n in (last, last + 1, 1 << 20)] == [80, 81, 576]


@pytest.mark.parametrize(
    ("capability", "num_bytes", "stages"),
    [
        ((8, 0), 166912, 3),
        ((8, 6), 101376, 3),
        ((8, 9), 101376, 3),
        ((9, 0), 232448, 3),
        ((10, 0), 232448, 3),
        ((12, 0), 101376, 3),
        # A tensor core that reads shared memory needs a buffer for each stage.
        ((9, 0), 101376, 2),
    ],
)
def test_prompts_load_ahead_on_gpus_with_little_shared_memory(
    capability: tuple[int, int], num_bytes: int, stages: int
) -> None:
    memory = SharedMemory(num_bytes, capability)
    tiling = tile_tiling(torch.bfloat16, 128).fitted(4, 256, memory)
    assert (tiling.rows, tiling.num_stages) == (128, stages)
    assert tiling.rows * 256 + (stages - memory.free_stages) * 2 * 64 * 256 <= num_bytes


def test_warps_that_share_rows_leave_room_for_their_weights() -> None:
    """Compiled with three stages, this tiling takes 102400 bytes."""
    memory = SharedMemory(101376, (8, 6))
    assert fixed_tiling(torch.bfloat16, 256).fitted(2, 512, memory).num_stages == 2
    assert span_tiling(torch.bfloat16, 128).fitted(4, 256, memory).num_stages == 3
