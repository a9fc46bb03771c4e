"""Convolutions over earlier tokens, and the state spaces of Mamba-2 (arXiv 2405.21060) and Mamba 1 (arXiv 2312.00752).

In plain torch: the oracles of the operators.

Every token changes the state by itself, in order of positions: the bits of a sequence depend neither on its chunks nor
on other sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.kernels.states import LayerState


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvWeights:
    """A convolution of each channel by itself."""

    weight: Tensor
    """[kernel, channels] float32, the weight of the current token last."""
    bias: Tensor
    """[channels] float32, or [0]."""
    silu: bool
    """Whether the activation follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Heads:
    """One rank's heads of a layer."""

    num_groups: int
    """Neighbouring heads of a group have one input and one output matrix."""
    rates: Tensor
    """[heads] float32, above 0: a state decays by exp(-rate · step size)."""
    dt_bias: Tensor
    """[heads] float32."""
    skip: Tensor
    """[heads] float32: the factor of what goes past the state."""
    limits: tuple[float, float]
    """Of step sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba1Channels:
    """One rank's channels of a layer, each with a separate state."""

    rates: Tensor
    """[state_dim, channels] float32, above 0: a part of a state decays by exp(-rate · step size)."""
    dt_bias: Tensor
    """[channels] float32."""
    skip: Tensor
    """[channels] float32: the factor of what goes past the state."""


def causal_conv(x: Tensor, conv: ConvWeights, batch: RaggedBatch, state: LayerState) -> Tensor:
    """`Kernels.causal_conv` in plain torch, token by token."""
    out = torch.empty_like(x)
    for token, page, saved in _tokens(batch):
        inputs = torch.cat([state.conv[page], x[token].unsqueeze(0)])
        state.conv[page].copy_(inputs[1:])
        mixed = (inputs.float() * conv.weight).sum(0)
        if len(conv.bias):
            mixed = mixed + conv.bias
        out[token] = F.silu(mixed) if conv.silu else mixed
        if saved >= 0:
            state.conv[saved].copy_(state.conv[page])
    return out


def mamba2(
    mixed: Tensor, dt: Tensor, heads: Mamba2Heads, batch: RaggedBatch, state: LayerState
) -> Tensor:
    """`Kernels.mamba2` in plain torch, token by token."""
    _, num_heads, state_dim, head_dim = state.state.shape
    width = heads.num_groups * state_dim
    out = mixed.new_empty(len(mixed), num_heads * head_dim, dtype=torch.float32)
    repeat = num_heads // heads.num_groups
    for token, page, saved in _tokens(batch):
        x, b, c = torch.split(mixed[token].float(), [num_heads * head_dim, width, width])
        x = x.view(num_heads, head_dim)
        b, c = (
            each.view(-1, state_dim).repeat_interleave(repeat, 0).unsqueeze(-1) for each in (b, c)
        )
        steps = F.softplus(dt[token].float() + heads.dt_bias).clamp(*heads.limits)
        decay = torch.exp(-heads.rates * steps).view(-1, 1, 1)
        now = state.state[page]
        now *= decay
        now += b * (steps.unsqueeze(1) * x).unsqueeze(1)
        out[token] = ((now * c).sum(1) + heads.skip.unsqueeze(1) * x).view(-1)
        if saved >= 0:
            state.state[saved].copy_(now)
    return out


def mamba1(
    inputs: tuple[Tensor, Tensor, Tensor],
    channels: Mamba1Channels,
    batch: RaggedBatch,
    state: LayerState,
) -> Tensor:
    """`Kernels.mamba1` in plain torch, token by token."""
    x, dt, matrices = (each.float() for each in inputs)
    out = torch.empty_like(x)
    for token, page, saved in _tokens(batch):
        steps = F.softplus(dt[token] + channels.dt_bias)
        b, c = (each.unsqueeze(1) for each in matrices[token].chunk(2))
        now = state.state[page]
        now *= torch.exp(-channels.rates * steps)
        now += b * (steps * x[token])
        out[token] = (now * c).sum(0) + channels.skip * x[token]
        if saved >= 0:
            state.state[saved].copy_(now)
    return out


def _tokens(batch: RaggedBatch) -> Iterator[tuple[int, int, int]]:
    """Each token, its sequence's page, and the page of a copy or -1."""
    rows = batch.states
    assert rows is not None
    starts, saved = batch.query_starts.tolist(), rows.saved.tolist()
    for sequence, page in enumerate(rows.pages.tolist()):
        for token in range(starts[sequence], starts[sequence + 1]):
            yield token, page, saved[token] if saved else -1
