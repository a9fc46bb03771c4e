"""What runs, and what could: an admitted entry as the planner sees it, and what the planner asks of an entry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from millrace_router.request.acceptance import Acceptance


class Candidate(Protocol):
    """What scheduling needs to know of an entry; the simulator has its own."""

    request_id: int
    max_new_tokens: int
    num_preemptions: int

    @property
    def max_jump_forward_tokens(self) -> int:
        """Tokens that its grammar may force at once beyond one; 0 for free text."""

    @property
    def acceptance(self) -> Acceptance:
        """What became of guesses so far."""

    @property
    def closed(self) -> bool:
        """Whether its reader has left."""

    @property
    def num_inputs(self) -> int:
        """Prompt tokens, and those generated so far."""

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether every prompt token has to be computed, cached or not."""

    @property
    def tenant(self) -> str:
        """Whose share of the tokens it takes."""

    def block_keys(self, count: int) -> Sequence[bytes]:
        """Keys of its first full blocks."""


E = TypeVar("E", bound=Candidate)


@dataclass(slots=True, eq=False)
class Row(Generic[E]):
    """An admitted entry. Its counts include steps that are still in flight, but for `num_computed`.

    Of a flexible row only answers tell how many positions a step filled and how many tokens it yielded. Until they
    do, each step in flight counts for all the positions it may fill, and for one token.
    """

    entry: E
    slot: int
    seniority: int
    """Place in the order of first admissions; a preempted entry keeps its own."""
    num_inputs: int
    """Tokens to compute before the first new one: the prompt, and what was generated before a preemption."""
    max_tokens: int
    """Tokens it may still yield."""
    num_cached: int = 0
    """Input tokens whose KV was found in the cache."""
    num_prompt_planned: int = 0
    """Input tokens that are cached or planned."""
    num_tokens_planned: int = 0
    """New tokens that the steps planned so far yield; 0 as long as some input is left."""
    num_kv_tokens: int = 0
    """KV positions filled, at most, once everything planned so far has run."""
    num_kv_owned: int = 0
    """KV positions in the blocks it has got so far."""
    num_computed: int = 0
    """KV positions filled by steps that were answered."""
    num_entered: int = 0
    """KV positions in blocks that were offered to the cache."""
    promised: bool = False
    """Whether all blocks it can ever need are promised, so that it is never preempted."""
    has_yielded: bool = False
    """Whether it was preempted for another tenant, and waits for its turn like everybody."""
    is_flexible: bool = False
    """Whether its decodes may be allowed more than one position."""

    @property
    def num_prompt_left(self) -> int:
        """Input tokens that no step computes yet."""
        return self.num_inputs - self.num_prompt_planned

    @property
    def num_room(self) -> int:
        """KV positions that it may need beyond those planned; its last token's is never computed."""
        return self.num_inputs + self.max_tokens - 1 - self.num_kv_tokens
