"""What models with images add to a decoder: layers of an encoder, and attention to later tokens of a picture."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from millrace_shard.kernels.agreement import Random, distance, filled_cache, ragged_batch
from millrace_shard.kernels.base import Kernels, LayerCache, Linear
from millrace_shard.kernels.layer_shape import LayerShape
from millrace_shard.kernels.layer_weights import LinearWeights
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.kernels.stored_weight import StoredWeight
from millrace_shard.vision.parts import Split, run_parts
from millrace_shard.vision.spec import PARTS, EncoderSpec
from millrace_shard.vision.tower import EncoderLayer, WeightReader

CPU = torch.device("cpu")
NUM_WINDOWS = 4
CONTEXTS = (230, 40)
PICTURES = ((20, 90), (150, 201))
"""Tokens of the first sequence that see each other, ascending."""
CHUNKS = ((0, 90), (47, 150), (149, 201), (201, 230))
"""Spans of the first sequence, of which two begin inside a picture or before it."""


class _RandomWeights(WeightReader):
    """In place of a checkpoint: the same numbers on every device, rounded to `rounded`."""

    def __init__(
        self, kernels: Kernels, rounded: torch.dtype, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._kernels, self._rounded, self._dtype, self._device = kernels, rounded, dtype, device
        self._generator = torch.Generator().manual_seed(0)

    def linear(
        self, prefix: str, names: tuple[str, ...], outputs: int, inputs: int, *, bias: bool = True
    ) -> Linear:
        rows = len(names) * outputs
        weight = StoredWeight.of(self.tensor(prefix, rows, inputs, scale=inputs**-0.5))
        return self._kernels.linear_from(
            LinearWeights(weight, self.tensor(prefix, rows) if bias else None)
        )

    def tensor(
        self,
        name: str,  # noqa: ARG002
        *shape: int,
        dtype: torch.dtype | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        made = scale * torch.randn(shape, generator=self._generator)
        return made.to(self._rounded).to(self._device, dtype or self._dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """The sizes of an encoder, and the patches of a tile."""

    spec: EncoderSpec
    patches: int

    def difference(self, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> float:
        """Of a layer from plain torch in float32 on a CPU, over all patches and in windows; see `distance`."""
        wide = PlainKernels(deterministic=False)
        ours, theirs = (
            [run_parts([layer], tile, slice(None)).x.cpu() for tile in tiles]
            for layer, tiles in (
                self._made(kernels, dtype, dtype, device),
                self._made(wide, dtype, torch.float32, CPU),
            )
        )
        return distance(ours, theirs)

    def differing(self, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> list[str]:
        """The kinds of attention with which a layer has other bits in parts than as a whole."""
        layer, tiles = self._made(kernels, dtype, dtype, device)
        found = []
        for tile in tiles:
            whole, cut = run_parts([layer], tile, slice(None)), tile
            for part in range(PARTS):
                cut = run_parts([layer], cut, slice(part, part + 1))
            if not torch.equal(whole.x, cut.x):
                found.append("in windows" if tile.windows else "over all patches")
        return found

    def _made(
        self, kernels: Kernels, rounded: torch.dtype, dtype: torch.dtype, device: torch.device
    ) -> tuple[EncoderLayer, Sequence[Split]]:
        """A layer with random weights, and a tile over all patches and in windows."""
        reader = _RandomWeights(kernels, rounded, dtype, device)
        layer = EncoderLayer(reader, "", self.spec, kernels)
        x = reader.tensor("", self.patches, self.spec.hidden_size)
        windows = torch.arange(self.patches, device=device).view(NUM_WINDOWS, -1)
        return layer, (Split(x), Split(x, windows=(windows,)))


class Pictures:
    """Two prompts, in one of which tokens of pictures see later ones."""

    def __init__(
        self, kernels: Kernels, dtype: torch.dtype, head_dim: int, device: torch.device
    ) -> None:
        """Keys and values are in a cache of `kernels`."""
        random = Random(dtype, device)
        self._kernels, self._device, self._scale = kernels, device, head_dim**-0.5
        shape = LayerShape.small(head_dim)
        self._cache: LayerCache = filled_cache(kernels, random, shape, CONTEXTS)
        self._queries = random(sum(CONTEXTS), shape.num_heads, head_dim)

    def attended(self, begin: int, end: int, others: int) -> Tensor:
        """Rows `begin` to `end` of the first prompt, and the last `others` of the second one, in one step."""
        ends = torch.arange(1, CONTEXTS[0] + 1, dtype=torch.int32)
        for first, last in PICTURES:
            ends[first:last] = last
        own = torch.arange(CONTEXTS[1] - others, CONTEXTS[1], dtype=torch.int32) + 1
        batch = ragged_batch(
            (end - begin, others),
            (end, CONTEXTS[1]),
            block_size=self._kernels.block_size,
            device=self._device,
            tables_of=CONTEXTS,
        )
        batch = replace(
            batch,
            key_ends=torch.cat((ends[begin:end], own)).to(self._device),
        )
        rows = torch.cat((self._queries[begin:end], self._queries[len(self._queries) - others :]))
        return self._kernels.attend(rows, batch, self._cache, scale=self._scale)

    def differing(self) -> list[str]:
        """The chunks of the first prompt whose rows have other bits than in the whole prompt."""
        whole = self.attended(0, CONTEXTS[0], CONTEXTS[1])[: CONTEXTS[0]]
        return [
            f"from {begin} to {end}"
            for begin, end in CHUNKS
            if not torch.equal(self.attended(begin, end, 1)[:-1], whole[begin:end])
        ]


def pictures_difference(
    kernels: Kernels, oracle: Kernels, dtype: torch.dtype, head_dim: int, device: torch.device
) -> float:
    """Of the attention of prompts with pictures; see `distance`."""
    ours, theirs = (
        [Pictures(each, dtype, head_dim, device).attended(0, CONTEXTS[0], CONTEXTS[1])]
        for each in (kernels, oracle)
    )
    return distance(ours, theirs)


assert all(first < last <= CONTEXTS[0] for first, last in itertools.chain(PICTURES, CHUNKS))
