"""The counts on which the cost of a step depends; they are known when it is planned."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StepLoad:
    """Counts over the rows of one step."""

    prefill_tokens: int = 0
    """Prompt tokens that it computes."""
    prefill_pairs: int = 0
    """Sum over those tokens of the KV positions that each attends to."""
    num_chunks: int = 0
    """Prompts of those tokens."""
    decodes: int = 0
    """Rows that decode."""
    context: int = 0
    """Sum over the KV positions that they fill of the positions that each attends to."""
    extra_positions: int = 0
    """KV positions beyond the first of each decode: forced tokens and draft tokens."""
    adapter_bytes: int = 0
    """Bytes of the adapters of its rows on a rank, each adapter once."""
    adapter_slices: int = 0
    """Sum over its positions of the slices of 16 ranks, of all layers, that each is multiplied with."""
    tiles: float = 0.0
    """Tiles of images that it encodes, or the share of a tile's layers; nothing else is in such a step."""

    @property
    def num_tokens(self) -> int:
        """KV positions that it fills."""
        return self.prefill_tokens + self.decodes + self.extra_positions

    def with_extra(self, num_extra: int) -> StepLoad:
        """Return the load with another number of extra positions, which attend to as much as the others."""
        if num_extra == self.extra_positions:
            return self
        num_positions = self.decodes + self.extra_positions
        context = round(self.context * (self.decodes + num_extra) / num_positions)
        # Runs for every step with multi-token rows; `dataclasses.replace` takes several times as long.
        return StepLoad(
            prefill_tokens=self.prefill_tokens,
            prefill_pairs=self.prefill_pairs,
            num_chunks=self.num_chunks,
            decodes=self.decodes,
            context=context,
            extra_positions=num_extra,
            adapter_bytes=self.adapter_bytes,
            adapter_slices=self.adapter_slices,
        )
