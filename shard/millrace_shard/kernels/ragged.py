"""One step's tokens for the model: all sequences concatenated, nothing padded."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedBatch:
    """T tokens of B sequences; prompt chunks and decodes are the same thing, rows of one or more queries.

    Sequence b owns tokens `query_starts[b] : query_starts[b + 1]`, which are the last
    `num_queries[b]` of its `num_context[b]` positions. Queries see every earlier position.
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
    """[B] int32, keys of each sequence once this step's are stored."""
    block_tables: Tensor
    """[B, max_blocks] int32, padded with block 0."""
    logit_rows: Tensor
    """[R] int64, the tokens whose logits are wanted."""
    wants_all: bool = False
    """Whether these are all tokens, in order."""
    num_queries: tuple[int, ...]
    """Host copy of the query counts."""
    num_context: tuple[int, ...]
    """Host copy of `context_lengths`; where a graph is captured, of as many keys as the block tables have room for."""

    def logit_states(self, x: Tensor) -> Tensor:
        """What `x` [T, ...] has of the tokens whose logits are wanted, [R, ...]."""
        return x if self.wants_all else x[self.logit_rows]
