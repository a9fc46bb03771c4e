"""Which requests a simulated router accepts: validation, permits, and the limits of its queue."""

from __future__ import annotations

import math

from millrace.simulate.adapters import SimulatedAdapters
from millrace.simulate.deployment import Deployment
from millrace.simulate.pipeline import Pipeline
from millrace.simulate.simulated_request import SimulatedRequest
from millrace_router.prediction.cost import CostModel
from millrace_router.prediction.late_planning import LatePlanning
from millrace_router.scheduler.planner import Planner
from millrace_router.scheduler.queue import RequestQueue


class AdmissionControl:
    """Refuses requests for the same reasons as the router.

    The router predicts the wait of every request. The simulator does so only for requests that may be refused for it.
    """

    def __init__(
        self,
        deployment: Deployment,
        *,
        cost: CostModel,
        planner: Planner,
        waiting: RequestQueue,
        late: LatePlanning,
    ) -> None:
        self._deployment = deployment
        self._planner = planner
        self._waiting = waiting
        self.forecaster = deployment.new_forecaster(cost, late)
        self._predicts = deployment.max_queue_wait is not None

    def refusal(
        self,
        request: SimulatedRequest,
        *,
        num_present: int,
        pipeline: Pipeline,
        now: float,
        adapters: SimulatedAdapters,
    ) -> str | None:
        """Why the router refuses `request` while it has `num_present` others; None if it accepts it.

        `pipeline` has the steps in flight at `now`.
        """
        limits, arrival = self._deployment, request.arrival
        if num_present >= limits.max_concurrent_requests:
            return "overloaded"
        if arrival.prompt_tokens > limits.longest_prompt:
            return "too long"
        if arrival.prompt_tokens + (arrival.max_new_tokens or 1) > limits.max_total_tokens:
            return "too long"
        if request.adapter is not None and not adapters.fits(request.adapter):
            return "adapter too large"
        adapter_seconds = adapters.expected_seconds(request.adapter, now)
        if self._is_hopeless(request, pipeline, now, adapter_seconds):
            return "would wait too long"
        num_waiting = len(self._waiting) + adapters.num_waiting
        if limits.max_queue_size is not None and num_waiting >= limits.max_queue_size:
            return "queue full"
        return None

    def ended(self, request: SimulatedRequest, *, num_cached: int) -> None:
        """Learn the length of an answer."""
        if self._predicts:
            self.forecaster.traffic.finished(
                num_prompt=request.num_prompt_tokens,
                num_generated=request.output_tokens,
                max_new_tokens=request.max_new_tokens,
                num_cached=num_cached,
            )

    def _is_hopeless(
        self, request: SimulatedRequest, pipeline: Pipeline, now: float, adapter_seconds: float
    ) -> bool:
        allowed = min(
            self._deployment.max_queue_wait or math.inf,
            request.scheduling.max_queue_seconds or math.inf,
        )
        if allowed == math.inf:
            return False
        self._predicts = True
        prediction = self.forecaster.predict(
            self._planner.rows.values(),
            ahead=self._waiting.ahead(request.scheduling, request.queued_at),
            num_prompt_tokens=request.num_prompt_tokens,
            max_new_tokens=request.max_new_tokens,
            num_cached=self._planner.num_cached(request),
            now_in_step=now - pipeline.began_at(now),
            in_flight=[flight.plan.load for flight in pipeline.flights],
        )
        seconds = 0.0 if prediction is None else prediction.queue_seconds
        return max(seconds, adapter_seconds) > allowed
