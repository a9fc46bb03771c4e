"""What the scheduler says of a request before it runs."""

from __future__ import annotations

from dataclasses import dataclass

from millrace_router.prediction.forecast import Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """How a request that came now would fare."""

    prediction: Prediction | None
    """None where nothing is predicted (`Forecaster.predict`)."""
    num_cached: int
    """Prompt tokens that are in the prefix cache now."""
    num_waiting: int
    num_running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Appraisal:
    """What becomes of what a client wrote, as far as that can be told without running it."""

    num_prompt_tokens: int
    max_new_tokens: int
    refusal: str | None
    """Why it does not fit; its estimate is that of the shortest request then."""
    estimate: Estimate
