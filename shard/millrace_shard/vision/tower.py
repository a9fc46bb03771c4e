"""The SigLIP encoder of a tile, after which each family makes features of the language model out of its patches.

A tile is encoded by itself, and every product has the shape of one tile. So the bits of its features depend on its
pixels alone.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.kernels.base import Kernels, Linear
from millrace_shard.kernels.elementwise import elementwise
from millrace_shard.kernels.layer_weights import LinearWeights
from millrace_shard.kernels.stored_weight import StoredWeight
from millrace_shard.models.linear_loader import LinearLoader, Part
from millrace_shard.vision.parts import Rotation, Split, SplitLayer, run_parts
from millrace_shard.vision.spec import CHANNELS, EncoderActivation, EncoderSpec, VisionSpec
from millrace_shard.weights.weights import Weights


class WeightReader:
    """Reads the whole encoder, which every rank has."""

    def __init__(self, weights: Weights, kernels: Kernels) -> None:
        """`weights` has the whole tensors, as for a single rank."""
        self._weights = weights
        self._kernels = kernels
        self._linears = LinearLoader(weights, ProcessGroup.single(), None)
        self._digest = hashlib.sha256()

    def linear(
        self, prefix: str, names: tuple[str, ...], outputs: int, inputs: int, *, bias: bool = True
    ) -> Linear:
        """The linears `names`, each [outputs, inputs] and all with a bias or without, side by side."""
        parts = [Part(name, outputs) for name in names]
        read = self._linears.columns(prefix, parts, inputs, fused=None, bias=bias)
        if read.bias is not None:
            self._digest.update(_bytes(read.bias))
        linear = self._kernels.linear_from(read)
        self._weights.release()
        return linear

    def matrix(self, name: str, bias: str | None, outputs: int, *shape: int) -> Linear:
        """A linear over a tensor [outputs, *shape]."""
        weight = self.tensor(name, outputs, *shape).view(outputs, -1)
        of_bias = None if bias is None else self.tensor(bias, outputs)
        return self._kernels.linear_from(LinearWeights(StoredWeight.of(weight), of_bias))

    def linear_from(self, weights: LinearWeights) -> Linear:
        """A linear over tensors that were read here."""
        return self._kernels.linear_from(weights)

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A whole tensor, in the model's dtype unless another is given."""
        values = self._weights.replicated(name, *shape, dtype=dtype)
        self._digest.update(_bytes(values))
        return values

    @property
    def digest(self) -> bytes:
        """Of all that was read but the matrices of layers."""
        return self._digest.digest()


def _bytes(values: Tensor) -> bytes:
    return values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


class LayerNorm:
    """A norm over the last axis with a mean and a bias, computed in float32."""

    def __init__(self, reader: WeightReader, name: str, size: int, eps: float) -> None:
        wide = partial(reader.tensor, dtype=torch.float32)
        self._weight, self._bias = wide(f"{name}.weight", size), wide(f"{name}.bias", size)
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """[n, size] to the same in the same dtype."""
        wide = F.layer_norm(x.float(), self._weight.shape, self._weight, self._bias, self._eps)
        return wide.to(x.dtype)


