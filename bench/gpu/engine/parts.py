"""Kernels that other models than Llamas use: their differences from plain torch, and the bits of their rows.

Keys in latents, keys and values in codes, windows and soft caps, recurrent layers, pictures, and weights in codes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from bench.gpu.engine.pictures import Encoder, Pictures, pictures_difference
from bench.gpu.engine.recurrent_layers import RecurrentLayer, batch_of_pages
from bench.harness.code_formats import code_format
from millrace_shard.kernels.agreement import Random, distance, largest_difference
from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.expert_weights import RoutingRule, Scoring
from millrace_shard.kernels.experts_agreement import experts_weights
from millrace_shard.kernels.kv_cache import cache_dtype_name
from millrace_shard.kernels.layer_shape import LayerShape
from millrace_shard.kernels.layer_weights import LinearWeights
from millrace_shard.kernels.quantized import CodeFormat
from millrace_shard.kernels.stored_weight import StoredWeight

CODED = (torch.float8_e4m3fn, torch.int8)
"""Types of caches with codes."""
WINDOW, CAP = 66, 3.0
COUNTS, PAGES = (9, 1, 5), (3, 1, 7)
"""Tokens of sequences with states, more and fewer than a convolution reads, and their pages."""
CUTS = (0, 1, 3, 8, COUNTS[0])
RULE = RoutingRule(top_k=4, scoring=Scoring.SOFTMAX)
GROUPS: Mapping[str, int | None] = {
    "int4": 128,
    "int4 with zeros": 128,
    "nf4": 64,
    "fp4": 64,
    "e2m1": 32,
    "int8": None,
    "e4m3": 128,
}
"""Inputs of a group of each format of codes; None: all of them."""
FORMATS = {name: code_format(name, group) for name, group in GROUPS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The sizes of the parts."""

    dtype: torch.dtype
    """In Triton's interpreter float32: it cuts the ends of bfloat16 off, which changes codes."""
    head_dim: int
    latents: tuple[int, int, int]
    """Heads, channels of a latent, and of a rotated key."""
    recurrent: Mapping[str, RecurrentLayer]
    encoder: Encoder
    formats: Mapping[str, CodeFormat]
    hidden: int
    """Inputs and outputs of weights in codes."""
    num_rows: tuple[int, ...]
    """That are multiplied with them, ascending."""

    def differences(
        self, kernels: Kernels, oracle: Kernels, device: torch.device
    ) -> Iterator[tuple[str, Callable[[], float]]]:
        """The name of each part, and what computes its difference; see `distance`."""
        each, dtype = (kernels, oracle), self.dtype
        yield "pictures", partial(pictures_difference, *each, dtype, self.head_dim, device)
        yield "encoder", partial(self.encoder.difference, kernels, dtype, device)
        for name, layer in self.recurrent.items():
            yield name, partial(_recurrent_difference, *each, layer, dtype, device)
        for name, form in self.formats.items():
            yield f"weights in {name}", partial(self._coded_difference, *each, form, device)
        # The interpreter takes longest for these.
        for name, shape in self._shapes():
            yield name, partial(largest_difference, *each, dtype=dtype, shape=shape, device=device)

    def differing(
        self, kernels: Kernels, device: torch.device
    ) -> Iterator[tuple[str, Callable[[], list[str]]]]:
        """The name of each part but attention, and what lists the cases in which a row has other bits than alone."""
        dtype = self.dtype
        yield "pictures", lambda: Pictures(kernels, dtype, self.head_dim, device).differing()
        yield "encoder", partial(self.encoder.differing, kernels, dtype, device)
        for name, layer in self.recurrent.items():
            yield name, partial(_differing_states, kernels, layer, dtype, device)
        for name, form in self.formats.items():
            yield f"weights in {name}", partial(self._differing_rows, kernels, form, device)

    def _shapes(self) -> Iterator[tuple[str, LayerShape]]:
        """The kinds of attention."""
        heads, latent, rotated = self.latents
        small = LayerShape.small(latent + rotated, has_experts=False, latent_dim=latent)
        yield "latents", replace(small, num_heads=heads)
        usual = LayerShape.small(self.head_dim, has_experts=False)
        yield "windows", replace(usual, kinds=((WINDOW, None), (None, CAP)), has_sinks=False)
        for cache in CODED:
            plain = replace(usual, kinds=((None, None), (WINDOW, None)), has_sinks=False)
            yield f"keys and values in {cache_dtype_name(cache)}", replace(plain, cache_dtype=cache)

    def _coded_difference(
        self, kernels: Kernels, oracle: Kernels, form: CodeFormat, device: torch.device
    ) -> float:
        """Return the largest difference of a linear and of experts from the oracle's, for few rows and for many."""
        ours, theirs = (
            [
                operator(Random(self.dtype, device)(rows, self.hidden))
                for operator in self._coded(each, form, device)
                for rows in self.num_rows
            ]
            for each in (kernels, oracle)
        )
        return distance(ours, theirs)

    def _differing_rows(
        self, kernels: Kernels, form: CodeFormat, device: torch.device
    ) -> list[str]:
        """Those of linear and experts whose first row has other bits alone than before more rows."""
        x = Random(self.dtype, device)(self.num_rows[-1], self.hidden)
        names = ("linear", "experts")
        return [
            name
            for name, operator in zip(names, self._coded(kernels, form, device), strict=True)
            if any(not torch.equal(operator(x[:n])[:1], operator(x[:1])) for n in self.num_rows)
        ]

    def _coded(
        self, kernels: Kernels, form: CodeFormat, device: torch.device
    ) -> Iterator[Callable[[Tensor], Tensor]]:
        """A linear over codes, and experts."""
        size, random = self.hidden, Random(self.dtype, device)
        weight = StoredWeight((form.random(size, size, device),), self.dtype, device)
        yield kernels.linear_from(LinearWeights(weight))
        formats = form, form
        yield kernels.experts(
            experts_weights(random, self.dtype, RULE, hidden=size, inter=size, formats=formats)
        )


def _recurrent_difference(
    kernels: Kernels,
    oracle: Kernels,
    layer: RecurrentLayer,
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    """Of the results, and of the states after them."""
    results = []
    for each in (kernels, oracle):
        state = layer.state(dtype, device)
        out = layer.run(each, state, batch_of_pages(COUNTS, PAGES, device), sum(COUNTS))
        results.append([tensor for tensor in (out, *state.tensors) if tensor.numel()])
    return distance(*results)


def _differing_states(
    kernels: Kernels, layer: RecurrentLayer, dtype: torch.dtype, device: torch.device
) -> list[str]:
    """What differs if the first sequence is computed without others, in chunks between CUTS."""
    together, apart = (layer.state(dtype, device) for _ in range(2))
    count, page = sum(COUNTS), PAGES[:1]
    whole = layer.run(kernels, together, batch_of_pages(COUNTS, PAGES, device), count)
    chunks = [
        layer.run(kernels, apart, batch_of_pages((end - begin,), page, device), count, slice(begin, end))
        for begin, end in itertools.pairwise(CUTS)
    ]  # fmt: skip
    pairs = {"results": (torch.cat(chunks), whole[: COUNTS[0]])}
    for name, *states in zip(("inputs", "state"), together.tensors, apart.tensors, strict=True):
        first, second = (each[page[0]] for each in states)
        pairs[name] = first, second
    return [name for name, pair in pairs.items() if not torch.equal(*pair)]
