"""Kernels for CUDA: Triton for attention, rope, rows and scores, the vendor's library for linears.

In deterministic mode a row's bits depend neither on the composition of the batch nor on the prefill chunks. Otherwise
the bits of linears may depend on the number of rows, and attention uses different tiles for prompts and for single
queries. No operator waits for the device or reads from it, and grids follow only from shapes and `batch.num_queries`,
so a step of single queries may be captured in a CUDA graph and replayed over other contexts and tables.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from millrace_shard.kernels.base import Experts, HeadsLinear, LayerCache, Linear
from millrace_shard.kernels.cuda import (
    triton_heads,
    triton_penalties,
    triton_rope,
    triton_rows,
    triton_states,
    triton_thresholds,
)
from millrace_shard.kernels.cuda.cuda_attention import AttentionRule, PagedAttention
from millrace_shard.kernels.cuda.cuda_latents import (
    MOST_LATENT,
    MOST_ROTATED,
    PagedLatentAttention,
)
from millrace_shard.kernels.cuda.grouped_experts import GroupedExperts
from millrace_shard.kernels.cuda.quantized_linear import has_codes, linear_of_parts
from millrace_shard.kernels.cuda.triton_linear import FixedOrderLinear
from millrace_shard.kernels.cuda.varlen_attention import VarlenAttention
from millrace_shard.kernels.expert_weights import ExpertsWeights
from millrace_shard.kernels.kv_cache import is_coded, new_layer_cache
from millrace_shard.kernels.layer_blocks import ComposedBlocks
from millrace_shard.kernels.layer_weights import HeadNorms, LinearWeights, NormWeights, Rotation
from millrace_shard.kernels.lora.adapter_table import LoraSite
from millrace_shard.kernels.lora.triton_lora import TritonAdaptedLinear
from millrace_shard.kernels.plain import PlainLinear
from millrace_shard.kernels.ragged import RaggedBatch


class TritonSampling:
    """Sampling operators by Triton; see SamplingKernels."""

    def find_threshold(
        self, keys: Tensor, probabilities: Tensor | None, limit: Tensor, /
    ) -> Tensor:
        return triton_thresholds.find_threshold(keys, probabilities, limit)

    def count_tokens(
        self, counts: Tensor, token_table: Tensor, spans: Tensor, longest: int
    ) -> None:
        """Add the tokens of `spans` to `counts`."""
        triton_penalties.count_tokens(counts, token_table, spans, longest)

    def penalise(
        self, scores: Tensor, counts: Tensor, token_table: Tensor, rows: Tensor, penalties: Tensor
    ) -> None:
        """Penalise the ids that occur in the sequences of `rows`."""
        triton_penalties.penalise(scores, counts, token_table, rows, penalties)


VARLEN, GROUPED, CUBLAS, SCALED = "varlen_attn", "grouped_mm", "cublas", "scaled_mm"
"""Torch's operators by their names, and the vendor's library for many rows over codes that are expanded first."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = range(16, 257)
LATENT_DIMS, ROPE_DIMS = range(16, MOST_LATENT + 1), range(1, MOST_ROTATED + 1)
"""Of keys over latents: the channels of the latent, and the further ones."""


def has_widths(head_dim: int, latent_dim: int | None) -> bool:
    """Whether the kernels have heads of these channels, or keys of these channels over latents."""
    if latent_dim is None:
        return head_dim in HEAD_DIMS
    return latent_dim in LATENT_DIMS and head_dim - latent_dim in ROPE_DIMS


