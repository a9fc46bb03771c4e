"""The steps in flight, and the time at which the next one is planned."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from millrace_router.prediction.late_planning import LatePlanning
from millrace_router.recovery.hang_detector import OldestStep
from millrace_router.scheduler.step_plan import StepPlan
from millrace_router.shards.step_channel import StepChannel
from millrace_router.shards.step_result import StepResult


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that is sent and not answered."""

    number: int
    plan: StepPlan
    sent_at: float
    was_delayed: bool
    """Whether it was planned late, while the shards computed the step before."""

    def began_at(self, last_answer_at: float) -> float:
        """When the shards began the step: at its arrival, or at the end of the step before."""
        return max(self.sent_at, last_answer_at)


@dataclass(frozen=True, slots=True)
class AnsweredStep:
    """A step and its answer; times are in seconds by `time.monotonic`."""

    plan: StepPlan
    result: StepResult
    sent_at: float
    answered_at: float
    seconds: float
    """Duration on the shards, without the time in which they computed the step before."""


class InFlight:
    """Sends steps and receives their answers in order; at most `depth` steps are in flight.

    With two steps the shards never wait for the router. The second one is planned late (`LatePlanning`), so that it
    includes requests that arrive while the first one is computed.
    """

    def __init__(
        self,
        channel: StepChannel,
        late: LatePlanning,
        *,
        depth: int = 2,
        on_router_seconds: Callable[[float], None] = lambda _: None,
    ) -> None:
        """`on_router_seconds` receives the router's time from an answer until the next plan is sent or delayed."""
        self._channel = channel
        self._late = late
        self._depth = depth
        self._on_router_seconds = on_router_seconds
        self._flights: deque[_Flight] = deque()
        self._last_answered = 0
        self._answered_at = 0.0
        self._router_works = False
        """Whether the time since the last answer is the router's."""
        self._is_delayed = False

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def has_room(self) -> bool:
        """Whether another step may be sent."""
        return len(self._flights) < self._depth

    @property
    def plans(self) -> list[StepPlan]:
        """The plans of the steps in flight, the oldest first."""
        return [flight.plan for flight in self._flights]

    @property
    def last_sent(self) -> int:
        """Number of the last step sent in this epoch."""
        return self._channel.last_sent

    @property
    def next_generation(self) -> int:
        """The number by which shards know the next step among all of their lives."""
        return self._channel.epoch + self._channel.last_sent + 1

    @property
    def last_answered(self) -> int:
        """Number of the last step answered in this epoch; 0 before the first."""
        return self._last_answered

    def oldest(self) -> OldestStep | None:
        if not self._flights:
            return None
        flight = self._flights[0]
        return OldestStep(flight.number, flight, flight.plan.load)

    def seconds_in_step(self) -> float:
        """Return how long the oldest step in flight has run; 0 without one."""
        if not self._flights:
            return 0.0
        return time.monotonic() - self._flights[0].began_at(self._answered_at)

    async def wait_to_plan(self) -> bool:
        """Wait until the next step should be planned; False if the oldest step was answered before."""
        seconds = self._delay_seconds()
        self._is_delayed = seconds > 0.0
        if not self._is_delayed:
            return True
        self._end_router_time()
        if await self._channel.answers_within(seconds):
            self._late.learn(0.0)
            return False
        return True

    async def send(self, plan: StepPlan) -> None:
        """Send a step without waiting for its answer."""
        number = self._channel.last_sent + 1
        self._flights.append(_Flight(number, plan, time.monotonic(), self._is_delayed))
        self._end_router_time()
        await self._channel.send(plan)

    async def receive(self) -> AnsweredStep:
        """Wait for the answer to the oldest step. A step that fails with a ShardError stays in flight."""
        # No further step can be sent now, so the time of the wait is not the router's.
        self._router_works = False
        result = await self._channel.receive()
        answered_at = time.monotonic()
        flight = self._flights.popleft()
        if self._flights and flight.plan.has_forward:
            following = self._flights[0]
            spare_seconds = answered_at - following.sent_at
            self._late.learn(spare_seconds, was_open=following.was_delayed)
        seconds = answered_at - flight.began_at(self._answered_at)
        self._last_answered, self._answered_at = result.number, answered_at
        self._router_works = True
        return AnsweredStep(flight.plan, result, flight.sent_at, answered_at, seconds)

    def idle(self) -> None:
        """There is nothing to send: the time since the last answer is not the router's."""
        self._router_works = False

    def clear(self) -> None:
        """Forget the steps of an epoch that has ended."""
        self._flights.clear()
        self._last_answered = 0
        self._router_works = False

    def _delay_seconds(self) -> float:
        if not self._flights or not self._flights[0].plan.has_forward:
            return 0.0
        return self._late.open_seconds(self._flights[0].plan.load) - self.seconds_in_step()

    def _end_router_time(self) -> None:
        """Report the router's time since the last answer, once per answer."""
        if self._router_works:
            self._router_works = False
            self._on_router_seconds(time.monotonic() - self._answered_at)
