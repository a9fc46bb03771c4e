"""Which requests a simulated router takes in: validation, permits, and the limits of its queue."""

from __future__ import annotations

import math

from millrace_router.prediction.cost import CostModel
from millrace_router.prediction.late_planning import LatePlanning
from millrace_router.scheduler.planner import Planner
from millrace_router.simulator.candidate import Candidate
from millrace_router.simulator.deployment import Deployment, Queue


class Door:
    """Says no for the same reasons as the router.

    The router predicts the wait of every request. Here only those that may be refused for it are worth the work.
    """

    def __init__(
        self,
        deployment: Deployment,
        *,
        cost: CostModel,
        planner: Planner[Candidate],
        waiting: Queue,
        late: LatePlanning,
    ) -> None:
        self._deployment = deployment
        self._planner = planner
        self._waiting = waiting
        self.forecaster = deployment.new_forecaster(cost, late)
        self._predicts = deployment.max_queue_wait is not None

    def refusal(self, candidate: Candidate, *, num_present: int, now_in_step: float) -> str | None:
        """Why the router refuses `candidate` while it has `num_present` others; None if it does not.

        `now_in_step` is how many seconds the oldest step in flight has run.
        """
        limits, arrival = self._deployment, candidate.arrival
        if num_present >= limits.max_concurrent_requests:
            return "overloaded"
        if arrival.prompt_tokens > limits.longest_prompt:
            return "too long"
        if arrival.prompt_tokens + (arrival.max_new_tokens or 1) > limits.max_total_tokens:
            return "too long"
        if self._is_hopeless(candidate, now_in_step):
            return "would wait too long"
        if limits.max_queue_size is not None and len(self._waiting) >= limits.max_queue_size:
            return "queue full"
        return None

    def ended(self, candidate: Candidate, *, num_cached: int) -> None:
        """Learn how long an answer got."""
        if self._predicts:
            self.forecaster.finished(
                num_prompt=candidate.num_prompt_tokens,
                num_generated=candidate.output_tokens,
                max_new_tokens=candidate.max_new_tokens,
                num_cached=num_cached,
            )

    def _is_hopeless(self, candidate: Candidate, now_in_step: float) -> bool:
        allowed = min(
            self._deployment.max_queue_wait or math.inf,
            candidate.scheduling.max_queue_seconds or math.inf,
        )
        if allowed == math.inf:
            return False
        self._predicts = True
        prediction = self.forecaster.predict(
            self._planner.rows.values(),
            ahead=self._waiting.ahead(candidate.scheduling, candidate.queued_at),
            num_prompt_tokens=candidate.num_prompt_tokens,
            max_new_tokens=candidate.max_new_tokens,
            num_cached=self._planner.num_cached(candidate),
            now_in_step=now_in_step,
        )
        return prediction is not None and prediction.queue_seconds > allowed
