"""The tokens of one step: all sequences concatenated, without padding."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from millrace_shard.kernels.lora.adapter_table import AdapterRows


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedBatch:
    """T tokens of B sequences. Prompt chunks and decodes are treated alike, as sequences of one or more queries.

    The tokens of sequence b are `query_starts[b] : query_starts[b + 1]`: the last `num_queries[b]` of its
    `num_context[b]` positions. A query sees its own and every earlier position.
    """

    ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64, absolute position of each token in its sequence."""
    cache_rows: Tensor
    """[T] int64, `block * block_size + offset`: where the token's key and value are stored."""
    query_starts: Tensor
    """[B + 1] int32."""
    context_lengths: Tensor
    """[B] int32, number of keys of each sequence, including this step's."""
    block_tables: Tensor
    """[B, max_blocks] int32, padded with block 0."""
    logit_rows: Tensor
    """[R] int64, the tokens whose logits are needed."""
    all_logits: bool = False
    """Whether `logit_rows` are all tokens, in order."""
    num_queries: tuple[int, ...]
    """The number of queries of each sequence, on the host."""
    num_context: tuple[int, ...]
    """`context_lengths` on the host; during graph capture, the number of keys that the block tables can hold."""
    adapters: AdapterRows | None = None
    """The adapters of the tokens; None if no token has one."""

    @property
    def logit_adapters(self) -> AdapterRows | None:
        """The adapters of the rows whose logits are needed."""
        return None if self.adapters is None else self.adapters.logits

    def logit_states(self, x: Tensor) -> Tensor:
        """The rows of `x` [T, ...] whose logits are needed, [R, ...]."""
        return x if self.all_logits else x[self.logit_rows]
