"""Triton kernels of recurrent layers: convolutions over earlier tokens, the gated delta rule, Mamba-2 and Mamba 1.

A program keeps some columns of a head's state in registers and takes the tokens of its sequence one after the other, in
prompts as in decodes, so that the bits of a row depend neither on its chunk nor on other sequences. The tokens of a
convolution are independent of each other; the inputs of a sequence are shifted when all of them are computed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace_shard.kernels.delta_rule import EPSILON, DeltaHeads, DeltaInputs
from millrace_shard.kernels.mamba2 import ConvWeights, Mamba1Channels, Mamba2Heads
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.kernels.states import LayerState, StateRows

CHANNELS = 256
"""Per program of a convolution."""
COLUMNS = 32
"""Of a state per program."""
STATE_WARPS = 4


@triton.jit
def _softplus(x):
    power = tl.exp(-tl.abs(x))
    sum_ = 1.0 + power
    # log(1 + power) without the rounding of the sum; the quotient is of equal errors.
    log = tl.where(
        sum_ == 1.0, power, tl.log(sum_) * (power / tl.where(sum_ == 1.0, 1.0, sum_ - 1.0))
    )
    return tl.maximum(x, 0.0) + log


@triton.jit
def _wide(pointers, mask):
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _direction(pointers, mask, epsilon):
    """A vector of length 1."""
    x = _wide(pointers, mask)
    return x * tl.rsqrt(tl.sum(x * x, 0) + epsilon)


@triton.jit
def _span(query_starts, pages, sequence):
    """The first token of a sequence, the one after its last, and its page."""
    start, end = tl.load(query_starts + sequence), tl.load(query_starts + sequence + 1)
    return start, end, tl.load(pages + sequence)


@triton.jit
def _save(places, saved, page_size: tl.constexpr, now, mask):
    """Copy a state to the page that `saved` names, if it names one; `places` are those in page 0."""
    page = tl.load(saved)
    tl.store(places + page * page_size, now, mask=mask & (page >= 0))


@triton.jit
def _input(x, conv, page, start, position, channel, mask, channels, earlier: tl.constexpr):
    """The input of a convolution at a token, or before the first one from the page."""
    own = position >= start
    at = tl.where(own, position, start).to(tl.int64) * channels + channel
    kept = page * earlier + tl.where(own, 0, position - start + earlier)
    now = tl.load(x + at, mask=mask & own, other=0.0)
    before = tl.load(conv + kept * channels + channel, mask=mask & (position < start), other=0.0)
    return tl.where(own, now, before)


@triton.jit
def convolve(
    out,
    x,
    weight,
    bias,
    conv,
    pages,
    query_starts,
    saved,
    num_sequences,
    channels,
    earlier: tl.constexpr,
    sequences: tl.constexpr,
    columns: tl.constexpr,
    has_bias: tl.constexpr,
    has_silu: tl.constexpr,
    has_saved: tl.constexpr,
):
    """The results of a token, and its copy of the inputs; `sequences` is at least `num_sequences`."""
    token = tl.program_id(0)
    channel = tl.program_id(1) * columns + tl.arange(0, columns)
    mask = channel < channels
    each = tl.arange(0, sequences)
    ends = tl.load(query_starts + 1 + each, mask=each < num_sequences, other=2147483647)
    sequence = tl.sum((ends <= token).to(tl.int32), 0)
    start = tl.load(query_starts + sequence)
    page = tl.load(pages + sequence)
    total = tl.zeros([columns], tl.float32)
    for step in tl.static_range(earlier + 1):
        value = _input(
            x, conv, page, start, token - earlier + step, channel, mask, channels, earlier
        )
        total += value.to(tl.float32) * tl.load(
            weight + step * channels + channel, mask=mask, other=0.0
        )
    if has_bias:
        total += tl.load(bias + channel, mask=mask, other=0.0)
    if has_silu:
        total = total * tl.sigmoid(total)
    tl.store(
        out + token.to(tl.int64) * channels + channel, total.to(out.dtype.element_ty), mask=mask
    )
    if has_saved:
        to = tl.load(saved + token)
        for step in tl.static_range(earlier):
            position = token - earlier + 1 + step
            value = _input(x, conv, page, start, position, channel, mask, channels, earlier)
            where = (to * earlier + step) * channels + channel
            tl.store(conv + where, value, mask=mask & (to >= 0))


@triton.jit
def shift(x, conv, pages, query_starts, channels, earlier: tl.constexpr, columns: tl.constexpr):
    """Keep the last inputs of a sequence."""
    sequence = tl.program_id(0)
    channel = tl.program_id(1) * columns + tl.arange(0, columns)
    mask = channel < channels
    start, end = tl.load(query_starts + sequence), tl.load(query_starts + sequence + 1)
    page = tl.load(pages + sequence)
    # What a program reads comes after all that it has written.
    for step in tl.static_range(earlier):
        value = _input(x, conv, page, start, end - earlier + step, channel, mask, channels, earlier)
        tl.store(conv + (page * earlier + step) * channels + channel, value, mask=mask)


@triton.jit
def _kept(a, at, key, own_keys, rate, bias, key_dim: tl.constexpr, by_channel: tl.constexpr):
    """The share of a state that a token keeps, or one for each channel of keys."""
    if by_channel:
        steps = _softplus(_wide(a + at * key_dim + key, own_keys) + bias)
        kept = tl.exp(-rate * steps)[:, None]
    else:
        kept = tl.exp(-rate * _softplus(tl.load(a + at).to(tl.float32) + bias))
    return kept


@triton.jit
def _bias(dt_bias, head, key, own_keys, key_dim: tl.constexpr, by_channel: tl.constexpr):
    if by_channel:  # noqa: SIM108
        bias = tl.load(dt_bias + head * key_dim + key, mask=own_keys, other=0.0)
    else:
        bias = tl.load(dt_bias + head)
    return bias


@triton.jit
def delta(
    out,
    mixed,
    b,
    a,
    rates,
    dt_bias,
    state,
    pages,
    query_starts,
    saved,
    epsilon,
    scale,
    num_keys: tl.constexpr,
    num_values: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    columns: tl.constexpr,
    by_channel: tl.constexpr,
    has_saved: tl.constexpr,
):
    """The rule for some columns of a value head, over the tokens of a sequence; results come before the norm."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    key, column = tl.arange(0, triton.next_power_of_2(key_dim)), tl.arange(0, columns)
    column += tl.program_id(2) * columns
    own_keys, own = key < key_dim, column < value_dim
    heads_keys: tl.constexpr = num_keys * key_dim
    width: tl.constexpr = 2 * heads_keys + num_values * value_dim
    start, end, page_number = _span(query_starts, pages, sequence)
    within = head * key_dim * value_dim + key[:, None] * value_dim + column[None, :]
    page_size: tl.constexpr = num_values * key_dim * value_dim
    page, mask = state + page_number * page_size + within, own_keys[:, None] & own[None, :]
    rate, bias = tl.load(rates + head), _bias(dt_bias, head, key, own_keys, key_dim, by_channel)
    now = tl.load(page, mask=mask, other=0.0)
    for index in range(end - start):
        token = start.to(tl.int64) + index
        row = mixed + token * width + head // (num_values // num_keys) * key_dim
        q = _direction(row + key, own_keys, epsilon) * scale
        k = _direction(row + heads_keys + key, own_keys, epsilon)
        v = _wide(mixed + token * width + 2 * heads_keys + head * value_dim + column, own)
        at = token * num_values + head
        beta = tl.sigmoid(tl.load(b + at).to(tl.float32)).to(b.dtype.element_ty).to(tl.float32)
        now = now * _kept(a, at, key, own_keys, rate, bias, key_dim, by_channel)
        change = (v - tl.sum(now * k[:, None], 0)) * beta
        now += k[:, None] * change[None, :]
        result = tl.sum(now * q[:, None], 0)
        tl.store(out + at * value_dim + column, result.to(out.dtype.element_ty), mask=own)
        if has_saved:
            _save(state + within, saved + token, page_size, now, mask)
    tl.store(page, now, mask=mask)


