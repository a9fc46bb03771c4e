"""The linears of a decoder by their names in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from millrace_shard.models.spec.decoder_spec import DecoderSpec, LayerSpec
from millrace_shard.models.spec.feed_forward_spec import ExpertsSpec
from millrace_shard.models.spec.weight_names import ExpertNames, LayerNames


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedLinear:
    """A linear before it is split over ranks."""

    module: str
    outputs: int
    inputs: int
    shares_inputs: bool = False
    """Whether each rank has a part of the inputs, not of the outputs."""


def named_linears(spec: DecoderSpec) -> list[NamedLinear]:
    """All linears but those of routed experts, the head last."""
    found = list[NamedLinear]()
    for index, layer in enumerate(spec.layers):
        prefix = f"{spec.names.layers}.{index}."
        found += _attention(prefix, spec, layer)
        found += _feed_forward(prefix, spec, layer)
    name = spec.names.embedding if spec.tied_head else spec.names.head
    return [*found, NamedLinear(module=name, outputs=spec.vocab_size, inputs=spec.hidden_size)]


def expert_linears(spec: DecoderSpec) -> list[NamedLinear]:
    """Those of the first routed expert of each layer that has experts."""
    found = list[NamedLinear]()
    for index, layer in enumerate(spec.layers):
        if isinstance(layer.feed_forward, ExpertsSpec):
            names = spec.names.layer.experts[0]
            prefix = f"{spec.names.layers}.{index}.{names.experts}.0."
            modules = (names.gate, names.up), names.down
            width = layer.feed_forward.intermediate_size
            found += _gated(prefix, *modules, width, spec.hidden_size)
    return found


def _attention(prefix: str, spec: DecoderSpec, layer: LayerSpec) -> Iterator[NamedLinear]:
    names, attention, hidden = spec.names.layer, layer.attention, spec.hidden_size
    own, theirs = (
        count * attention.head_dim for count in (attention.num_heads, attention.num_kv_heads)
    )
    parts = {names.query: own, names.key: theirs, names.value: theirs}
    if names.qkv is not None:
        parts = {names.qkv: own + 2 * theirs}
    for name, outputs in parts.items():
        yield NamedLinear(module=prefix + name, outputs=outputs, inputs=hidden)
    yield NamedLinear(module=prefix + names.out, outputs=hidden, inputs=own, shares_inputs=True)


def _feed_forward(prefix: str, spec: DecoderSpec, layer: LayerSpec) -> list[NamedLinear]:
    names, half, hidden = spec.names.layer, layer.feed_forward, spec.hidden_size
    if not isinstance(half, ExpertsSpec):
        return _dense(prefix, names, half.intermediate_size, hidden)
    if half.shared is None:
        return []
    return _shared(prefix, names.experts[0], half.shared.mlp.intermediate_size, hidden)


def _dense(prefix: str, names: LayerNames, width: int, hidden: int) -> list[NamedLinear]:
    if names.gate_up is None:
        return _gated(prefix, (names.gate, names.up), names.down, width, hidden)
    first, last = _gated(prefix, (names.gate_up,), names.down, width, hidden)
    return [NamedLinear(module=first.module, outputs=2 * width, inputs=hidden), last]


def _shared(prefix: str, names: ExpertNames, width: int, hidden: int) -> list[NamedLinear]:
    gate, up, down = (f"{names.shared}.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
    return _gated(prefix, (gate, up), down, width, hidden)


def _gated(
    prefix: str, first: tuple[str, ...], down: str, width: int, hidden: int
) -> list[NamedLinear]:
    return [
        *(NamedLinear(module=prefix + name, outputs=width, inputs=hidden) for name in first),
        NamedLinear(module=prefix + down, outputs=hidden, inputs=width, shares_inputs=True),
    ]
