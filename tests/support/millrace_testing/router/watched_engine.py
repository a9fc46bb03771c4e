"""The simulator, with a record of predicted and simulated times of each request."""

from __future__ import annotations

import math
from collections.abc import Sequence

from millrace.simulate.deployment import Deployment
from millrace.simulate.engine import Engine
from millrace.simulate.simulated_request import Arrival, SimulatedRequest
from millrace_router.prediction.cost import COEFFICIENTS
from millrace_router.prediction.forecast import Prediction
from millrace_router.scheduler.step_plan import Row

COSTS = (0.0146, 0.0004, 1e-7, 0.001, 6e-5, 2.4e-7)
"""Approximate costs of a 135M model on two cores."""
DEPLOYMENT = {
    "cost_model": dict(zip(COEFFICIENTS, COSTS, strict=True)),
    "num_blocks": 1 << 14,
    "block_size": 16,
    "max_total_tokens": 8192,
    "max_input_tokens": 4000,
    "max_batch_size": 32,
    "max_batch_prefill_tokens": 4096,
    "max_concurrent_requests": 100_000,
    "max_queue_wait": 1e9,
}


class WatchedEngine(Engine):
    """Records times by request, in seconds from its arrival."""

    def __init__(self, deployment: Deployment) -> None:
        super().__init__(deployment)
        self.predictions: list[Prediction] = []
        self.queue: dict[int, float] = {}
        """Until the plan that admitted it."""
        self.first: dict[int, float] = {}
        """Until its first token."""
        self.last: dict[int, float] = {}
        """Until its last token."""
        forecaster = self._admission.forecaster
        predict = forecaster.predict

        def remember(*args: object, **options: object) -> Prediction | None:
            prediction = predict(*args, **options)  # type: ignore[arg-type]
            if prediction is not None:
                self.predictions.append(prediction)
            return prediction

        forecaster.predict = remember  # type: ignore[method-assign]

    def _admitted(self, row: Row) -> None:
        super()._admitted(row)
        self.queue.setdefault(row.entry.request_id, self.now - row.entry.queued_at)

    def _first_token(self, request: SimulatedRequest) -> None:
        super()._first_token(request)
        self.first.setdefault(request.request_id, self.now - request.queued_at)

    def _finish(self, row: Row) -> None:
        super()._finish(row)
        self.last[row.entry.request_id] = self.now - row.entry.queued_at


def watched(arrivals: Sequence[Arrival], **changes: object) -> WatchedEngine:
    """Simulate `arrivals` to their ends; `changes` apply to `DEPLOYMENT`.

    Raises:
        RuntimeError: a request was refused or has no prediction.

    """
    engine = WatchedEngine(Deployment.model_validate(DEPLOYMENT | changes))
    for arrival in arrivals:
        engine.run_until(arrival.arrived_at)
        if not engine.arrive(arrival):
            raise RuntimeError(f"a simulated request was refused at {arrival.arrived_at} s")
    engine.run_until(math.inf)
    if not len(engine.predictions) == len(engine.queue) == len(arrivals):
        raise RuntimeError("not every simulated request has a prediction")
    return engine
