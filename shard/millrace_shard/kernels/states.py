"""The states of recurrent layers, in pages: their memory, and where the rows of a step have theirs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StateLayer:
    """Shape of a page of one recurrent layer on this rank."""

    conv_inputs: int
    """Earlier inputs that the convolution reads."""
    conv_channels: int
    state: tuple[int, ...] = ()
    """Shape of the recurrent state, which is float32; empty: there is only a convolution."""
    other_inputs: int = 0
    """Channels of a token's inputs that change the state without the convolution."""

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a page; `dtype` is the model's."""
        conv = self.conv_inputs * self.conv_channels * dtype.itemsize
        return conv + (math.prod(self.state) * torch.float32.itemsize if self.state else 0)

    def new(self, num_pages: int, dtype: torch.dtype, device: torch.device) -> LayerState:
        """Uninitialised pages: each is zeroed, or copied, when a sequence gets it."""
        shape = num_pages, self.conv_inputs, self.conv_channels
        conv = torch.empty(shape, dtype=dtype, device=device)
        state = torch.empty(num_pages, *self.state or (0,), dtype=torch.float32, device=device)
        return LayerState(conv, state, self.other_inputs)


@dataclass(frozen=True, slots=True)
class LayerState:
    """All pages of one recurrent layer."""

    conv: Tensor
    """[pages, conv_inputs, conv_channels] in the model's dtype, the latest input last."""
    state: Tensor
    """[pages, ...] float32; [pages, 0] without a recurrent state."""
    other_inputs: int = 0

    def zero(self, page: int) -> None:
        self.conv[page].zero_()
        self.state[page].zero_()

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.conv, self.state

    def copy(self, page: int, to: int) -> None:
        self.conv[to].copy_(self.conv[page])
        self.state[to].copy_(self.state[page])


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRows:
    """The pages of a step's sequences."""

    layers: tuple[LayerState, ...]
    """The recurrent layers, in order."""
    pages: Tensor
    """[B] int64, the page that each sequence reads and writes."""
    saved: Tensor
    """[T] int64, the page to which the state after a token is copied, or -1; [0] if none is."""
    replay: Replay | None = None
    """Earlier tokens that the states lack; `saved` counts them, too. None: there are none, and no draft tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A step whose sequences begin with accepted draft tokens of their last step, E tokens in all with its own T.

    States go forward only, so that the state before the draft tokens is kept, and the inputs of draft tokens in a log.
    """

    query_starts: Tensor
    """[B + 1] int32, as in RaggedBatch."""
    sources: Tensor
    """[E] int64, for each token its index among the T, or T + its place in `read`."""
    own: Tensor
    """[T] int64, the indexes of the step's own tokens among the E."""
    logs: tuple[Tensor, ...]
    """For each recurrent layer the inputs of draft tokens, [rows, channels and other inputs]."""
    read: Tensor
    """[E - T] int64, the rows of the earlier tokens."""
    drafts: Tensor
    """[G] int64, the indexes of the draft tokens among the T."""
    written: Tensor
    """[G] int64, their rows."""

    def inputs(self, layer: int, parts: Sequence[Tensor]) -> list[Tensor]:
        """The inputs of all E tokens, of `parts` [T, n] for the T; draft tokens' inputs are kept."""
        log, now = self.logs[layer], torch.cat(list(parts), dim=1)
        both = torch.cat([now, log[self.read]])[self.sources]
        log[self.written] = now[self.drafts]
        own = torch.split(both, [part.shape[1] for part in parts], dim=1)
        return [each.contiguous() for each in own]

    def padded(self, x: Tensor) -> Tensor:
        """[E, n] of what the T have only, [T, n]; values of earlier tokens mean nothing."""
        return x[self.sources.clamp(max=len(x) - 1)]
