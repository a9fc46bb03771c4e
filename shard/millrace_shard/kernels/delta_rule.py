"""The gated delta rule (arXiv 2412.06464), as in Qwen3-Next and Qwen 3.5, in plain torch: the oracle of the operators.

In Kimi Delta Attention (arXiv 2510.26692) each channel of keys decays by itself.

Every token changes the state by itself, in order of positions: the bits of a sequence depend neither on its chunks nor
on other sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.kernels.states import LayerState

EPSILON = 1e-6
"""Of the normalisation of queries and keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaHeads:
    """One rank's heads, and the parameters of their rule."""

    num_keys: int
    num_values: int
    """A multiple of `num_keys`; each key head serves as many value heads, which are neighbours."""
    key_dim: int
    value_dim: int
    conv: Tensor
    """[kernel, channels] float32; the channels of all queries come first, then keys, then values."""
    rates: Tensor
    """[num_values] float32, above 0: a state decays by exp(-rate · softplus(a + dt_bias))."""
    dt_bias: Tensor
    """[num_values] float32, or [num_values * key_dim] with decays by channel."""
    norm: Tensor
    """[value_dim], weights of the norm of each head's output."""
    eps: float
    by_channel: bool = False
    """Whether each channel of keys decays by itself; norm and gate, then a sigmoid, are multiplied in float32."""

    @property
    def num_channels(self) -> int:
        return 2 * self.num_keys * self.key_dim + self.num_values * self.value_dim


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """The projections of T tokens; contiguous, in the model's dtype."""

    qkv: Tensor
    """[T, channels]."""
    z: Tensor
    """[T, num_values * value_dim], the gates of the output."""
    b: Tensor
    """[T, num_values]; its sigmoid is the share of a change that is made."""
    a: Tensor
    """[T, num_values], or [T, num_values * key_dim] with decays by channel."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.qkv, self.z, self.b, self.a


def delta_rule(
    inputs: DeltaInputs, heads: DeltaHeads, batch: RaggedBatch, state: LayerState
) -> Tensor:
    """`Kernels.delta_rule` in plain torch, token by token."""
    rows = batch.states
    assert rows is not None
    out = torch.empty_like(inputs.z)
    starts = batch.query_starts.tolist()
    saved = rows.saved.tolist()
    for page, begin, end in zip(rows.pages.tolist(), starts, starts[1:], strict=False):
        for token in range(begin, end):
            step = DeltaInputs(*(each[token] for each in inputs.tensors))
            out[token] = _token(step, heads, state.conv[page], state.state[page])
            if saved and saved[token] >= 0:
                state.copy(page, saved[token])
    return out


def _token(step: DeltaInputs, heads: DeltaHeads, conv: Tensor, state: Tensor) -> Tensor:
    """The output [num_values * value_dim] of a token; changes `conv` and `state` of its page."""
    qkv, z, b, a = step.tensors
    inputs = torch.cat([conv, qkv.unsqueeze(0)])
    conv.copy_(inputs[1:])
    mixed = F.silu((inputs.float() * heads.conv).sum(0)).to(qkv.dtype).float()
    sizes = [heads.num_keys * heads.key_dim] * 2 + [heads.num_values * heads.value_dim]
    q, k, v = torch.split(mixed, sizes)
    q, k = (_unit(each.view(heads.num_keys, -1)) for each in (q, k))
    repeat = heads.num_values // heads.num_keys
    q = (q * heads.key_dim**-0.5).repeat_interleave(repeat, 0).unsqueeze(-1)
    k, v = k.repeat_interleave(repeat, 0).unsqueeze(-1), v.view(heads.num_values, -1)
    beta = b.sigmoid().float().unsqueeze(-1)
    steps = F.softplus(a.float() + heads.dt_bias).view(heads.num_values, -1, 1)
    state *= torch.exp(-heads.rates.view(-1, 1, 1) * steps)
    delta = (v - (state * k).sum(1)) * beta
    state += k * delta.unsqueeze(1)
    attended = (state * q).sum(1).to(z.dtype).float()
    scale = torch.rsqrt(attended.square().mean(-1, keepdim=True) + heads.eps)
    wide = z.view(heads.num_values, -1).float()
    normed, gate = (attended * scale).to(z.dtype) * heads.norm, F.silu(wide)
    if heads.by_channel:
        normed, gate = attended * scale * heads.norm.float(), wide.sigmoid()
    result: Tensor = (normed * gate).to(z.dtype)
    return result.view(-1)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON)
