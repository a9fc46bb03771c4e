"""Planner, queue, entries and a hash shard, stepped by hand: a batcher without an event loop."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from millrace_proto import generate_pb2 as pb
from millrace_router.adapters.admission import AdapterAdmission
from millrace_router.adapters.residency import Residency
from millrace_router.adapters.slots import AdapterSlot, SlotState
from millrace_router.errors import NonFiniteOutput
from millrace_router.prediction.cost import CostModel
from millrace_router.request.entry import Entry, entry_of
from millrace_router.request.request import ValidRequest
from millrace_router.scheduler.block_manager import BlockManager
from millrace_router.scheduler.draft_length import DraftPolicy
from millrace_router.scheduler.factory import blocks_from
from millrace_router.scheduler.planner import Planner
from millrace_router.scheduler.queue import RequestQueue, WaitingQueue
from millrace_router.scheduler.step_plan import Budgets, Row, StepPlan
from millrace_router.scheduler.tenants import TenantQueue
from millrace_router.scheduler.window_blocks import Held, WindowBlocks
from millrace_router.shards.step_result import result_from_pb
from millrace_router.shards.wire import open_to_pb, plan_to_pb
from millrace_testing.adapters.fake_adapters import MODULE
from millrace_testing.router.fake_router import tiny_tokenizer
from millrace_testing.schedules.client import Client
from millrace_testing.shards.hash_shard import HashShard
from millrace_testing.shards.hash_tokens import EOS_TOKEN_ID

CYCLE_TURNS = 6.0
"""Turns after which an adapter makes room."""
TOKENIZER = tiny_tokenizer()


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was sent and not answered."""

    plan: StepPlan
    answer: pb.StepResponse


