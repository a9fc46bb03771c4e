"""What the batcher lets the adapters do, at the moments of a step."""

from __future__ import annotations

from collections.abc import Callable

from millrace_router.errors import RouterError
from millrace_router.request.adapter import AdapterVersion
from millrace_router.request.entry import Entry
from millrace_router.request.schedulable import SchedulableRequest
from millrace_router.scheduler.planner import Planner
from millrace_router.scheduler.step_plan import StepPlan
from millrace_router.shards.errors import ShardError


class AdapterHooks:
    """The default is for shards without adapters: no request has one, and each moment passes."""

    def connect(
        self,
        *,
        end: Callable[[Entry, RouterError], None],
        wake: Callable[[], None],
        report: Callable[[ShardError], None],
    ) -> None:
        """Set the callbacks.

        `end` ends an entry with an error; `wake` is called when there may be work for the next step; `report` ends the
        epoch.
        """

    async def restore(self) -> bool:
        """Load what a new epoch needs before its first step; a ShardError ends the epoch.

        Returns whether entries ended because their adapter could not be loaded.
        """
        return False

    def close_epoch(self) -> None:
        """End all calls, since the epoch has ended."""

    def check(self, version: AdapterVersion) -> None:
        """Raise the error of a request whose adapter does not fit, or could not be loaded just now."""
        raise AssertionError(f"the shards take no adapters, and so not {version.digest}")

    @property
    def num_waiting(self) -> int:
        return 0

    def expected_seconds(self, version: AdapterVersion) -> float:  # noqa: ARG002
        """Predict how long a request that comes now waits for its adapter."""
        return 0.0

    def submit(self, entry: Entry) -> None:
        """Queue an entry once its adapter is resident."""

    def waiting(self) -> list[SchedulableRequest]:
        """Return all requests that wait for their adapter."""
        return []

    def expired(self) -> list[SchedulableRequest]:
        """Return the requests that have waited for too long; the caller ends them."""
        return []

    def before_plan(self, planner: Planner) -> None:
        """Pass the planner the adapters that have to make room."""

    def after_plan(self, planner: Planner) -> None:
        """Let the requests that have left the batch wait for their adapters again."""

    def sent(self, plan: StepPlan, number: int) -> None:
        """Record the step that is sent with this number."""

    def answered(self, number: int) -> None:
        """Record the answer to a step."""

    def ended(self, entry: Entry) -> None:
        """Forget an entry with an adapter, which has ended."""
