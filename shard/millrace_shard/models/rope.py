"""Tables of the cosines and sines of rotary position embeddings, and the flags that replace their scaling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from millrace_shard.device.resources import free_cuda_memory
from millrace_shard.errors import UnsupportedModel
from millrace_shard.models.interface import KVLayer
from millrace_shard.models.rope_spec import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeSpec,
    YarnScaling,
)
from millrace_shard.models.spec import AttentionSpec, DecoderSpec, LayerSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig

POSITIONS_PER_STEP = 8192


def rope_table(rope: RopeSpec, num_positions: int, *, long_context: bool = False) -> Tensor:
    """A table [num_positions, rotary_dim] float32 on CPU: cosines in the first half, sines in the second, both scaled.

    Two kinds depend on a length. transformers takes the longest one in the batch, so that the keys of a sequence depend
    on the other sequences and on its prefill chunks. Here a row of the table depends only on its position:

    - dynamic: position p is rotated as in a sequence of p + 1 tokens. That equals `generate` for prompts within
      `max_position_embeddings`, even if the generation exceeds it.
    - longrope: positions within `original_max_position_embeddings` use the short factors, later ones the long factors.
      That equals `generate` for prompts within that length. With `long_context`, all positions use the long factors.
      That equals `generate` for longer prompts, and suits a server of long prompts.
    """
    chunks = [
        _rotations(rope, chunk, long_context=long_context)
        for chunk in torch.split(torch.arange(num_positions), POSITIONS_PER_STEP)
    ]
    return torch.cat(chunks)


def model_rope_table(
    rope: RopeSpec, max_total_tokens: int | None, most: int | None = None
) -> Tensor:
    """The table for sequences of up to `max_total_tokens`; if unknown, of any length up to `most` that is supported."""
    longest = longest_position(rope)
    trained = getattr(rope.scaling, "original_positions", longest)
    is_long = (max_total_tokens or 0) > trained
    count = min(longest, max_total_tokens or most or longest)
    return rope_table(rope, count, long_context=is_long)


def longest_position(rope: RopeSpec) -> int:
    """The number of positions that the encoding supports: the trained ones, extended by the scaling."""
    scaling, trained = rope.scaling, rope.max_positions
    if isinstance(scaling, (LinearScaling, DynamicScaling)):
        return int(trained * scaling.factor)
    if isinstance(scaling, YarnScaling):
        return max(trained, int(scaling.original_positions * scaling.factor))
    return trained


def longest_sequence(spec: DecoderSpec) -> int:
    """The number of positions that all rotations of a decoder support."""
    ropes = {layer.attention.rope for layer in spec.layers} - {None}
    return max((longest_position(rope) for rope in ropes if rope), default=spec.max_positions)


def _rotations(rope: RopeSpec, positions: Tensor, *, long_context: bool) -> Tensor:
    """[P, rotary_dim] for `positions` [P]."""
    frequencies = _frequencies(rope, positions, long_context=long_context)
    angles = positions.float().unsqueeze(1) * frequencies
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return table * float(getattr(rope.scaling, "attention_factor", 1.0))


def _frequencies(rope: RopeSpec, positions: Tensor, *, long_context: bool) -> Tensor:
    """Inverse frequencies, one row for all positions or one per position."""
    scaling = rope.scaling
    if isinstance(scaling, DynamicScaling):
        return _dynamic(rope, scaling, positions)
    wavelengths = rope.theta ** _exponents(rope)
    if isinstance(scaling, LongRopeScaling):
        short, long = (
            1.0 / (torch.tensor(factors) * wavelengths)
            for factors in (scaling.short_factors, scaling.long_factors)
        )
        is_long = (positions >= scaling.original_positions).unsqueeze(1) | long_context
        return torch.where(is_long, long, short)
    plain = 1.0 / wavelengths
    if isinstance(scaling, LinearScaling):
        return plain / scaling.factor
    if isinstance(scaling, Llama3Scaling):
        return _llama3(scaling, plain)
    if isinstance(scaling, YarnScaling):
        return _yarn(rope, scaling, wavelengths)
    if isinstance(scaling, ProportionalScaling):
        return torch.where(torch.arange(len(plain)) < scaling.angles, plain, 0.0)
    return plain


def _exponents(rope: RopeSpec) -> Tensor:
    return torch.arange(0, rope.rotary_dim, 2, dtype=torch.float) / rope.rotary_dim


def _dynamic(rope: RopeSpec, scaling: DynamicScaling, positions: Tensor) -> Tensor:
    lengths = (positions + 1).clamp(min=rope.max_positions).unsqueeze(1)
    growth = scaling.factor * lengths / rope.max_positions - (scaling.factor - 1)
    base = rope.theta * growth ** (rope.rotary_dim / (rope.rotary_dim - 2))
    return 1.0 / base ** _exponents(rope)


def _llama3(scaling: Llama3Scaling, plain: Tensor) -> Tensor:
    turns = scaling.original_positions / (2 * math.pi / plain)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - share) * plain / scaling.factor + share * plain


def _yarn(rope: RopeSpec, scaling: YarnScaling, wavelengths: Tensor) -> Tensor:
    def channel_of(turns: float) -> float:
        """The channel that makes this number of turns within the original length."""
        length = scaling.original_positions / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(length) / (2 * math.log(rope.theta))

    low, high = channel_of(scaling.beta_fast), channel_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(len(wavelengths)).float() - low) / (high - low)).clamp(0, 1)
    plain = 1.0 / wavelengths
    return (1.0 / (scaling.factor * wavelengths)) * stretched + plain * (1 - stretched)


_KINDS: dict[str, type[LinearScaling] | type[DynamicScaling]] = {
    "linear": LinearScaling,
    "dynamic": DynamicScaling,
}


@dataclass(frozen=True, slots=True)
class RopeOverride:
    """A scaling. Raises UnsupportedModel for an unknown kind and for factors below 1."""

    kind: str
    """"linear" or "dynamic"."""
    factor: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise UnsupportedModel(f"rope scaling {self.kind!r} is not one of: {', '.join(_KINDS)}")
        if not self.factor >= 1:
            raise UnsupportedModel(f"a rope factor is at least 1, not {self.factor}")


def override_spec(spec: DecoderSpec, override: RopeOverride) -> DecoderSpec:
    """`spec` with the scaling of `override` in every layer that rotates."""
    scaling = _KINDS[override.kind](factor=override.factor)

    def scaled(layer: LayerSpec) -> LayerSpec:
        rope = layer.attention.rope
        if rope is None:
            return layer
        if isinstance(rope.scaling, ProportionalScaling):
            raise UnsupportedModel(
                f"rope scaling {override.kind!r} is not supported where rope_type is 'proportional'"
            )
        rope = replace(rope, scaling=scaling)
        return replace(layer, attention=replace(layer.attention, rope=rope))

    return replace(spec, layers=tuple(map(scaled, spec.layers)))


def override_config(config: PretrainedConfig, override: RopeOverride) -> None:
    """Replace the scaling of `config` but keep its base and rotary share, as TGI does. Raises UnsupportedModel."""
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        raise UnsupportedModel(f"{config.model_type} has no rotary embedding to scale")
    if "rope_type" not in parameters:
        raise UnsupportedModel(f"rope_parameters {parameters!r} are not of one kind for all layers")
    base = {k: v for k, v in parameters.items() if k in {"rope_theta", "partial_rotary_factor"}}
    config.rope_parameters = {"rope_type": override.kind, "factor": override.factor, **base}


class AxisRotations(NamedTuple):
    """Rotations of tokens with positions on three axes."""

    table: Tensor
    """[positions, rotary_dim] float32."""
    of_channels: Tensor
    """[rotary_dim] int64, the axis of each channel."""

    @classmethod
    def of(cls, rope: RopeSpec, tables: RopeTables) -> AxisRotations:
        assert rope.axes is not None
        of_channels = rope.axes.of_channels(rope.rotary_dim)
        return cls(tables.table(rope), torch.tensor(of_channels, device=tables.device))

    def of_tokens(self, axes: Tensor) -> Tensor:
        """[T, rotary_dim] for positions `axes` [3, T]."""
        channels = torch.arange(len(self.of_channels), device=axes.device)
        return self.table[axes[self.of_channels].T, channels].contiguous()


class RopeTables:
    """Makes each table once."""

    def __init__(self, max_total_tokens: int | None, device: torch.device) -> None:
        self._max_total_tokens = max_total_tokens
        self.device = device
        self._most: int | None = None
        self._tables: dict[RopeSpec, Tensor] = {}

    def limit(self, layers: Sequence[KVLayer]) -> None:
        """Leave out positions for whose keys a GPU has no memory in `layers`: a million take half a gigabyte here.

        A longer `max_total_tokens` is refused in the warm-up, before steps of that length.
        """
        if self.device.type == "cuda":
            _, total = free_cuda_memory(self.device)
            self._most = positions_in(total, layers)

    def query_factors(self, attention: AttentionSpec, longest: int) -> Tensor | None:
        """[positions] float32: the factors of queries in sequences of up to `longest`; None if they are not scaled."""
        scaling = attention.query_scaling
        if scaling is None:
            return None
        count = min(longest, self._max_total_tokens or self._most or longest)
        positions = torch.arange(count, dtype=torch.float) + scaling.offset
        steps = torch.floor(positions / scaling.positions)
        return (1 + scaling.beta * torch.log1p(steps)).to(self.device)

    def table(self, rope: RopeSpec) -> Tensor:
        if rope not in self._tables:
            table = model_rope_table(rope, self._max_total_tokens, self._most)
            self._tables[rope] = table.to(self.device)
        return self._tables[rope]


def positions_in(num_bytes: int, layers: Sequence[KVLayer]) -> int | None:
    """The most positions of a sequence whose keys and values fit, in codes of a byte; None: any number.

    Layers with a window keep few positions, whatever the length.
    """
    channels = sum(
        each.num_tensors * each.num_kv_heads * each.head_dim
        for each in layers
        if each.window is None
    )
    return max(num_bytes // channels, 2) if channels else None
