"""What one step is to do."""

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
    admitted: list[Row] = field(default_factory=list)
    grown: list[tuple[int, int]] = field(default_factory=list)
    """(slot, block), in table order."""
    chunks: list[tuple[int, int]] = field(default_factory=list)
    """(slot, prompt tokens to compute)."""
    decodes: list[int] = field(default_factory=list)
    decode_tokens: list[int] = field(default_factory=list)
    """KV positions each decode may fill; empty: one each."""
    draft_tokens: list[int] = field(default_factory=list)
    """How many of them may be guesses; empty where the above is."""
    wide: list[int] = field(default_factory=list)
    """Places of those decodes that may fill more than one."""
    flexible: list[int] = field(default_factory=list)
    """Slots of which only the answer tells how many tokens they yield; one is counted until then."""
    num_preempted: int = 0
    concat_reason: str | None = None
    """TGI's word for why entries join a running batch now; None when none do."""
    load: StepLoad = field(default_factory=StepLoad)

    @property
    def method(self) -> str:
        """Which of `METHODS` it is."""
        return "prefill" if self.chunks else "decode"

    @property
    def has_forward(self) -> bool:
        """Whether the step runs the model."""
        return bool(self.chunks or self.decodes)
