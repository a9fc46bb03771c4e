"""Random recurrent layers of every kind that models have, over sequences whose states are in pages."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.delta_rule import DeltaHeads, DeltaInputs
from millrace_shard.kernels.mamba2 import ConvWeights, Mamba1Channels, Mamba2Heads
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.kernels.states import LayerState, StateLayer, StateRows

NUM_PAGES = 10


class Rule(Enum):
    """How a token changes a state."""

    CONVOLUTION = auto()
    """There is no state but the last inputs."""
    DELTA = auto()
    DELTA_BY_CHANNEL = auto()
    """Each channel of keys decays by itself."""
    MAMBA_2 = auto()
    MAMBA_1 = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentLayer:
    """The sizes of a layer; its weights and inputs are the same for the same sizes."""

    rule: Rule
    width: int
    """Channels of a head's values, or of the whole layer if there are no heads."""
    inner: int = 0
    """Channels of keys, or of the state."""
    heads: int = 1
    groups: int = 1
    """Heads of keys, or groups of heads with the same matrices."""

    @property
    def _inputs(self) -> int:
        """Channels of the convolution."""
        if self.rule in (Rule.CONVOLUTION, Rule.MAMBA_1):
            return self.width
        return self.heads * self.width + 2 * self.groups * self.inner

    @property
    def _pages(self) -> StateLayer:
        if self.rule is Rule.CONVOLUTION:
            return StateLayer(2, self._inputs)
        heads = () if self.rule is Rule.MAMBA_1 else (self.heads,)
        return StateLayer(3, self._inputs, (*heads, self.inner, self.width))

    def state(self, dtype: torch.dtype, device: torch.device) -> LayerState:
        """NUM_PAGES random pages."""
        made = self._pages.new(NUM_PAGES, dtype, device)
        made.conv.copy_(_random(device, *made.conv.shape))
        made.state.copy_(_random(device, *made.state.shape))
        return made

    def run(
        self,
        kernels: Kernels,
        state: LayerState,
        batch: RaggedBatch,
        num_tokens: int,
        rows: slice = slice(None),
    ) -> Tensor:
        """The layer's results for the tokens `rows` of `num_tokens`, which are those of `batch`; changes `state`."""

        def random(*shape: int, seed: int = 0) -> Tensor:
            return _random(state.conv.device, *shape, seed=seed)

        def inputs(channels: int, seed: int) -> Tensor:
            return random(num_tokens, channels, seed=seed)[rows].to(state.conv.dtype)

        x = inputs(self._inputs, 0)
        weight = random(state.conv.shape[1] + 1, self._inputs)
        if self.rule in (Rule.DELTA, Rule.DELTA_BY_CHANNEL):
            return self._delta(kernels, x, weight, batch, state, num_tokens, rows)
        is_short = self.rule is Rule.CONVOLUTION
        conv = ConvWeights(weight=weight, bias=random(self._inputs), silu=not is_short)
        mixed = kernels.causal_conv(x, conv, batch, state)
        if is_short:
            return mixed
        if self.rule is Rule.MAMBA_1:
            channels = Mamba1Channels(
                rates=random(self.inner, self.width, seed=3).exp(),
                dt_bias=random(self.width, seed=4),
                skip=random(self.width, seed=5),
            )
            others = inputs(self.width, 1), inputs(2 * self.inner, 2)
            return kernels.mamba1((mixed, *others), channels, batch, state)
        heads = Mamba2Heads(
            num_groups=self.groups,
            rates=random(self.heads, seed=3).exp(),
            dt_bias=random(self.heads, seed=4),
            skip=random(self.heads, seed=5),
            limits=(0.1, 2.0),
        )
        return kernels.mamba2(mixed, inputs(self.heads, 1), heads, batch, state)

    def _delta(
        self,
        kernels: Kernels,
        x: Tensor,
        weight: Tensor,
        batch: RaggedBatch,
        state: LayerState,
        num_tokens: int,
        rows: slice,
    ) -> Tensor:
        dtype, device = x.dtype, x.device
        by_channel = self.rule is Rule.DELTA_BY_CHANNEL
        decays = self.heads * (self.inner if by_channel else 1)
        z, b, a = (
            _random(device, num_tokens, channels, seed=seed)[rows].to(dtype)
            for channels, seed in ((self.heads * self.width, 6), (self.heads, 1), (decays, 2))
        )
        heads = DeltaHeads(
            num_keys=self.groups,
            num_values=self.heads,
            key_dim=self.inner,
            value_dim=self.width,
            conv=weight,
            rates=_random(device, self.heads, seed=3).exp(),
            dt_bias=_random(device, decays, seed=4),
            norm=_random(device, self.width, seed=7).to(dtype),
            eps=1e-6,
            by_channel=by_channel,
        )
        return kernels.delta_rule(DeltaInputs(x, z, b, a), heads, batch, state)


def batch_of_pages(
    counts: Sequence[int],
    pages: Sequence[int],
    device: torch.device,
    saved: Mapping[int, int] | None = None,
) -> RaggedBatch:
    """A batch of as many tokens of each page, of which all but the states is empty; `saved` has pages by tokens."""
    none = torch.zeros(0, dtype=torch.int64)
    to = torch.full((sum(counts),), -1) if saved else none
    for token, page in (saved or {}).items():
        to[token] = page
    states = StateRows(layers=(), pages=torch.tensor(tuple(pages)).to(device), saved=to.to(device))
    starts = torch.tensor([0, *itertools.accumulate(counts)])
    return RaggedBatch(
        ids=none,
        positions=none,
        cache_rows=none,
        query_starts=starts.to(device, torch.int32),
        context_lengths=none,
        block_tables=none,
        logit_rows=none,
        num_queries=tuple(counts),
        num_context=tuple(counts),
        states=states,
    )


def _random(device: torch.device, *shape: int, seed: int = 0) -> Tensor:
    """The same numbers on every device."""
    generator = torch.Generator().manual_seed(seed + shape[-1])
    return torch.randn(shape, generator=generator).to(device)
