"""The choice of the tokens of rows that are greedy or draw from all tokens, without a look at the host's columns."""

from __future__ import annotations

import torch
from torch import Tensor

from millrace_shard.kernels.greedy import Best, choose_greedy
from millrace_shard.kernels.row_alignment import aligned
from millrace_shard.sampling.fixed_point import draw_from
from millrace_shard.sampling.slot_parameters import parameter
from millrace_shard.sampling.warpers import apply_temperature


def choose_plain(logits: Tensor, words: Tensor, uniforms: Tensor) -> Best:
    """The tokens of `logits` [n, V] float32, with the bits of Sampler.sample.

    `words` [words, n] int32 are the parameters of the rows, see SlotParameters; `uniforms` [n] int64.
    """
    best = choose_greedy(logits)
    scores = apply_temperature(aligned(logits), parameter(words, "temperature")[:, None])
    drawn = draw_from(scores, logits.shape[1], uniforms)
    logprobs = scores.log_softmax(-1).gather(1, drawn[:, None]).squeeze(1)
    is_drawn = parameter(words, "do_sample") > 0
    return Best(
        torch.where(is_drawn, drawn, best.ids),
        torch.where(is_drawn, logprobs, best.logprobs),
        torch.where(is_drawn, ~logprobs.isfinite(), best.failed),
    )
