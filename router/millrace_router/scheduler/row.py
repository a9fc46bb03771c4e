"""An admitted request as the planner sees it."""

from __future__ import annotations

from dataclasses import dataclass

from millrace_router.request.schedulable import SchedulableRequest


@dataclass(slots=True, eq=False)
class Row:
    """An admitted request. All counts but `num_computed` include the steps in flight.

    For a multi-token row, only the answers have the number of KV positions that a step filled and of tokens it yielded.
    Until then each step in flight counts for all the positions that it may fill, and for one token.
    """

    entry: SchedulableRequest
    slot: int
    seniority: int
    """Place in the order of first admissions; a preempted request keeps its own."""
    num_inputs: int
    """Tokens to compute before the first new one: the prompt, and those generated before a preemption."""
    max_tokens: int
    """Most tokens that it may still yield."""
    num_cached: int = 0
    """Input tokens whose KV was found in the cache."""
    num_prompt_planned: int = 0
    """Input tokens that are cached or planned."""
    num_tokens_planned: int = 0
    """New tokens that the planned steps yield; 0 as long as some input is left."""
    num_kv_tokens: int = 0
    """Most KV positions that are filled after all planned steps."""
    num_kv_owned: int = 0
    """KV positions in the blocks that it has got."""
    num_computed: int = 0
    """KV positions filled by answered steps."""
    num_entered: int = 0
    """KV positions in blocks that were offered to the cache."""
    promised: bool = False
    """Whether all blocks that it can ever need are promised, so that it is never preempted."""
    has_yielded: bool = False
    """Whether it was preempted for another tenant or adapter, and goes back into the waiting queue."""
    is_early: bool = False
    """Whether its prompt is computed ahead of its turn."""
    is_multi_token: bool = False
    """Whether its decodes may fill more than one position."""

    @property
    def num_prompt_left(self) -> int:
        """Input tokens that no planned step computes."""
        return self.num_inputs - self.num_prompt_planned

    @property
    def num_room(self) -> int:
        """KV positions that it may need beyond the planned ones; that of its last token is never computed."""
        return self.num_inputs + self.max_tokens - 1 - self.num_kv_tokens
