"""The same requests in the simulator, with the costs and the flags of a running server."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bench.parts.client import Request
from bench.parts.outcome import Outcome
from millrace.simulate.config import plan_from_args
from millrace.simulate.deployment import Deployment
from millrace.simulate.engine import Engine
from millrace.simulate.simulated_request import Arrival
from millrace_router.scheduler.step_plan import Row


class SimulationFailed(Exception):  # noqa: N818
    """The simulated server refused a request."""


class TimedEngine(Engine):
    """Records when each request ended."""

    def __init__(self, deployment: Deployment) -> None:
        super().__init__(deployment)
        self.ended: dict[int, float] = {}
        """Virtual time of the last token, in seconds; requests are numbered as they arrive."""

    def _finish(self, row: Row) -> None:
        super()._finish(row)
        self.ended[row.entry.request_id] = self.now


def deployment_of(url: str) -> Deployment:
    """The server at `url` as the simulator knows it, with the costs learned so far; raises ConfigError."""
    return plan_from_args([f"--server={url}", "--rate=1"]).deployment


def simulate(
    deployment: Deployment, requests: Sequence[Request], kind: type[TimedEngine] = TimedEngine
) -> list[Outcome]:
    """The outcome of each request, in order of due times. Raises SimulationFailed or StuckError."""
    engine = kind(deployment)
    ordered = sorted(requests, key=lambda request: request.due)
    for request in ordered:
        engine.run_until(request.due)
        tokens = request.output_tokens
        arrival = Arrival(request.due, request.prompt_tokens, tokens, max_new_tokens=tokens)
        if not engine.arrive(arrival):
            reasons = ", ".join(engine.metrics.rejected)
            raise SimulationFailed(f"a simulated request was refused: {reasons}")
    engine.run_until(math.inf)
    return [
        Outcome(request, engine.ended[number] - request.due + deployment.entry_seconds)
        for number, request in enumerate(ordered)
    ]
