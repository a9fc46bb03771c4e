"""A decoder: embedding, layers, norm and output head."""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace_shard.models.spec.attention_spec import AttentionSpec
from millrace_shard.models.spec.feed_forward_spec import FeedForwardSpec
from millrace_shard.models.spec.norm_spec import NormPlaces, NormSpec
from millrace_shard.models.spec.weight_names import WeightNames


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer."""

    attention: AttentionSpec
    feed_forward: FeedForwardSpec
    norm: NormSpec
    norm_places: NormPlaces = NormPlaces.BEFORE
    residual_multiplier: float = 1.0
    """Results of attention and feed-forward are multiplied by it before they are added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A decoder before it is split over ranks."""

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    """Before the head."""
    num_more_layers: int = 0
    """Layers of the file after `layers`: they predict further tokens and are not computed."""
    max_positions: int
    """`max_position_embeddings`."""
    tied_head: bool = False
    """Whether the head is the embedding."""
    may_lack_head: bool = False
    """Whether the file may have no head, because only hidden states are asked for."""
    embedding_multiplier: float = 1.0
    """Rounded to the model's dtype before it is used."""
    logit_multiplier: float = 1.0
    logit_softcap: float | None = None
    """Logits become softcap · tanh(logit / softcap)."""
    names: WeightNames = field(default_factory=WeightNames)

    @property
    def num_stored_layers(self) -> int:
        """The number of layers in the file."""
        return len(self.layers) + self.num_more_layers
