"""Limits of a step and of the batch, and the policies that fill them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Limits of one step and of the batch, in TGI's names, and the policies of admission."""

    max_batch_prefill_tokens: int
    """Most tokens of a step that computes prompts, its decodes included."""
    max_batch_size: int
    """Most sequences that run at once."""
    spare_slots: int = 0
    """Further slots, so that admission does not wait for a slot that a step in flight still names."""
    reserve_all: bool = False
    """Admit a request only with blocks up to its last token (TGI's rule), instead of growing and preempting."""
    prefill_chunking: bool = True
    """Compute prompts in chunks beside decodes, instead of whole prompts while decodes pause (TGI's older rule)."""
    shortest_first: bool = True
    """With chunking: compute short prompts before a long one that is older (`prefill_order`)."""
    target_inter_token_latency: float | None = None
    """Seconds that a step with decodes should take at most when prompts are added to it."""
    waiting_served_ratio: float = 0.3
    """Without chunking: prompts pause decodes once their number is this share of the running rows …"""
    max_waiting_tokens: int = 20
    """… or after this many steps of decodes since the last prefill."""
    batching_policy: str = "continuous"
    """When requests join and leave the batch (`batching_policy`)."""
    share_slots: bool = False
    """Preempt a row of the tenant with most rows for the head of the queue, if the head's tenant has fewer."""
    max_draft_tokens: int = 0
    """Most draft tokens of one sequence in one step."""
    max_preemptions: int = 3
    """After so many preemptions a request is admitted only with all the blocks that it can ever need."""

    @property
    def num_slots(self) -> int:
        """Slots are numbered below this."""
        return self.max_batch_size + self.spare_slots
