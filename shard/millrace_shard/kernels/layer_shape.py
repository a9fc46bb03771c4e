"""The shapes of a model's layers that kernels are compiled for and measured with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from millrace_shard.kernels.quantized import CodeFormat

AttentionKind = tuple[int | None, float | None]
"""Window and soft cap of a layer's attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One rank's part of the layers of a model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    kinds: tuple[AttentionKind, ...] = ((None, None),)
    """The kinds of attention of the layers, each once."""
    latent_dim: int | None = None
    """The first channels of cached keys that are the values, too, if layers attend over latents."""
    has_sinks: bool = False
    """Whether heads have sinks."""
    experts: tuple[tuple[int, int, int], ...] = ()
    """Hidden and intermediate channels of the experts, and how many a token has."""
    linears: tuple[tuple[int, int], ...] = ()
    """Outputs and inputs of the linears of a layer, as far as they are known."""
    head: tuple[int, int] | None = None
    """Outputs and inputs of the output head, if known."""
    cache_dtype: torch.dtype | None = None
    """The dtype of keys and values in the cache; None: the model's."""
    formats: tuple[CodeFormat, ...] = ()
    """The formats of the linears and the head whose weights are codes, each once."""
    expert_formats: tuple[CodeFormat, ...] = ()
    """The formats of the experts' weights, each once."""

    @classmethod
    def small(
        cls,
        head_dim: int,
        cache_dtype: torch.dtype | None = None,
        *,
        has_experts: bool = True,
        latent_dim: int | None = None,
    ) -> LayerShape:
        """A small shape with every feature, for kernels that are compiled once for all models."""
        is_latent = latent_dim is not None
        return cls(
            num_heads=4,
            num_kv_heads=1 if is_latent else 2,
            head_dim=head_dim,
            latent_dim=latent_dim,
            kinds=((None, None),) if is_latent else ((None, None), (66, 3.0)),
            has_sinks=not is_latent,
            experts=((96, 816, 4),) if has_experts else (),
            cache_dtype=cache_dtype,
        )


@dataclass(frozen=True, slots=True)
class CodedLinears:
    """Linears of a rank's part of a model whose weights are codes of one format."""

    format: CodeFormat
    inputs: int
    outputs: int
    """Of all of them together, as far as one token uses them."""
