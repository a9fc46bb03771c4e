"""The Triton kernels of recurrent layers against plain torch: on a GPU, or else in Triton's interpreter."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.delta_rule import DeltaHeads, DeltaInputs
from millrace_shard.kernels.mamba2 import ConvWeights, Mamba1Channels, Mamba2Heads
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.kernels.states import LayerState, StateLayer, StateRows

pytest.importorskip("triton", reason="no Triton for this platform")

from millrace_shard.kernels.cuda.operators import CudaKernels

pytestmark = pytest.mark.long
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLAIN, TRITON = PlainKernels(deterministic=True), CudaKernels(deterministic=True)
TOLERANCE = {torch.bfloat16: 0.1, torch.float16: 0.004, torch.float32: 2e-5}
"""In parts of 1 + size; the interpreter casts to bfloat16 by cutting off."""
COUNTS = (9, 1, 2, 5)
"""Tokens of sequences: fewer and more than a convolution reads."""
PAGES = (3, 1, 7, 4)
NUM_PAGES = 10
SAVED = {2: 5, 8: 6, 9: 8}
"""Pages of copies by token."""


@dataclass(frozen=True)
class Case:
    """A layer of one kind with random numbers."""

    kind: str
    dtype: torch.dtype

    def random(self, *shape: int, seed: int = 0) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed + shape[-1])).to(
            DEVICE
        )

    @property
    def layer(self) -> StateLayer:
        shapes = {
            "short": StateLayer(2, 300),
            "delta": StateLayer(3, 2 * 2 * 24 + 4 * 40, (4, 24, 40)),
            "channels": StateLayer(3, 100, (20, 100)),
            "kimi": StateLayer(3, 2 * 2 * 24 + 4 * 40, (4, 24, 40)),
            "mamba": StateLayer(3, 6 * 40 + 2 * 2 * 20, (6, 20, 40)),
        }
        return shapes[self.kind]

    def state(self) -> LayerState:
        made = self.layer.new(NUM_PAGES, self.dtype, DEVICE)
        made.conv.copy_(self.random(*made.conv.shape))
        made.state.copy_(self.random(*made.state.shape))
        return made

    def run(self, kernels: Kernels, state: LayerState, rows: slice, batch: RaggedBatch) -> Tensor:
        count, layer = sum(COUNTS), self.layer
        x = self.random(count, layer.conv_channels).to(self.dtype)[rows]
        weight = self.random(layer.conv_inputs + 1, layer.conv_channels)
        conv = ConvWeights(
            weight=weight, bias=self.random(layer.conv_channels), silu=self.kind != "short"
        )
        if self.kind == "short":
            return kernels.causal_conv(x, conv, batch, state)
        if self.kind == "channels":
            x = kernels.causal_conv(x, conv, batch, state)
            steps = self.random(count, 100, seed=1).to(self.dtype)[rows]
            matrices = self.random(count, 40, seed=2).to(self.dtype)[rows]
            own = Mamba1Channels(
                rates=self.random(20, 100, seed=3).exp(),
                dt_bias=self.random(100, seed=4),
                skip=self.random(100, seed=5),
            )
            return kernels.mamba1((x, steps, matrices), own, batch, state)
        heads, _, width = layer.state
        per_head, others = (
            self.random(count, heads, seed=each).to(self.dtype)[rows] for each in (1, 2)
        )
        rates, bias = self.random(heads, seed=3).exp(), self.random(heads, seed=4)
        if self.kind == "mamba":
            mixed = kernels.causal_conv(x, conv, batch, state)
            skip = self.random(heads, seed=5)
            made = Mamba2Heads(
                num_groups=2, rates=rates, dt_bias=bias, skip=skip, limits=(0.1, 2.0)
            )
            return kernels.mamba2(mixed, per_head, made, batch, state)
        by_channel = self.kind == "kimi"
        if by_channel:
            others = self.random(count, heads * 24, seed=2).to(self.dtype)[rows]
            bias = self.random(heads * 24, seed=4)
        z = self.random(count, heads * width, seed=6).to(self.dtype)[rows]
        rule = DeltaHeads(
            num_keys=2,
            num_values=heads,
            key_dim=24,
            value_dim=width,
            conv=weight,
            rates=rates,
            dt_bias=bias,
            norm=self.random(width, seed=7).to(self.dtype),
            eps=1e-6,
            by_channel=by_channel,
        )
        return kernels.delta_rule(DeltaInputs(x, z, per_head, others), rule, batch, state)


def batch_of(counts: tuple[int, ...], pages: tuple[int, ...], saved: dict[int, int]) -> RaggedBatch:
    """A batch of as many tokens of each page; of the rest only the states count."""
    starts, none = (
        torch.tensor([0, *itertools.accumulate(counts)]),
        torch.zeros(0, dtype=torch.int64),
    )
    to = torch.full((sum(counts),), -1) if saved else none
    to[list(saved)] = torch.tensor([*saved.values()], dtype=torch.int64)
    states = StateRows(layers=(), pages=torch.tensor(pages).to(DEVICE), saved=to.to(DEVICE))
    return RaggedBatch(
        ids=none,
        positions=none,
        cache_rows=none,
        query_starts=starts.to(DEVICE, torch.int32),
        context_lengths=none,
        block_tables=none,
        logit_rows=none,
        num_queries=counts,
        num_context=counts,
        states=states,
    )


CASES = [
    Case(kind, dtype)
    for kind in ("short", "delta", "kimi", "mamba", "channels")
    for dtype in TOLERANCE
]


@pytest.mark.parametrize("saved", [{}, SAVED], ids=["no-copies", "copies"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}-{case.dtype}")
def test_kernels_of_states_match_plain_torch(case: Case, saved: dict[int, int]) -> None:
    ours, theirs = case.state(), case.state()
    out = case.run(TRITON, ours, slice(None), batch_of(COUNTS, PAGES, saved))
    expected = case.run(PLAIN, theirs, slice(None), batch_of(COUNTS, PAGES, saved))
    for mine, right in zip((out, *ours.tensors), (expected, *theirs.tensors), strict=True):
        assert mine.dtype == right.dtype
        error = (mine.double() - right.double()).abs() / (1 + right.double().abs())
        assert not error.numel() or error.max() < TOLERANCE[case.dtype]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}-{case.dtype}")
def test_bits_depend_neither_on_cuts_nor_on_company(case: Case) -> None:
    whole, apart = case.state(), case.state()
    out = case.run(TRITON, whole, slice(None), batch_of(COUNTS, PAGES, SAVED))
    parts = list[Tensor]()
    for start, end in itertools.pairwise((0, 1, 3, 8, 9)):
        saved = {token - start: page for token, page in SAVED.items() if start <= token < end}
        parts.append(
            case.run(TRITON, apart, slice(start, end), batch_of((end - start,), (3,), saved))
        )
    assert torch.equal(torch.cat(parts), out[:9])
    for mine, right in zip(apart.tensors, whole.tensors, strict=True):
        assert torch.equal(mine[[3, 5, 6]], right[[3, 5, 6]])