class Float32Head:
    """A head by the vendor's library whose logits are not rounded to the dtype of the weight."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight.t()

    def __call__(self, x: Tensor) -> Tensor:
        """[R, hidden] to [R, vocab] float32."""
        return torch.mm(x, self._weight, out_dtype=torch.float32)


class CudaKernels(ComposedBlocks):
    """Kernels for CUDA; caches are [num_blocks, 16, num_kv_heads, head_dim]."""

    name = "cuda"
    block_size = 16
    key_tile = 64
    capturable = True

    def __init__(self, *, deterministic: bool, operators: Collection[str] = ()) -> None:
        """`operators` of libraries, of those named above, replace our own in fast mode.

        Raises ImportError where torch lacks one.
        """
        self.deterministic = deterministic
        self.sampling = TritonSampling()
        self.operators = tuple(operators)
        varlen = VarlenAttention() if VARLEN in operators else None
        self._attention = PagedAttention(deterministic=deterministic, varlen=varlen)
        self._latent_attention = PagedLatentAttention(deterministic=deterministic)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Keep `weight` [out, in] and `bias` [out] as they are."""
        return (FixedOrderLinear if self.deterministic else PlainLinear)(weight, bias)

    def heads_linear(self, weight: Tensor) -> HeadsLinear:
        """A linear for each head, all in one launch."""
        return triton_heads.LinearOfHeads(weight)

    def linear_from(self, weights: LinearWeights) -> Linear:
        """A linear over a copy of the weight, whose codes stay packed, with its adapters."""
        weight = weights.weight
        if not has_codes(weight):
            return super().linear_from(weights)
        linear = linear_of_parts(
            weight,
            weights.bias,
            self.linear,
            weight.dtype,
            expands=CUBLAS in self.operators,
            scaled=SCALED in self.operators and weight.dtype == torch.bfloat16,
        )
        return self.adapted(linear, weights.lora)

    def adapted(self, linear: Linear, site: LoraSite | None) -> Linear:
        """`linear` with the adapters of `site`, by Triton; `linear` itself without a site."""
        return linear if site is None else TritonAdaptedLinear(linear, site)

    def head(self, weight: Tensor, lora: LoraSite | None = None) -> Linear:
        """An output head that keeps `weight` [vocab, hidden]; its logits are the float32 sums."""
        if not self.deterministic and (
            weight.dtype == torch.float32 or weight.device.type != "cuda"
        ):
            return super().head(weight, lora)
        if self.deterministic:
            head: Linear = FixedOrderLinear(weight, None, out_dtype=torch.float32)
        else:
            head = Float32Head(weight)
        return self.adapted(head, lora)

    def experts(self, weights: ExpertsWeights) -> Experts:
        """The experts of a layer, grouped by expert."""
        if not weights.is_usual:
            return super().experts(weights)
        return GroupedExperts(self, weights, by_torch=GROUPED in self.operators)

    def head_from(self, weights: LinearWeights) -> Linear:
        """An output head over a copy of the weight, whose codes stay packed, with its adapters."""
        weight = weights.weight
        if not has_codes(weight):
            return super().head_from(weights)
        head = linear_of_parts(weight, None, lambda part, _: self.head(part), torch.float32)
        return self.adapted(head, weights.lora)

    def new_cache(
        self,
        *,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: tuple[float, float] = (1.0, 1.0),
        latent_dim: int | None = None,
    ) -> LayerCache:
        """Uninitialised memory: no position is read before it is stored. Raises ValueError for unknown shapes."""
        is_known = dtype in DTYPES or is_coded(dtype)
        if not is_known or not has_widths(head_dim, latent_dim):
            raise ValueError(f"no CUDA cache of {dtype} with head_dim {head_dim}")
        shape = (num_blocks, self.block_size, num_kv_heads, head_dim)
        form: dict[str, Any] = {"dtype": dtype, "device": device, "scales": scales}
        return new_layer_cache(shape, shape[:-1], **form, latent_dim=latent_dim)

    def zero_blocks(self, cache: LayerCache, blocks: Tensor) -> None:
        """Nothing to do: `attend` reads 0 past the end of a sequence."""

    def zero_rows(self, cache: LayerCache, rows: Tensor, dtype: torch.dtype) -> None:
        """Nothing to do, for the same reason."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm of the last axis."""
        return self.norm(x, NormWeights(weight=weight, eps=eps, wide=weight.dtype != x.dtype))

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`residual += x` in place, then its norm; all [T, hidden]."""
        norm = NormWeights(weight=weight, eps=eps, wide=weight.dtype != x.dtype)
        return self.add_norm(x, residual, norm)

    def norm(self, x: Tensor, norm: NormWeights) -> Tensor:
        """A norm over the last axis, in one launch unless it has a bias."""
        return triton_rows.rms_norm(x, norm) if norm.bias is None else norm.apply(x)

    def add_norm(self, x: Tensor, residual: Tensor, norm: NormWeights) -> Tensor:
        """`residual += x` in place, then a norm, in one launch unless it has a bias; all [T, hidden]."""
        if norm.bias is None:
            return triton_rows.add_rms_norm(x, residual, norm)
        residual += x
        return norm.apply(residual)

    def prepare_heads(
        self,
        qkv: Tensor,
        rotation: Rotation,
        norms: HeadNorms | None,
        batch: RaggedBatch,
        cache: LayerCache,
        sizes: tuple[int, int],
    ) -> Tensor | None:
        """As `rope_store`, for all norms of heads that are neither centred nor over the whole width."""
        num_heads, num_kv_heads = sizes
        if num_kv_heads != cache.keys.shape[2]:
            raise ValueError(f"a cache of {cache.keys.shape[2]} heads, not {num_kv_heads}")
        if norms is not None:
            each = norms.query
            if norms.whole_width or each.centred or each.weight.dim() > 1:
                return None
        return triton_rope.rope_store(
            qkv,
            rotation.table,
            batch,
            cache,
            num_heads,
            norms,
            interleaved=rotation.interleaved,
        )

    def prepare_latents(
        self,
        heads: Tensor,
        queries: Tensor,
        shared: Tensor,
        norm: NormWeights,
        rotation: Rotation | None,
        batch: RaggedBatch,
        cache: LayerCache,
    ) -> None:
        """In one launch, unless the norm is centred or has a bias."""
        has_kernel = triton_heads.has_kernel(norm, rotation, queries.shape[2])
        prepare = triton_heads.prepare_latents if has_kernel else super().prepare_latents
        prepare(heads, queries, shared, norm, rotation, batch, cache)

    def rope_store(
        self,
        qkv: Tensor,
        rope: Tensor,
        batch: RaggedBatch,
        cache: LayerCache,
        *,
        num_heads: int,
        num_kv_heads: int,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """Rotate queries in place; store rotated keys, and values. The returned queries are a view into `qkv`."""
        if num_kv_heads != cache.keys.shape[2]:
            raise ValueError(f"a cache of {cache.keys.shape[2]} heads, not {num_kv_heads}")
        return triton_rope.rope_store(qkv, rope, batch, cache, num_heads, norms)

    def store(self, keys: Tensor, values: Tensor, batch: RaggedBatch, cache: LayerCache) -> None:
        """Store `keys` and `values` [T, num_kv_heads, head_dim] at `batch.cache_rows`."""
        is_latent = cache.latent_dim is not None
        triton_rope.store(keys, keys if is_latent else values, batch.cache_rows, cache)

    def attend(
        self,
        queries: Tensor,
        batch: RaggedBatch,
        cache: LayerCache,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of `queries` [T, num_heads, head_dim]: [T, num_heads * head_dim].

        Raises ValueError for windows, soft caps and sinks over latents.
        """
        if queries.stride(2) != 1:
            queries = queries.contiguous()
        if cache.latent_dim is not None:
            if window is not None or softcap is not None or sinks is not None:
                raise ValueError("no windows, soft caps and sinks over latents")
            return self._latent_attention(queries, batch, cache, scale)
        return self._attention(queries, batch, cache, AttentionRule(scale, window, softcap, sinks))

    delta_rule = staticmethod(triton_states.delta_rule)
    causal_conv = staticmethod(triton_states.causal_conv)
    mamba2 = staticmethod(triton_states.mamba2)
    mamba1 = staticmethod(triton_states.mamba1)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` of `gate_up` [T, 2 * inter], gates first."""
        return triton_rows.gate_mul(gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """`gelu(gate) * up` of `gate_up` [T, 2 * inter], gates first."""
        return triton_rows.gate_mul(gate_up, is_gelu=True)
