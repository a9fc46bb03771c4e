"""What a step's cost depends on, in counts that are known when it is planned."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StepLoad:
    """Counts over the rows of one step."""

    prefill_tokens: int = 0
    """Prompt tokens it computes."""
    prefill_pairs: int = 0
    """Sum over those of the KV positions each attends to."""
    num_chunks: int = 0
    """Prompts they belong to."""
    decodes: int = 0
    """Rows that decode."""
    context: int = 0
    """Sum over their KV positions in this step of the positions each attends to."""
    extra_positions: int = 0
    """KV positions beyond the first of each of those rows: forced tokens and guesses."""
