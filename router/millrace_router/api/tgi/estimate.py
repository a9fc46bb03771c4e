"""Answer of `/v1/estimate`."""

from __future__ import annotations

from typing_extensions import TypedDict

from millrace_router.prediction.forecast import Appraisal, Prediction


class PredictedJson(TypedDict):
    """Milliseconds from now."""

    queue_ms: float
    first_token_ms: float
    finish_ms: float


class EstimateJson(TypedDict):
    """The prediction for a request that does not run."""

    prompt_tokens: int
    max_new_tokens: int
    fits: bool
    reason: str | None
    """Why it does not fit."""
    cached_tokens: int
    """Tokens of the prompt in the prefix cache now; 0 for a request that does not fit."""
    predicted: PredictedJson | None
    """None if nothing can be predicted, and for a request that does not fit."""
    waiting: int
    running: int


def estimate_json(appraisal: Appraisal) -> EstimateJson:
    """Render."""
    estimate, fits = appraisal.estimate, appraisal.refusal is None
    prediction = estimate.prediction if fits else None
    return {
        "prompt_tokens": appraisal.num_prompt_tokens,
        "max_new_tokens": appraisal.max_new_tokens,
        "fits": fits,
        "reason": appraisal.refusal,
        "cached_tokens": estimate.num_cached if fits else 0,
        "predicted": None if prediction is None else _predicted(prediction),
        "waiting": estimate.num_waiting,
        "running": estimate.num_running,
    }


def _predicted(prediction: Prediction) -> PredictedJson:
    return {
        "queue_ms": round(prediction.queue_seconds * 1000, 3),
        "first_token_ms": round(prediction.first_token_seconds * 1000, 3),
        "finish_ms": round(prediction.finish_seconds * 1000, 3),
    }
