"""Loads adapters into the shards and frees their slots while the batch goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine

import structlog

from millrace_router.adapters.admission import AdapterAdmission
from millrace_router.adapters.residency import MAX_LOADS
from millrace_router.adapters.slots import AdapterSlot, SlotState
from millrace_router.engine.adapter_hooks import AdapterHooks
from millrace_router.errors import AdapterTooLarge, AdapterUnavailable, RouterError
from millrace_router.request.adapter import PAGE_BYTES, AdapterVersion
from millrace_router.request.entry import Entry, entry_of
from millrace_router.request.schedulable import SchedulableRequest
from millrace_router.scheduler.planner import Planner
from millrace_router.scheduler.step_plan import StepPlan
from millrace_router.shards.errors import ShardError, ShardHung, ShardLost
from millrace_router.shards.step_channel import StepChannel
from millrace_router.telemetry.metrics import Metrics

CALL_SECONDS = 60.0
"""A load or unload of this length counts as failed."""
REPEAT_SECONDS = 0.5
"""Pause before a call is repeated in the same epoch."""
LEAST_PAUSE = 0.02
"""Seconds between two checks of cycles and deadlines."""
REFUSED_SECONDS = 5.0
"""How long requests for an adapter are refused after its load failed."""
FIRST_LOAD_SECONDS = 0.1
"""Assumed duration of a load before the first one."""
_LOAD_RATE = 1 / 8
"""Weight of one load in the mean duration."""

log = structlog.get_logger(__name__)


class AdapterLoading(AdapterHooks):
    """Calls the shards for an `AdapterAdmission`.

    A failed load ends only the requests for that adapter. A lost shard ends the epoch, and the load is repeated in the
    next one.
    """

    def __init__(self, admission: AdapterAdmission, channel: StepChannel, metrics: Metrics) -> None:
        self._admission = admission
        self._channel = channel
        self._metrics = metrics
        metrics.lora_requests_info.max_lora = admission.residency.max_adapters
        self._end: Callable[[Entry, RouterError], None] = lambda _, __: None
        self._wake: Callable[[], None] = lambda: None
        self._report: Callable[[ShardError], None] = lambda _: None
        self._calls: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_open = False
        """Whether an epoch is open."""
        self._refusals: dict[str, tuple[float, RouterError]] = {}
        """By digest: until when requests are refused, and their error."""
        self.mean_load_seconds = FIRST_LOAD_SECONDS

    def connect(
        self,
        *,
        end: Callable[[Entry, RouterError], None],
        wake: Callable[[], None],
        report: Callable[[ShardError], None],
    ) -> None:
        self._end, self._wake, self._report = end, wake, report

    @property
    def num_waiting(self) -> int:
        return len(self._admission.waiting)

    def expected_seconds(self, version: AdapterVersion) -> float:
        return self._admission.residency.expected_seconds(
            version, time.monotonic(), self.mean_load_seconds
        )

    def check(self, version: AdapterVersion) -> None:
        residency, num_pages = self._admission.residency, self._admission.num_pages(version)
        if num_pages > residency.num_pages:
            raise AdapterTooLarge(
                version.name,
                num_bytes=num_pages * PAGE_BYTES,
                limit=residency.num_pages * PAGE_BYTES,
            )
        until, error = self._refusals.get(version.digest, (0.0, None))
        if error is not None and time.monotonic() < until:
            raise error

    def submit(self, entry: Entry) -> None:
        if not self._admission.submit(entry):
            self._advance()

    def ended(self, entry: Entry) -> None:
        self._admission.ended(entry)
        self._advance()

    def expired(self) -> list[SchedulableRequest]:
        return self._admission.waiting.expired(time.monotonic())

    def waiting(self) -> list[SchedulableRequest]:
        return list(self._admission.waiting)

    def before_plan(self, planner: Planner) -> None:
        planner.expulsion.digests = self._admission.expelled

    def after_plan(self, planner: Planner) -> None:
        withdrawn = planner.expulsion.take()
        for request in withdrawn:
            self._admission.wait_again(request)
        if withdrawn:
            self._advance()

    def sent(self, plan: StepPlan, number: int) -> None:
        self._admission.sent(plan, number)

    def answered(self, number: int) -> None:
        if self._admission.answered(number):
            self._advance()

    def close_epoch(self) -> None:
        self._is_open = False
        for call in self._calls:
            call.cancel()
        self._calls.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def restore(self) -> bool:
        """Load the adapters of queued and admitted requests in a new epoch, and go on with other loads.

        Returns whether entries ended because their adapter could not be loaded.

        Raises:
            ShardLost: the shards were lost meanwhile.
            ShardHung: they do not answer.

        """
        self.close_epoch()
        slots, have_ended = self._admission.restarted(), False
        for start in range(0, len(slots), MAX_LOADS):
            batch = slots[start : start + MAX_LOADS]
            results = await asyncio.gather(*map(self._try_load, batch), return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result
            have_ended = have_ended or not all(results)
        self._is_open = True
        for slot in self._admission.residency:
            if slot.state is SlotState.LEAVING:
                self._start(self._unload(slot))
        self._advance()
        return have_ended

    def _tick(self) -> None:
        """Act on the end of a cycle or a deadline."""
        self._wake()
        self._advance()

    def _advance(self) -> None:
        """Start what is due; while no epoch is open, `restore` does that later."""
        if not self._is_open:
            return
        now, residency = time.monotonic(), self._admission.residency
        changes = self._admission.advance(now)
        for slot in changes.loads:
            self._start(self._load(slot))
        for slot in changes.unloads:
            self._metrics.adapter_evictions.inc()
            self._start(self._unload(slot))
        if changes.opened or self._admission.expelled:
            self._wake()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        times = (residency.next_event(now), self._admission.waiting.next_deadline)
        due = min((time for time in times if time is not None), default=None)
        if due is not None:
            self._timer = asyncio.get_running_loop().call_later(
                max(LEAST_PAUSE, due - now), self._tick
            )
        self._show()

    def _show(self) -> None:
        residency = self._admission.residency
        slots = list(residency)
        self._metrics.adapters_resident.set(sum(slot.state is SlotState.RESIDENT for slot in slots))
        self._metrics.lora_requests_info.update(
            running=self._admission.running_names,
            waiting=residency.waiting_names(),
        )

    def _start(self, call: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _load(self, slot: AdapterSlot) -> None:
        try:
            await self._try_load(slot)
        except ShardLost as error:
            # No step may be in flight that would notice it. The next epoch repeats the load.
            self._report(error)
            return
        except ShardHung as error:
            self._failed(slot, error)
        self._wake()
        self._advance()

    async def _try_load(self, slot: AdapterSlot) -> bool:
        """Load a slot; return False if its requests ended with an error. Raises ShardLost or ShardHung."""
        began = time.monotonic()
        try:
            await self._channel.load_adapter(slot.number, slot.digest, timeout=CALL_SECONDS)
        except (ShardLost, ShardHung):
            raise
        except ShardError as error:
            self._failed(slot, error)
            return False
        now = time.monotonic()
        self.mean_load_seconds += _LOAD_RATE * (now - began - self.mean_load_seconds)
        self._metrics.adapter_loads.inc()
        self._metrics.adapter_load_seconds.observe(now - began)
        for request in self._admission.loaded(slot, now):
            self._metrics.adapter_waiting_seconds.observe(now - request.queued_at)
        return True

    def _failed(self, slot: AdapterSlot, error: ShardError) -> None:
        version, now = slot.version, time.monotonic()
        log.error("an adapter cannot be loaded", digest=version.digest, error=str(error))
        failure = AdapterUnavailable(
            version.name, "the shards cannot load it", retry_after_seconds=REFUSED_SECONDS
        )
        self._refusals = {
            digest: refusal for digest, refusal in self._refusals.items() if refusal[0] > now
        }
        self._refusals[version.digest] = now + REFUSED_SECONDS, failure
        for request in self._admission.failed(slot):
            self._end(entry_of(request), failure)
        if self._is_open:
            self._start(self._unload(slot))

    async def _unload(self, slot: AdapterSlot) -> None:
        while True:
            try:
                await self._channel.unload_adapter(slot.number, timeout=CALL_SECONDS)
            except ShardLost as error:
                self._report(error)
                return
            except ShardError as error:
                log.warning("an adapter slot cannot be freed", error=str(error))
                await asyncio.sleep(REPEAT_SECONDS)
            else:
                break
        self._admission.residency.unloaded(slot)
        self._advance()