class ScheduleDriver:
    """Sends steps and receives answers on calls of the test; at most `depth` steps are in flight."""

    def __init__(
        self,
        budgets: Budgets,
        shard: HashShard,
        *,
        prefix_caching: bool = True,
        depth: int = 2,
        drafts: DraftPolicy | None = None,
        cost: CostModel | None = None,
    ) -> None:
        """Adapters of the shard are loaded by `let_adapters_go_on`, with the number of turns as the time."""
        self.budgets = self.limits = budgets
        self.cost = cost
        self.drafts = drafts
        self.shard = shard
        self.depth = depth
        self.prefix_caching = prefix_caching
        # A tenant's quantum as small as here makes the order change often.
        self.waiting: RequestQueue = (
            TenantQueue(quantum=8) if budgets.share_slots else WaitingQueue()
        )
        residency = Residency(
            max_adapters=shard.adapters.max_adapters,
            num_pages=shard.adapters.num_pages,
            cycle_seconds=CYCLE_TURNS,
        )
        self.adapters = AdapterAdmission(
            residency, self.waiting, bytes_per_slice={MODULE.name: MODULE.bytes_per_slice}
        )
        self._calls: list[AdapterSlot] = []
        """Loads and unloads under way."""
        self._now = 0.0
        self.flights: deque[Flight] = deque()
        self.clients: dict[int, Client] = {}
        self.entries: dict[int, Entry] = {}
        self.plans: list[StepPlan] = []
        """All plans that were sent."""
        self.planner = self._new_planner()
        self.keeps_kv = False
        """Whether the next epoch begins with the KV of the one before."""
        self.loses_adapters = False
        """Whether the shard has lost its adapters when an epoch begins."""
        self.num_expelled = 0
        """Requests that left the batch for an adapter."""
        self._epoch = 0
        self._num_stalled = 0
        self._open()

    @property
    def num_kept(self) -> int:
        """Positions that were kept over failures."""
        return sum(row.num_kept for plan in self.plans for row in plan.admitted)

    @property
    def num_recomputed(self) -> int:
        """Positions that were computed again after failures."""
        return sum(row.num_recomputed for plan in self.plans for row in plan.admitted)

    def _new_planner(self, blocks: BlockManager | None = None) -> Planner:
        blocks = blocks or blocks_from(
            self.shard.num_blocks,
            self.shard.block_size,
            prefix_caching=self.prefix_caching,
            windows=self.shard.windows,
            state_pages=self.shard.state_pages,
        )
        return Planner(self.budgets, blocks, self.cost, self.drafts)

    def _open(self) -> None:
        self._epoch += 1
        self.last_sent = self.last_answered = 0
        self.shard.step(open_to_pb(self._epoch))

    def submit(self, request: ValidRequest) -> Client:
        """Queue a request and listen to its stream."""
        request_id = len(self.entries)
        entry = Entry(
            request_id,
            request,
            TOKENIZER,
            frozenset({EOS_TOKEN_ID}),
            block_size=self.shard.block_size,
        )
        entry.stream.when_closed(lambda: self._close(entry))
        self.entries[request_id] = entry
        client = Client(request, entry.stream, self.shard.eos_every)
        self.clients[request_id] = client
        self.adapters.submit(entry)
        return client

    def _close(self, entry: Entry) -> None:
        self.waiting.discard(entry)
        self._ended(entry)

    def _ended(self, entry: Entry) -> None:
        if entry.adapter is not None:
            self.adapters.ended(entry)

    def let_adapters_go_on(self, *, answers: bool = True) -> bool:
        """Begin the loads and unloads that are due; with `answers`, end those under way. Whether anything happened."""
        self._now += 1.0
        ending, self._calls = (self._calls, []) if answers else ([], self._calls)
        for place in ending:
            self._end_call(place)
        changes = self.adapters.advance(self._now)
        self._calls += [*changes.loads, *changes.unloads]
        return bool(ending or self._calls or changes.opened)

    def _end_call(self, place: AdapterSlot) -> None:
        in_use = self.shard.adapters_in_use
        if place.state is SlotState.LEAVING:
            self.shard.adapters.unload(place.number, in_use=in_use)
            self.adapters.residency.unloaded(place)
            return
        assert self.shard.adapters.load(place.number, place.digest, in_use=in_use) is None
        self.adapters.loaded(place, self._now)

    def send(self) -> StepPlan | None:
        """Plan a step and send it; None if there is no work."""
        assert len(self.flights) < self.depth
        self.planner.expulsion.digests = self.adapters.expelled
        plan = self.planner.plan(
            self.waiting, last_sent=self.last_sent, last_answered=self.last_answered
        )
        for request in self.planner.expulsion.take():
            self.num_expelled += 1
            self.adapters.wait_again(request)
        if plan is None:
            return None
        for row in plan.admitted:
            entry_of(row.entry).admitted(0.0, row.num_cached)
        self.last_sent += 1
        self.adapters.sent(plan, self.last_sent)
        message = plan_to_pb(plan, epoch=self._epoch, number=self.last_sent)
        self.plans.append(plan)
        self.flights.append(Flight(plan, self.shard.step(message)))
        self._check_plan(plan)
        return plan

    def counts(self, slot: int) -> bool:
        """Whether the tokens of a slot in a step are a client's; they always are with continuous batching."""
        return True

    def _check_plan(self, plan: StepPlan) -> None:
        """No work for a client that has left, and no more tokens than a request asked for."""
        rows, named = self.planner.rows, {*dict(plan.chunks), *plan.decodes}
        assert named <= set(rows), "a step names a slot without a row"
        for slot in named:
            row, running = rows[slot], self.shard.running.get(slot)
            if not self.counts(slot):
                continue
            assert not row.entry.closed, "work for a client that has left"
            # After a failed step the shard does not follow any more.
            is_own = running is not None and running.pb.request_id == row.entry.request_id
            if running is not None and is_own and not row.entry.max_jump_forward_tokens:
                num_new = len(running.ids) - row.entry.num_prompt_tokens
                assert num_new <= row.entry.max_new_tokens, "more tokens than asked for"
        if plan.decode_tokens:
            num_tokens = sum(plan.decode_tokens) + sum(count for _, count in plan.chunks)
            most = self.budgets.max_batch_prefill_tokens
            assert num_tokens <= most, "a step of more tokens than it may hold"
        if rows:
            self._check_order(plan, named)

    def _check_order(self, plan: StepPlan, named: set[int]) -> None:
        """The most senior row goes on, replays precede first admissions, and decodes do not starve prompts."""
        rows = sorted(self.planner.rows.values(), key=lambda row: row.seniority)
        paused = [item[0] for item in self.planner._admission._paused if not item[2].closed]
        paused += [
            row.seniority
            for row in self.planner._preempted.values()
            if not (row.entry.closed or row.has_yielded)
        ]
        others = [row.seniority for row in rows if not row.promised]
        assert min(others, default=-1) < min(paused, default=math.inf), "a senior was preempted"
        for row in plan.admitted:
            assert row.seniority < min(paused, default=math.inf), "a preempted request is overtaken"
        is_done = rows[0].num_tokens_planned >= rows[0].max_tokens or rows[0].slot in named
        # What it may still need is all in flight.
        is_done |= rows[0].num_room == 0 and len(self.flights) > 1
        # It is ahead of its turn as it is.
        is_done |= rows[0].is_early
        self._num_stalled = 0 if is_done else self._num_stalled + 1
        assert self._num_stalled <= self._longest_pause(), "the most senior row does not go on"
        unfinished = [row for row in rows if row.num_prompt_left]
        if unfinished:
            chunks = dict(plan.chunks)
            assert any(row.slot in chunks for row in rows), "prompts starve beside decodes"
            self._check_overtaking(rows, chunks)

    def _check_overtaking(self, rows: list[Row], chunks: dict[int, int]) -> None:
        """Without costs, at most half of the prompt tokens are of prompts behind one that is not complete."""
        waits = [row for row in rows if row.num_prompt_left and not row.is_early]
        if not waits or self.cost is not None:
            return
        behind = sum(
            num_tokens
            for slot, num_tokens in chunks.items()
            if self.planner.rows[slot].seniority > waits[0].seniority
        )
        allowed = sum(chunks.values()) // 2 if self.budgets.shortest_first else 0
        assert behind <= allowed, "a prompt is overtaken by too much"

    def _longest_pause(self) -> int:
        """Steps until blocks are free again."""
        return self.depth + 3

    def receive(self) -> None:
        """Receive the oldest answer; an error ends the epoch."""
        flight = self.flights.popleft()
        if flight.answer.HasField("error"):
            self.cut()
            return
        result, planner = result_from_pb([flight.answer]), self.planner
        self.last_answered = self.shard.answered = result.number
        planner.computed(
            flight.plan, result.failed_slots, counts=result.counts, computed=result.computed
        )
        for slot, logprobs in result.prompt_logprobs:
            if (row := planner.row(slot)) is not None:
                entry_of(row.entry).accept_prompt_logprobs(logprobs)
        for slot in result.failed_slots:
            if (row := planner.row(slot)) is not None:
                entry_of(row.entry).stream.fail(NonFiniteOutput())
                planner.drop(row)
                self._ended(entry_of(row.entry))
        for slot, token_id, logprob, top in result.tokens:
            row = planner.row(slot)
            if row is not None and entry_of(row.entry).accept(token_id, logprob, top):
                planner.end(row)
                self.waiting.served(row.entry, row.entry.num_generated)
                self._ended(entry_of(row.entry))
        planner.answered(result.number)
        self.adapters.answered(result.number)

    def cut(self) -> None:
        """End the epoch, and begin another one."""
        failed = self.planner
        if self.keeps_kv:
            self._park(failed)
        self.planner = self._new_planner(failed.blocks if self.keeps_kv else None)
        self.planner.take_over(failed, failed.take_all())
        self.planner.limit(self.limits)
        self.flights.clear()
        self.shard.keeps_kv = self.keeps_kv
        self._open()
        if self.loses_adapters:
            self.shard.adapters.slots.clear()
        for place in self.adapters.restarted():
            self._end_call(place)
        places = self.adapters.residency
        self._calls = [place for place in places if place.state is SlotState.LEAVING]

    def _park(self, failed: Planner) -> None:
        """Park the rows, which must keep exactly the positions that answered steps have computed."""
        expected = {}
        for slot, row in failed.rows.items():
            # A state may be ahead of the answers, so that nothing is kept.
            may_keep = failed.blocks.states is None and not row.entry.closed
            if may_keep and not row.entry.wants_prompt_logprobs:
                running = self.shard.running.get(slot)
                is_sent = running is not None and running.pb.request_id == row.entry.request_id
                num_known = self.shard.num_acknowledged(slot) if is_sent else row.num_cached
                expected[row.entry.request_id] = min(num_known, row.entry.num_inputs - 1)
        failed.park()
        parked = {each: one.num_positions for each, one in failed.blocks._parked.items()}
        kept = {each: parked.get(each, 0) for each in expected}
        if failed.blocks.windows:
            # A half-filled block that is shared in some group is computed again.
            size = self.shard.block_size
            expected = {each: number // size for each, number in expected.items()}
            kept = {each: number // size for each, number in kept.items()}
        assert kept == expected
        check_blocks(failed.blocks)

    def turn(self) -> bool:
        """Fill the pipeline and receive one answer; whether there was any work."""
        is_busy = self.let_adapters_go_on()
        while len(self.flights) < self.depth and self.send() is not None:
            pass
        if not self.flights:
            # Requests may have left the batch without a step.
            return is_busy or self.let_adapters_go_on()
        self.receive()
        return True

    def run(self, most: int = 10_000) -> int:
        """Call `turn` until no work is left; the number of calls. Raises AssertionError after `most`."""
        for number in range(most):
            if not self.turn():
                return number
        raise AssertionError(f"no end after {most} steps: {self.unended()}")

    def unended(self) -> list[int]:
        """Ids of the requests that may still get events."""
        return [number for number, client in self.clients.items() if not client.has_ended]

    def check(self) -> None:
        """Raise AssertionError unless all events were right and every block is in one place."""
        for client in self.clients.values():
            client.check()
        for entry in self.entries.values():
            if entry.adapter is None:
                assert entry.num_preemptions <= self.budgets.max_preemptions
        check_blocks(self.planner.blocks)
        for row in self.planner.rows.values():
            self._check_row(row)

    def _check_row(self, row: Row) -> None:
        """The planned counts of a row bound the shard's, and equal them if no step is in flight."""
        assert row.num_computed <= row.num_kv_tokens <= row.num_kv_owned
        assert row.num_room >= 0, "more positions than it can ever need"
        running = self.shard.running.get(row.slot)
        if running is None or running.pb.request_id != row.entry.request_id:
            return
        assert row.num_computed <= running.num_computed <= row.num_kv_tokens
        if not self.flights and not running.has_failed:
            assert row.num_computed == running.num_computed == row.num_kv_tokens
            num_new = row.entry.num_inputs - row.num_inputs
            assert row.num_tokens_planned == num_new, "tokens are planned that no step computes"

    def check_idle(self) -> None:
        """Raise AssertionError if anything is left over at the end."""
        blocks = self.planner.blocks
        assert self.unended() == []
        assert len(self.waiting) == self.planner.num_paused == 0
        assert not self.planner.rows
        assert not self.planner.running
        assert not self.shard.running
        assert not len(self.adapters.waiting)
        assert not any(place.num_users for place in self.adapters.residency)
        assert blocks.num_free + blocks.num_cached == blocks.num_blocks
        assert blocks.num_reserved == 0
        for window in blocks.windows:
            assert window.num_available == window.num_blocks
            assert window.num_owned == 0
        self.check()


def check_blocks(blocks: BlockManager) -> None:
    """Free, cached, owned and parked blocks are disjoint, and together they are all blocks."""
    cache = blocks.cache
    idle = [] if cache is None else [cached.block for cached in cache._idle.values()]
    holdings, kept = blocks._holdings.values(), blocks._parked.values()
    tables = [(each.blocks, each.pins) for each in holdings]
    tables += [(each.blocks, each.pins) for each in kept]
    private = [block for held, pins in tables for block in held[len(pins) :]]
    pinned = {pin.block for _, pins in tables for pin in pins}
    assert len({*private} - pinned) == len(private), "a block has two owners"
    owned = {block for holding in holdings for block in holding.blocks}
    parked = {block for each in kept for block in each.blocks} - owned
    fresh = range(blocks.num_blocks - blocks._num_fresh + 1, blocks.num_blocks + 1)
    free = [*blocks._free, *fresh]
    everything = [*free, *idle, *owned, *parked]
    assert sorted(everything) == list(range(1, blocks.num_blocks + 1)), "a block is lost or doubled"
    assert blocks.num_free == len(free)
    assert blocks.num_cached == len(idle)
    assert blocks.num_owned == len(owned)
    assert blocks.num_parked == len(parked)
    assert blocks.num_available >= 0, "blocks are promised that are not there"
    assert blocks._num_promised == sum(holding.num_promised for holding in holdings)
    if cache is not None:
        findable = [cached.block for cached in cache._blocks.values()]
        assert len(findable) == len(set(findable)), "a block has two keys"
        assert not set(findable) & set(free), "a free block is findable"
    for index, window in enumerate(blocks.windows):
        check_window(window, [each.windows[index] for each in kept])


def check_window(window: WindowBlocks, parked: list[Held]) -> None:
    """Free, cached and held blocks are disjoint, and together they are all blocks; no promise exceeds them."""
    cache, holdings = window.cache, [*window._held.values(), *parked]
    idle = [] if cache is None else [*cache._idle.values(), *cache._passing.values()]
    pairs = [pair for each in holdings for pair in zip(each.blocks, each.pins, strict=True)]
    private = [block for block, pin in pairs if pin is None]
    pinned = {block for block, pin in pairs if pin is not None}
    first = window._first + 1
    numbers = range(first, first + window.num_blocks)
    free = [*window._free, *numbers[window.num_blocks - window._num_fresh :]]
    everything = [*free, *(each.block for each in idle), *private, *pinned]
    assert sorted(everything) == [*numbers], "a window block is lost or doubled"
    assert window._num_reserved == sum(each.reserved for each in holdings)
    assert window.num_available >= 0, "window blocks are promised that are not there"
    if cache is not None:
        findable = [cached.block for cached in cache._blocks.values()]
        assert len(findable) == len(set(findable)), "a window block has two keys"
        assert not set(findable) & set(free), "a free window block is findable"
