"""The split of a decoder over the ranks of a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Iterable

from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.layer_shape import LayerShape
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


def layer_shape(spec: DecoderSpec, world_size: int) -> LayerShape:
    """The shape of a rank's part of the layers. Raises as `check_split`."""
    check_split(spec, world_size)
    attention = spec.layers[0].attention
    num_heads, num_kv_heads = (
        attention.num_heads // world_size,
        kv_heads_per_rank(attention, world_size),
    )
    feed_forwards = {layer.feed_forward for layer in spec.layers}
    rows = (num_heads + 2 * num_kv_heads) * attention.head_dim
    mixtures = (each for each in feed_forwards if isinstance(each, ExpertsSpec))
    linears = {(rows, spec.hidden_size), (spec.hidden_size, num_heads * attention.head_dim)}
    for feed_forward in feed_forwards:
        linears |= _linears(feed_forward, spec.hidden_size, world_size)
    kinds = ((layer.attention.window, layer.attention.softcap) for layer in spec.layers)
    return LayerShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=attention.head_dim,
        kinds=tuple(dict.fromkeys(kinds)),
        has_sinks=any(layer.attention.sinks for layer in spec.layers),
        experts=tuple(
            (spec.hidden_size, each.intermediate_size // world_size, each.router.rule.top_k)
            for each in mixtures
        ),
        linears=tuple(sorted(linears)),
        head=(-(-spec.vocab_size // world_size), spec.hidden_size),
    )


def check_split(spec: DecoderSpec, world_size: int) -> None:
    """Raise UnsupportedModel, naming the possible numbers of ranks, unless `world_size` is one of them."""
    layers = set(spec.layers)
    first = spec.layers[0]
    possible = [
        ranks
        for ranks in range(1, first.attention.num_heads + 1)
        if all(_splits(layer, ranks) for layer in layers)
    ]
    if world_size not in possible:
        widths = " and ".join(map(str, sorted(_widths(layers))))
        raise UnsupportedModel(
            f"{world_size} shards cannot share {first.attention.num_heads} attention heads, "
            f"{first.attention.num_kv_heads} key-value heads and {widths} intermediate channels; "
            f"these numbers of shards work: {', '.join(map(str, possible))}"
        )


def _splits(layer: LayerSpec, ranks: int) -> bool:
    heads, kv_heads = layer.attention.num_heads, layer.attention.num_kv_heads
    widths = layer.feed_forward.widths
    divides = heads % ranks == 0 and all(width % ranks == 0 for width in widths)
    return divides and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def _widths(layers: Iterable[LayerSpec]) -> set[int]:
    return {width for layer in layers for width in layer.feed_forward.widths}


def _linears(spec: FeedForwardSpec, hidden_size: int, world_size: int) -> set[tuple[int, int]]:
    """Outputs and inputs of the linears of a rank's part of a feed-forward half."""
    shapes = set()
    for width in spec.widths:
        inter = width // world_size
        shapes |= {(2 * inter, hidden_size), (hidden_size, inter)}
    if isinstance(spec, ExpertsSpec):
        shapes.add((spec.router.num_experts, hidden_size))
        if spec.shared is not None and spec.shared.gated:
            shapes.add((1, hidden_size))
    return shapes
