"""What bounds a step and the batch, and which policies fill them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Limits of one step and of the batch, in TGI's names, and the policies of admission."""

    max_batch_prefill_tokens: int
    """Tokens a step that computes prompt may hold, its decodes included."""
    max_batch_size: int
    """Sequences running at once."""
    spare_slots: int = 0
    """Slots beyond those, so that nobody waits for one that steps in flight still name."""
    reserve_all: bool = False
    """Admit only what has blocks until its last token (TGI's rule), instead of growing and preempting."""
    prefill_chunking: bool = True
    """Compute prompts in pieces beside decodes, instead of whole prompts while decodes pause (TGI's older rule)."""
    target_inter_token_latency: float | None = None
    """Seconds that a step with decodes should not exceed for the sake of prompts."""
    waiting_served_ratio: float = 0.3
    """Without chunking: prompts wait until they are this many, by the size of the batch …"""
    max_waiting_tokens: int = 20
    """… or until this many steps of decodes have passed since the last prefill."""
    share_slots: bool = False
    """Preempt rows of the tenant that has most for the head of the queue, if its own tenant has fewer."""
    speculate: int = 0
    """Tokens that may be guessed ahead for one sequence in one step."""
    max_preemptions: int = 3
    """After so many an entry is admitted only with all the blocks it can ever need."""

    @property
    def num_slots(self) -> int:
        """Slots are numbered below this."""
        return self.max_batch_size + self.spare_slots
