"""The work of one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace_router.prediction.step_load import StepLoad
from millrace_router.scheduler.row import Row

METHODS = ("prefill", "decode")
"""TGI's labels of steps for metrics."""


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """One step. Without chunks and decodes it only drops sequences."""

    dropped: list[int] = field(default_factory=list)
    """Slots whose sequences end or are preempted."""
    admitted: list[Row] = field(default_factory=list)
    grown: list[tuple[int, int]] = field(default_factory=list)
    """(slot, block), in table order."""
    chunks: list[tuple[int, int]] = field(default_factory=list)
    """(slot, prompt tokens to compute)."""
    decodes: list[int] = field(default_factory=list)
    """Slots that decode."""
    decode_tokens: list[int] = field(default_factory=list)
    """Most KV positions that each decode may fill; empty if each fills one."""
    draft_tokens: list[int] = field(default_factory=list)
    """How many of those may be draft tokens; empty where `decode_tokens` is."""
    multi_position: list[int] = field(default_factory=list)
    """Indices in `decodes` of those that may fill more than one position."""
    multi_token_slots: list[int] = field(default_factory=list)
    """Slots of the multi-token rows, whose number of new tokens only the answer has; one is assumed until then."""
    num_preempted: int = 0
    concat_reason: str | None = None
    """TGI's word for the reason why requests join a running batch; None if none joins."""
    load: StepLoad = field(default_factory=StepLoad)

    @property
    def method(self) -> str:
        """Which of `METHODS` it is."""
        return "prefill" if self.chunks else "decode"

    @property
    def has_forward(self) -> bool:
        """Whether the step runs the model."""
        return bool(self.chunks or self.decodes)
