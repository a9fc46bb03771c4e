"""Counts of the tokens of sequences by slot, and penalties over whole rows of scores."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TOKENS_PER_PROGRAM = 1024
SCORES_PER_PROGRAM = 2048

_GENERATED = tl.constexpr(1 << 32)
_GREATEST = tl.constexpr(3.4028234663852886e38)


@triton.jit(do_not_specialize=["num_spans"])
def count(counts, table, spans, num_spans, size, length, chunk: tl.constexpr):
    """Count the tokens of each span; see SamplingKernels.count_tokens."""
    column = spans + tl.program_id(0)
    slot = tl.load(column)
    end = tl.load(column + 2 * num_spans)
    position = tl.load(column + num_spans) + tl.program_id(1) * chunk + tl.arange(0, chunk)
    known = position < end
    ids = tl.load(table + slot * length + position, mask=known, other=0)
    is_generated = position >= tl.load(column + 3 * num_spans)
    ones = tl.where(is_generated, 1 + _GENERATED, 1)
    tl.atomic_add(counts + slot * size + ids, ones, mask=known, sem="relaxed")


@triton.jit
def _finite(changed, before):
    """`changed`, clamped to finite values, but NaN where it is NaN, and `before` where that is infinite."""
    clamped = tl.where(changed > _GREATEST, _GREATEST, changed)
    clamped = tl.where(clamped < -_GREATEST, -_GREATEST, clamped)
    return tl.where(tl.abs(before) == float("inf"), before, clamped)


@triton.jit(do_not_specialize=["num_rows"])
def penalise_rows(
    scores, counts, table, rows, penalties, num_rows, size, length, chunk: tl.constexpr
):
    """Penalise the ids that occur in the sequence of each row; see SamplingKernels.penalise."""
    column = rows + tl.program_id(0)
    slot = tl.load(column + num_rows)
    first = tl.load(column + 2 * num_rows)
    last = tl.load(column + 3 * num_rows)
    num_prompt = tl.load(column + 4 * num_rows)
    penalty = penalties + tl.program_id(0)
    repetition = tl.full([chunk], tl.load(penalty), tl.float32)
    id_ = tl.program_id(1) * chunk + tl.arange(0, chunk)
    known = id_ < size
    packed = tl.load(counts + slot * size + id_, mask=known, other=0)
    for position in range(first, last):
        token = tl.load(table + slot * length + position)
        one = tl.where(position >= num_prompt, 1 + _GENERATED, 1)
        packed += tl.where(id_ == token, one, 0)
    known = known & (packed > 0)
    places = scores + tl.load(column) * size + id_
    before = tl.load(places, mask=known, other=0.0)
    in_all = (packed & (_GENERATED - 1)).to(tl.float32)
    generated = (packed >> 32).to(tl.float32)
    num_tokens = tl.full([chunk], last.to(tl.float32), tl.float32)
    after = tl.where(before < 0, before * repetition, tl.div_rn(before, repetition))
    after = _finite(after, before)
    share = tl.div_rn(tl.load(penalty + num_rows) * in_all, num_tokens)
    after = _finite(after - share, after)
    presence = tl.load(penalty + 2 * num_rows) * (generated > 0).to(tl.float32)
    after = _finite(after - presence, after)
    after = _finite(after - tl.load(penalty + 3 * num_rows) * generated, after)
    tl.store(places, after, mask=known)


def count_tokens(counts: Tensor, token_table: Tensor, spans: Tensor, longest: int) -> None:
    num_spans = spans.shape[1]
    if num_spans:
        count[(num_spans, triton.cdiv(longest, TOKENS_PER_PROGRAM))](
            counts,
            token_table,
            spans,
            num_spans,
            counts.shape[1],
            token_table.stride(0),
            chunk=TOKENS_PER_PROGRAM,
            num_warps=4,
        )


def penalise(
    scores: Tensor, counts: Tensor, token_table: Tensor, rows: Tensor, penalties: Tensor
) -> None:
    num_rows, size = rows.shape[1], scores.shape[1]
    if num_rows:
        penalise_rows[(num_rows, triton.cdiv(size, SCORES_PER_PROGRAM))](
            scores,
            counts,
            token_table,
            rows,
            penalties,
            num_rows,
            size,
            token_table.stride(0),
            chunk=SCORES_PER_PROGRAM,
            num_warps=8,
            # A product and a difference stay two roundings, as in torch.
            enable_fp_fusion=False,
        )
