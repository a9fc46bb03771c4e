"""The adapters of a simulated replica: the router's residency, with loads of a fixed duration."""

from __future__ import annotations

import math
from collections import deque

from millrace.simulate.deployment import Deployment
from millrace.simulate.simulated_request import ADAPTER_MODULE
from millrace_router.adapters.admission import AdapterAdmission
from millrace_router.adapters.residency import Residency
from millrace_router.adapters.slots import AdapterSlot, SlotState
from millrace_router.request.adapter import PAGE_BYTES, AdapterVersion
from millrace_router.request.schedulable import SchedulableRequest
from millrace_router.scheduler.planner import Planner
from millrace_router.scheduler.queue import RequestQueue
from millrace_router.scheduler.step_plan import StepPlan


class SimulatedAdapters:
    """Loads and unloads adapters by the virtual clock."""

    def __init__(self, deployment: Deployment, queue: RequestQueue) -> None:
        self.num_loads = 0
        residency = Residency(
            max_adapters=deployment.max_active_adapters,
            num_pages=deployment.adapter_memory_pages,
            cycle_seconds=deployment.adapter_cycle_time_s,
        )
        self._admission = AdapterAdmission(
            residency,
            queue,
            bytes_per_slice={ADAPTER_MODULE: PAGE_BYTES},
            max_wait_seconds=deployment.max_queue_wait,
        )
        self._load_seconds = deployment.adapter_load_seconds
        self._calls: deque[tuple[float, AdapterSlot]] = deque()
        """When each load or unload ends, the soonest first."""
        self._due = math.inf
        """When a cycle is over."""
        self._is_used = False
        """Whether any request has had an adapter."""

    @property
    def next_event(self) -> float:
        """When a load ends, a cycle is over or a wait has lasted too long; infinity if nothing is due."""
        if not self._is_used:
            return math.inf
        deadline = self._admission.waiting.next_deadline
        called = self._calls[0][0] if self._calls else math.inf
        return min(called, self._due, math.inf if deadline is None else deadline)

    @property
    def num_waiting(self) -> int:
        return len(self._admission.waiting)

    def fits(self, version: AdapterVersion) -> bool:
        """Whether an adapter is no larger than the memory for adapters."""
        return self._admission.num_pages(version) <= self._admission.residency.num_pages

    def expected_seconds(self, version: AdapterVersion | None, now: float) -> float:
        """Predict how long a request that comes `now` waits for its adapter."""
        if version is None:
            return 0.0
        return self._admission.residency.expected_seconds(version, now, self._load_seconds)

    def submit(self, request: SchedulableRequest, now: float) -> None:
        """Queue a request once its adapter is resident."""
        self._is_used |= request.adapter is not None
        if not self._admission.submit(request):
            self.go_on(now)

    def ended(self, request: SchedulableRequest, now: float) -> None:
        if request.adapter is not None:
            self._admission.ended(request)
            self.go_on(now)

    def expired(self, now: float) -> list[SchedulableRequest]:
        """Take out the requests that have waited for too long."""
        expired = self._admission.waiting.expired(now) if self.num_waiting else []
        for request in expired:
            self.ended(request, now)
        return expired

    def plan(
        self,
        planner: Planner,
        waiting: RequestQueue,
        *,
        now: float,
        last_sent: int,
        last_answered: int,
    ) -> StepPlan | None:
        """Plan the next step, in which adapters may have to make room."""
        planner.expulsion.digests = self._admission.expelled
        plan = planner.plan(waiting, last_sent=last_sent, last_answered=last_answered)
        if self._admission.expelled:
            for request in planner.expulsion.take():
                self._admission.wait_again(request)
            self.go_on(now)
        if plan is not None:
            self._admission.sent(plan, last_sent + 1)
        return plan

    def answered(self, number: int, now: float) -> None:
        """Record the answer to a step."""
        if self._admission.answered(number):
            self.go_on(now)

    def go_on(self, now: float) -> None:
        """End the calls that are over, and begin those that are due."""
        while self._calls and self._calls[0][0] <= now:
            self._end(self._calls.popleft()[1], now)
        changes = self._admission.advance(now)
        self.num_loads += len(changes.loads)
        ends_at = now + self._load_seconds
        self._calls += [(ends_at, slot) for slot in changes.loads]
        # The shards free a slot at once.
        self._calls.extendleft((now, slot) for slot in changes.unloads)
        due = self._admission.residency.next_event(now)
        self._due = math.inf if due is None else due

    def _end(self, slot: AdapterSlot, now: float) -> None:
        if slot.state is SlotState.LEAVING:
            self._admission.residency.unloaded(slot)
        else:
            self._admission.loaded(slot, now)