class EncoderLayer(SplitLayer):
    """Attention of all patches to all patches, and a feed-forward half, each after a norm."""

    def __init__(
        self, reader: WeightReader, prefix: str, spec: EncoderSpec, kernels: Kernels
    ) -> None:
        hidden, inter = spec.hidden_size, spec.intermediate_size
        qkv = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
        super().__init__(kernels, hidden // spec.num_heads)
        self._num_heads = spec.num_heads
        self._activation = spec.activation
        self._before_attention = LayerNorm(reader, f"{prefix}layer_norm1", hidden, spec.eps)
        self._qkv = reader.linear(prefix, qkv, hidden, hidden)
        self._out = reader.linear(prefix, ("self_attn.out_proj",), hidden, hidden)
        self._before_mlp = LayerNorm(reader, f"{prefix}layer_norm2", hidden, spec.eps)
        self._up = reader.linear(prefix, ("mlp.fc1",), inter, hidden)
        self._down = reader.linear(prefix, ("mlp.fc2",), hidden, inter)

    def project(self, x: Tensor, rotation: Rotation | None) -> Tensor:  # noqa: ARG002
        """Queries, keys and values [rows, 3, heads, head_dim] of [rows, hidden]."""
        return self._qkv(self._before_attention(x)).view(x.shape[0], 3, self._num_heads, -1)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The output of some rows."""
        x = x + self._out(attended)
        return x + self._down(activated(self._up(self._before_mlp(x)), self._activation))


def activated(x: Tensor, activation: EncoderActivation) -> Tensor:
    """The activation of each value of `x`, with bits that depend on this value alone."""
    function = _ACTIVATIONS[activation]
    return elementwise(function, x) if x.device.type == "cpu" else function(x)


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


_ACTIVATIONS: Mapping[EncoderActivation, Callable[[Tensor], Tensor]] = {
    EncoderActivation.GELU_TANH: partial(F.gelu, approximate="tanh"),
    EncoderActivation.GELU: F.gelu,
    EncoderActivation.QUICK_GELU: _quick_gelu,
    EncoderActivation.SILU: F.silu,
}


_PATCHES = "embeddings.patch_embedding"


class Tower(ABC):
    """The encoder and its connector, in the dtype of the model."""

    modules: ClassVar[tuple[str, ...]] = ("vision_tower.vision_model", "vision_tower")
    """The module with the patches' embedding, the layers and the norms, by the names that it has in files."""
    connector: ClassVar[str]
    """A tensor of the connector, which files with only the text model lack."""

    def __init__(self, spec: VisionSpec, weights: Weights, kernels: Kernels) -> None:
        encoder, reader = spec.encoder, WeightReader(weights, kernels)
        hidden, patch = encoder.hidden_size, encoder.patch_size
        module = next(
            (name for name in self.modules if f"{name}.{_PATCHES}.weight" in weights),
            self.modules[0],
        )
        embedding, layers = f"{module}.embeddings", f"{module}.encoder.layers"
        self.spec = spec
        self._dtype = weights.dtype
        self._patches = reader.matrix(
            f"{module}.{_PATCHES}.weight",
            None if encoder.has_class else f"{module}.{_PATCHES}.bias",
            *(hidden, CHANNELS, patch, patch),
        )
        count = encoder.positions_per_side**2 + encoder.has_class
        positions = reader.tensor(f"{embedding}.position_embedding.weight", count, hidden)
        self._class_row: Tensor | None = None
        if encoder.has_class:
            row = reader.tensor(f"{embedding}.class_embedding", hidden)
            self._class_row, positions = (row + positions[0])[None], positions[1:]
            self._first_norm = LayerNorm(reader, f"{module}.pre_layrnorm", hidden, encoder.eps)
        if not spec.is_whole:
            buckets = position_buckets(spec.patches_per_side, encoder.positions_per_side)
            positions = positions[buckets.to(positions.device)]
        self._positions = positions
        self._layers = [
            EncoderLayer(reader, f"{layers}.{index}.", encoder, kernels)
            for index in range(encoder.num_layers)
        ]
        self._norm: LayerNorm | None = None
        if encoder.ends_with_norm:
            self._norm = LayerNorm(reader, f"{module}.post_layernorm", hidden, encoder.eps)
        self.read_connector(reader)
        self.digest = reader.digest

    @abstractmethod
    def read_connector(self, reader: WeightReader) -> None:
        """Read the weights of `connect`. Raises WeightsError."""

    @abstractmethod
    def connect(self, x: Tensor) -> Tensor:
        """Features [rows_per_tile, text_size] of the patches [patches, hidden] after the last norm, if there is one."""

    def begin(self, pixels: Tensor) -> Split:
        """The first layer's input for a tile [3, size, size] float32, with CLIP's row before the patches."""
        cut = patches_of(pixels.to(self._dtype), self.spec.encoder.patch_size)
        x = self._patches(cut) + self._positions
        if self._class_row is None:
            return Split(x)
        return Split(self._first_norm(torch.cat([self._class_row, x])))

    def run(self, tile: Split, parts: slice) -> Split:
        """Run some parts of layers."""
        return run_parts(self._layers, tile, parts)

    def end(self, tile: Split) -> Tensor:
        """Features [rows_per_tile, text_size] of the last layer's output."""
        x = tile.x if self._norm is None else self._norm(tile.x)
        return self.connect(x if self._class_row is None else x[1:])

    def extra(self) -> Tensor | None:
        """The features [extra_rows, text_size] that each image has behind its tiles' features, if it has any."""
        return None

    def __call__(self, pixels: Tensor) -> Tensor:
        """Features [rows_per_tile, text_size] of a tile [3, size, size] float32."""
        return self.end(self.run(self.begin(pixels), slice(None)))


def position_buckets(side: int, positions: int) -> Tensor:
    """[side * side] int64, the learned position of each patch of a square tile with `side` patches a side.

    There are `positions` a side; float32 rounds as in transformers, where the coordinates are fractions of a side.
    """
    boundaries = torch.arange(1 / positions, 1.0, 1 / positions)
    fractions = torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))
    buckets = torch.bucketize(fractions.clamp(max=1.0 - 1e-6), boundaries, right=True)
    return (buckets[:, None] * positions + buckets[None, :]).flatten()


def patches_of(pixels: Tensor, patch: int) -> Tensor:
    """The patches of a tile [3, height, width], row by row: [patches, 3 * patch * patch]; the rest is left out."""
    rows, columns = (side // patch for side in pixels.shape[1:])
    whole = pixels[:, : rows * patch, : columns * patch]
    cells = whole.reshape(CHANNELS, rows, patch, columns, patch).permute(1, 3, 0, 2, 4)
    return cells.reshape(rows * columns, -1)
