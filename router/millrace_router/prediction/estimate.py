"""The answer to an estimate: when a request would be served."""

from __future__ import annotations

from dataclasses import dataclass

from millrace_router.prediction.forecast import Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The forecast for a request that arrives now, and the state of the scheduler."""

    prediction: Prediction | None
    """None where nothing is predicted (`Forecaster.predict`)."""
    num_cached: int
    """Prompt tokens that are in the prefix cache now."""
    num_waiting: int
    num_running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Appraisal:
    """The validation and the estimate of a request that does not run."""

    num_prompt_tokens: int
    max_new_tokens: int
    refusal: str | None
    """Why the request does not fit; the estimate is then that of the shortest request."""
    estimate: Estimate
