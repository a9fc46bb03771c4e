"""The sampling operators of CUDA."""

from __future__ import annotations

from torch import Tensor

from millrace_shard.kernels.cuda import triton_penalties, triton_thresholds


class TritonSampling:
    """Sampling operators by Triton; see SamplingKernels."""

    def find_threshold(
        self, keys: Tensor, probabilities: Tensor | None, limit: Tensor, /
    ) -> Tensor:
        """See FindThreshold."""
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
