"""The split of a decoder over the ranks of a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.layer_shape import LayerShape
from millrace_shard.kernels.layer_weights import Activation
from millrace_shard.models.recurrent_spec import KimiDeltaSpec, Mamba1Spec
from millrace_shard.models.spec import (
    AttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerSpec,
)


def kv_heads_per_rank(attention: AttentionSpec, world_size: int) -> int:
    """Key-value heads per rank; with fewer heads than ranks, neighbouring ranks hold the same head."""
    return max(1, attention.num_kv_heads // world_size)


def _attentions(spec: DecoderSpec) -> tuple[AttentionSpec, ...]:
    """Of the layers that attend, or the one by whose heads ranks share a model without attention."""
    return spec.attentions or (spec.layers[0].attention,)


def layer_shapes(spec: DecoderSpec, world_size: int) -> tuple[LayerShape, ...]:
    """The shapes of a rank's part of the layers, one for each size of heads. Raises as `check_split`."""
    shape = layer_shape(spec, world_size)
    sizes = {each.cached_dim: kv_heads_per_rank(each, world_size) for each in _attentions(spec)}
    return tuple(replace(shape, head_dim=dim, num_kv_heads=count) for dim, count in sizes.items())


def layer_shape(spec: DecoderSpec, world_size: int) -> LayerShape:
    """The shape of a rank's part of the layers, with the heads of the first one. Raises as `check_split`."""
    check_split(spec, world_size)
    attention = _attentions(spec)[0]
    num_heads, num_kv_heads = (
        attention.num_heads // world_size,
        kv_heads_per_rank(attention, world_size),
    )
    feed_forwards = {layer.feed_forward for layer in spec.layers if layer.has_feed_forward}
    feed_forwards |= {layer.side_experts for layer in spec.layers if layer.side_experts is not None}
    linears = set[tuple[int, int]]()
    for attends in set(spec.attentions):
        linears |= _attention_linears(attends, spec.hidden_size, world_size)
    mixtures = (each for each in feed_forwards if isinstance(each, ExpertsSpec))
    for feed_forward in feed_forwards:
        linears |= _linears(feed_forward, spec.hidden_size, world_size)
    for each in {layer.recurrent for layer in spec.layers if layer.recurrent is not None}:
        linears |= {(outputs, spec.hidden_size) for outputs in each.rank_outputs(world_size)}
        linears.add((spec.hidden_size, each.inner // world_size))
        if isinstance(each, KimiDeltaSpec):
            linears.add((each.inner // world_size, each.head_dim))
        if isinstance(each, Mamba1Spec):
            own = each.channels // world_size
            linears |= {(each.made, own), (own, each.rank)}
    if spec.layer_inputs is not None:
        dim, hidden = spec.layer_inputs.dim, spec.hidden_size
        linears |= {(len(spec.layers) * dim, hidden), (dim, hidden), (hidden, dim)}
    kinds = ((each.window, each.softcap) for each in _attentions(spec))
    return LayerShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=attention.cached_dim,
        latent_dim=attention.latent_dim,
        kinds=tuple(dict.fromkeys(kinds)),
        has_sinks=any(each.sinks for each in spec.attentions),
        experts=tuple(
            (spec.hidden_size, each.intermediate_size // world_size, each.router.rule.top_k)
            for each in mixtures
        ),
        linears=tuple(sorted(linears)),
        head=(-(-spec.vocab_size // world_size), spec.hidden_size),
    )


def _attention_linears(
    attention: AttentionSpec, hidden_size: int, world_size: int
) -> set[tuple[int, int]]:
    """Outputs and inputs of the linears of a rank's part of an attention half."""
    heads, latent = attention.num_heads // world_size, attention.latent
    out = (hidden_size, attention.out_width // world_size)
    if attention.kv_source is not None:
        return {(heads * attention.head_dim, hidden_size), out}
    if latent is None:
        rows = heads * (2 if attention.gated else 1) + 2 * kv_heads_per_rank(attention, world_size)
        return {(rows * attention.head_dim, hidden_size), out}
    shapes = {out, (latent.dim, latent.key_dim), (latent.value_dim, latent.dim)}
    queries = heads * latent.head_width
    if latent.query_dim is not None:
        shapes.add((queries, latent.query_dim))
    return shapes | {((latent.query_dim or queries) + attention.head_dim, hidden_size)}


def check_split(spec: DecoderSpec, world_size: int) -> None:
    """Raise UnsupportedModel, naming the possible numbers of ranks, unless `world_size` is one of them."""
    layers = set(spec.layers)
    first = _attentions(spec)[0]
    possible = [
        ranks
        for ranks in range(1, first.num_heads + 1)
        if all(_splits(layer, ranks) for layer in layers)
    ]
    if world_size not in possible:
        widths = " and ".join(map(str, sorted(_widths(layers))))
        kv_heads = f", {first.num_kv_heads} key-value heads"
        raise UnsupportedModel(
            f"{world_size} shards cannot share {first.num_heads} attention heads"
            f"{'' if first.latent else kv_heads}{_recurrent_heads(layers)} and {widths} intermediate channels; "
            f"these numbers of shards work: {', '.join(map(str, possible))}"
        )


def _splits(layer: LayerSpec, ranks: int) -> bool:
    heads, kv_heads = layer.attention.num_heads, layer.attention.num_kv_heads
    divides = heads % ranks == 0 and all(width % ranks == 0 for width in layer.widths)
    if layer.recurrent is not None and not layer.recurrent.splits(ranks):
        return False
    if layer.attention.by_group and layer.attends and kv_heads % ranks:
        return False
    return divides and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def _recurrent_heads(layers: Iterable[LayerSpec]) -> str:
    shared = {layer.recurrent.shared for layer in layers if layer.recurrent is not None}
    return "".join(f", {each}" for each in sorted(shared))


def _widths(layers: Iterable[LayerSpec]) -> set[int]:
    return {width for layer in layers for width in layer.widths}


def _linears(spec: FeedForwardSpec, hidden_size: int, world_size: int) -> set[tuple[int, int]]:
    """Outputs and inputs of the linears of a rank's part of a feed-forward half."""
    shapes = set()
    latent = spec.latent_size if isinstance(spec, ExpertsSpec) else None
    for number, width in enumerate(spec.widths):
        # Routed experts have the first width.
        inter, outer = width // world_size, hidden_size if number else latent or hidden_size
        has_gate = not isinstance(spec.activation, Activation) or spec.activation.has_gate
        first = 2 * inter if has_gate else inter
        shapes |= {(first, outer), (outer, inter)}
    if latent is not None:
        shapes |= {(latent, hidden_size), (hidden_size, latent)}
    if isinstance(spec, ExpertsSpec):
        shapes.add((spec.router.num_experts, hidden_size))
        if spec.shared is not None and spec.shared.gated:
            shapes.add((1, hidden_size))
    return shapes