@triton.jit
def gated_norm(out, z, weight, eps, value_dim: tl.constexpr, wide: tl.constexpr):
    """The norm of a head's results, in place, times the activation of its gate; by a sigmoid if `wide`."""
    row = tl.program_id(0).to(tl.int64) * value_dim
    column = tl.arange(0, triton.next_power_of_2(value_dim))
    mask = column < value_dim
    dtype = out.dtype.element_ty
    x = tl.load(out + row + column, mask=mask, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / value_dim + eps)
    factor = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(z + row + column, mask=mask, other=0.0).to(tl.float32)
    if wide:
        result = normed * factor * tl.sigmoid(gate)
    else:
        scaled = (normed.to(dtype).to(tl.float32) * factor).to(dtype)
        result = scaled.to(tl.float32) * (gate * tl.sigmoid(gate))
    tl.store(out + row + column, result.to(dtype), mask=mask)


@triton.jit
def scan(
    out,
    mixed,
    dt,
    rates,
    dt_bias,
    skip,
    state,
    pages,
    query_starts,
    saved,
    least,
    most,
    num_heads: tl.constexpr,
    num_groups: tl.constexpr,
    state_dim: tl.constexpr,
    head_dim: tl.constexpr,
    columns: tl.constexpr,
    has_saved: tl.constexpr,
):
    """Mamba-2 for some columns of a head, over the tokens of a sequence."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    inner, column = tl.arange(0, triton.next_power_of_2(state_dim)), tl.arange(0, columns)
    column += tl.program_id(2) * columns
    own_inner, own = inner < state_dim, column < head_dim
    mask = own_inner[:, None] & own[None, :]
    values: tl.constexpr = num_heads * head_dim
    width: tl.constexpr = values + 2 * num_groups * state_dim
    group = head // (num_heads // num_groups)
    start, end, page_number = _span(query_starts, pages, sequence)
    within = head * state_dim * head_dim + inner[:, None] * head_dim + column[None, :]
    page_size: tl.constexpr = num_heads * state_dim * head_dim
    page = state + page_number * page_size + within
    rate, bias, past = tl.load(rates + head), tl.load(dt_bias + head), tl.load(skip + head)
    now = tl.load(page, mask=mask, other=0.0)
    for index in range(end - start):
        token = start.to(tl.int64) + index
        row = mixed + token * width
        x = _wide(row + head * head_dim + column, own)
        matrix = row + values + group * state_dim + inner
        write = _wide(matrix, own_inner)
        read = _wide(matrix + num_groups * state_dim, own_inner)
        step = _softplus(tl.load(dt + token * num_heads + head).to(tl.float32) + bias)
        step = tl.minimum(tl.maximum(step, least), most)
        now = now * tl.exp(-rate * step) + write[:, None] * (step * x)[None, :]
        result = tl.sum(now * read[:, None], 0) + past * x
        tl.store(out + token * values + head * head_dim + column, result, mask=own)
        if has_saved:
            _save(state + within, saved + token, page_size, now, mask)
    tl.store(page, now, mask=mask)


@triton.jit
def scan_channels(
    out,
    x,
    dt,
    matrices,
    rates,
    dt_bias,
    skip,
    state,
    pages,
    query_starts,
    saved,
    channels,
    state_dim: tl.constexpr,
    columns: tl.constexpr,
    has_saved: tl.constexpr,
):
    """Mamba 1 for some channels, over the tokens of a sequence."""
    sequence = tl.program_id(0)
    inner, column = tl.arange(0, triton.next_power_of_2(state_dim)), tl.arange(0, columns)
    column += tl.program_id(1) * columns
    own_inner, own = inner < state_dim, column < channels
    mask = own_inner[:, None] & own[None, :]
    start, end, page_number = _span(query_starts, pages, sequence)
    within = inner[:, None] * channels + column[None, :]
    page_size = state_dim * channels
    page = state + page_number * page_size + within
    rate = tl.load(rates + within, mask=mask, other=0.0)
    bias = tl.load(dt_bias + column, mask=own, other=0.0)
    past = tl.load(skip + column, mask=own, other=0.0)
    now = tl.load(page, mask=mask, other=0.0)
    for index in range(end - start):
        token = start.to(tl.int64) + index
        value = _wide(x + token * channels + column, own)
        step = _softplus(_wide(dt + token * channels + column, own) + bias)
        write = _wide(matrices + token * 2 * state_dim + inner, own_inner)
        read = _wide(matrices + token * 2 * state_dim + state_dim + inner, own_inner)
        now = now * tl.exp(-rate * step[None, :]) + write[:, None] * (step * value)[None, :]
        result = tl.sum(now * read[:, None], 0) + past * value
        tl.store(out + token * channels + column, result, mask=own)
        if has_saved:
            to = tl.load(saved + token)
            tl.store(state + to * page_size + within, now, mask=mask & (to >= 0))
    tl.store(page, now, mask=mask)


def causal_conv(x: Tensor, conv: ConvWeights, batch: RaggedBatch, state: LayerState) -> Tensor:
    """See Kernels."""
    x, rows, (num_tokens, channels) = x.contiguous(), _rows(batch), x.shape
    out, count, earlier = torch.empty_like(x), len(rows.pages), state.conv.shape[1]
    blocks = triton.cdiv(channels, CHANNELS)
    convolve[(num_tokens, blocks)](
        *(out, x, conv.weight, conv.bias, state.conv, rows.pages, batch.query_starts, rows.saved),
        *(count, channels),
        earlier=earlier,
        sequences=triton.next_power_of_2(count),
        columns=CHANNELS,
        has_bias=len(conv.bias) > 0,
        has_silu=conv.silu,
        has_saved=len(rows.saved) > 0,
        num_warps=4,
    )
    shift[(count, blocks)](
        *(x, state.conv, rows.pages, batch.query_starts, channels),
        earlier=earlier,
        columns=CHANNELS,
        num_warps=4,
    )
    return out


def delta_rule(
    inputs: DeltaInputs, heads: DeltaHeads, batch: RaggedBatch, state: LayerState
) -> Tensor:
    """See Kernels."""
    rows, qkv = _rows(batch), inputs.qkv
    conv = ConvWeights(weight=heads.conv, bias=heads.conv.new_empty(0), silu=True)
    mixed, out = causal_conv(qkv, conv, batch, state), torch.empty_like(inputs.z)
    delta[(len(rows.pages), heads.num_values, triton.cdiv(heads.value_dim, COLUMNS))](
        *(out, mixed, inputs.b, inputs.a, heads.rates, heads.dt_bias, state.state),
        *(rows.pages, batch.query_starts, rows.saved, EPSILON, heads.key_dim**-0.5),
        num_keys=heads.num_keys,
        num_values=heads.num_values,
        key_dim=heads.key_dim,
        value_dim=heads.value_dim,
        columns=COLUMNS,
        by_channel=heads.by_channel,
        has_saved=len(rows.saved) > 0,
        num_warps=STATE_WARPS,
    )
    gated_norm[(len(qkv) * heads.num_values,)](
        *(out, inputs.z, heads.norm, heads.eps),
        value_dim=heads.value_dim,
        wide=heads.by_channel,
        num_warps=1,
    )
    return out


def mamba2(
    mixed: Tensor, dt: Tensor, heads: Mamba2Heads, batch: RaggedBatch, state: LayerState
) -> Tensor:
    """See Kernels."""
    rows, (_, num_heads, state_dim, head_dim) = _rows(batch), state.state.shape
    out = mixed.new_empty(len(mixed), num_heads * head_dim, dtype=torch.float32)
    scan[(len(rows.pages), num_heads, triton.cdiv(head_dim, COLUMNS))](
        *(out, mixed, dt, heads.rates, heads.dt_bias, heads.skip, state.state),
        *(rows.pages, batch.query_starts, rows.saved, *heads.limits),
        num_heads=num_heads,
        num_groups=heads.num_groups,
        state_dim=state_dim,
        head_dim=head_dim,
        columns=COLUMNS,
        has_saved=len(rows.saved) > 0,
        num_warps=STATE_WARPS,
    )
    return out


def mamba1(
    inputs: tuple[Tensor, Tensor, Tensor],
    channels: Mamba1Channels,
    batch: RaggedBatch,
    state: LayerState,
) -> Tensor:
    """See Kernels."""
    rows, (_, state_dim, count) = _rows(batch), state.state.shape
    out = torch.empty_like(inputs[0], dtype=torch.float32)
    scan_channels[(len(rows.pages), triton.cdiv(count, COLUMNS))](
        *(out, *inputs, channels.rates, channels.dt_bias, channels.skip, state.state),
        *(rows.pages, batch.query_starts, rows.saved, count),
        state_dim=state_dim,
        columns=COLUMNS,
        has_saved=len(rows.saved) > 0,
        num_warps=STATE_WARPS,
    )
    return out


def _rows(batch: RaggedBatch) -> StateRows:
    assert batch.states is not None
    return batch.states
