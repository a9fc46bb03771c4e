"""The part of a request that the scheduler reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from millrace_router.request.adapter import AdapterVersion
from millrace_router.request.images import ImageSpan
from millrace_router.request.request import SchedulingParameters

_NO_TERMS = SchedulingParameters()


class Acceptance:
    """How often draft tokens of one sequence were accepted: weighted means in which older steps fade exponentially."""

    __slots__ = ("rates", "silent", "supply")

    def __init__(self) -> None:
        self.rates: list[float] = []
        """By position: share of draft tokens accepted, of those after accepted ones; empty before the first."""
        self.supply = 1.0
        """Draft tokens made, of those allowed: prompt lookup finds none in a text without repetition."""
        self.silent = 0
        """Steps since draft tokens were last allowed."""


@dataclass(slots=True, eq=False, kw_only=True)
class SchedulableRequest:
    """A request as the scheduler sees it. The router's `Entry` and the simulator's requests extend it.

    While a request waits, `request_id`, `queued_at`, `scheduling` and `num_prompt_tokens` do not change.
    """

    request_id: int
    """Distinct among the requests that wait or run."""
    num_prompt_tokens: int = 1
    max_new_tokens: int = 1
    scheduling: SchedulingParameters = _NO_TERMS
    queued_at: float = 0.0
    """When it was accepted, in monotonic seconds; a preemption does not change it."""
    num_generated: int = 0
    num_preemptions: int = 0
    num_interrupted: int = 0
    """KV positions that were computed when a failure interrupted it, until it is admitted again."""
    max_jump_forward_tokens: int = 0
    """Tokens beyond one that its grammar may force in one step; 0 for free text."""
    wants_prompt_logprobs: bool = False
    """Whether every prompt token has to be computed, cached or not."""
    adapter: AdapterVersion | None = None
    """The version of its adapter; None for the base model."""
    adapter_slot: int = 0
    """The slot of its adapter on the shards; 0 without one, and while it waits for it."""
    images: Sequence[ImageSpan] = ()
    """The placeholders of pictures in its prompt, in order."""
    acceptance: Acceptance = field(default_factory=Acceptance)

    @property
    def closed(self) -> bool:
        """Whether the client has left."""
        return False

    @property
    def tenant(self) -> str:
        """The tenant to which its tokens are charged."""
        return self.scheduling.tenant

    @property
    def num_inputs(self) -> int:
        """Tokens of the prompt, and those generated so far."""
        return self.num_prompt_tokens + self.num_generated

    def block_keys(self, count: int) -> Sequence[bytes]:  # noqa: ARG002
        """Keys of its first `count` full blocks; by default there are none, and no block is shared."""
        return ()
