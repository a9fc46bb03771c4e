"""Predicts when a request that arrives now is served."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import islice

from millrace_router.prediction.cost import CostModel
from millrace_router.prediction.late_planning import LatePlanning
from millrace_router.prediction.step_load import StepLoad
from millrace_router.prediction.traffic import RunningRow, TrafficStatistics
from millrace_router.scheduler.prefill_order import longest_overtaking, max_step_seconds

_MOST_ENDS = 128
"""Ends of rows that are simulated one by one; further requests ahead are counted at the mean rate."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds from now."""

    queue_seconds: float
    """Until the plan that admits the request."""
    first_token_seconds: float
    finish_seconds: float

    def after(self, seconds: float) -> Prediction:
        """Return the prediction for a request that may be admitted no sooner than after `seconds`."""
        late = max(0.0, seconds - self.queue_seconds)
        return Prediction(
            self.queue_seconds + late, self.first_token_seconds + late, self.finish_seconds + late
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The forecast for a request that arrives now, and the state of the scheduler."""

    prediction: Prediction | None
    """None until the cost model has observed enough."""
    num_cached: int
    """Prompt tokens that are in the prefix cache now."""
    num_tiles: int = 0
    """Tiles of its images that have to be encoded; 256 features of an image of any size count as one."""
    num_waiting: int
    num_running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Appraisal:
    """The validation and the estimate of a request that does not run."""

    num_prompt_tokens: int
    max_new_tokens: int
    refusal: str | None
    """Why the request does not fit; the estimate is then for the shortest request."""
    estimate: Estimate


@dataclass(frozen=True, slots=True)
class _Queue:
    """The running and waiting requests that a request which arrives now has to wait for."""

    running: Sequence[RunningRow]
    num_kv_tokens: int
    num_ahead: int
    """Requests that are served before it."""
    prompt_ahead: float
    """Mean number of tokens to compute for each of those."""
    num_free: int
    """Free slots in the batch for the requests ahead and for it."""
    num_left: int
    """Tokens of its prompt to compute."""
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of decodes as most steps are until the request is served, with room for prompts."""

    cost: CostModel
    decodes: int
    seconds: float
    """Its duration without prompts."""
    room: int
    """Prompt tokens that it can hold in addition to its decodes."""
    room_seconds: float
    """Seconds that those may take."""

    def num_steps(self, num_tokens: float, start: float = 0.0) -> float:
        """Steps that a prompt takes from position `start` on."""
        seconds = self.cost.prompt_seconds(num_tokens, start=start)
        return max(num_tokens / self.room, seconds and seconds / self.room_seconds)

    def prompt_seconds(self, num_tokens: float, start: float = 0.0) -> float:
        """Seconds that a prompt, computed from position `start` on, adds to the steps that it shares with decodes."""
        if num_tokens <= 0.0:
            return 0.0
        num_steps = math.ceil(self.num_steps(num_tokens, start))
        tokens = self.cost.prompt_seconds(num_tokens, start=start)
        return num_steps * self.cost.prefill_step_seconds + tokens


class Forecaster:
    """Predicts queue time, first token and end of a request from the running batch.

    A request waits for the prompts ahead of it, at the rate that steps with the batch's decodes leave to prompts, or
    until more rows have ended than there are requests ahead without a slot, whichever takes longer. Rows end as the
    last answers did. The cost model prices the steps in between at the size of the batch.
    """

    def __init__(  # noqa: PLR0913
        self,
        cost: CostModel,
        *,
        max_batch_size: int,
        max_batch_prefill_tokens: int,
        block_size: int,
        num_blocks: int,
        reserve_all: bool = False,
        shortest_first: bool = True,
        target_inter_token_latency: float | None = None,
        steps_in_flight: int = 2,
        late: LatePlanning | None = None,
        traffic: TrafficStatistics | None = None,
    ) -> None:
        """The limits are as in `Budgets`; `traffic` learns from answers."""
        self._cost = cost
        self._max_batch_size = max_batch_size
        self._max_batch_prefill_tokens = max_batch_prefill_tokens
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._reserve_all = reserve_all
        self._shortest_first = shortest_first
        self._target = target_inter_token_latency
        self._depth = steps_in_flight
        self._late = late or LatePlanning(cost, most=0.0)
        self.traffic = traffic or TrafficStatistics()

    def predict(
        self,
        rows: Iterable[RunningRow],
        *,
        ahead: tuple[int, int],
        num_prompt_tokens: int,
        max_new_tokens: int,
        num_cached: int = 0,
        now_in_step: float = 0.0,
        in_flight: Sequence[StepLoad] = (),
    ) -> Prediction | None:
        """Predict for a request that arrives while `rows` run.

        None until the cost model has observed enough.

        `ahead` is the number of requests that are served before it, and the sum of their prompt tokens; `now_in_step`
        is the number of seconds since the oldest step in flight began. Without the loads `in_flight`, the oldest first,
        steps like most others are taken to be in flight.
        """
        traffic = self.traffic
        queue = self._queue(list(rows), ahead, num_prompt_tokens, num_cached, max_new_tokens)
        length = traffic.lengths.expected(max_new_tokens)
        step = self._typical_step(queue, num_prompt_tokens + length / 2)
        if step is None:
            return None
        planned, begins = self._next_step(queue, step, now_in_step, in_flight)
        wait, num_left = self._queue_seconds(queue, step), queue.num_left
        start = num_prompt_tokens - num_left
        first = begins + wait + math.ceil(step.num_steps(num_left, start)) * step.seconds
        first += step.prompt_seconds(num_left, start)
        between = step.seconds
        if queue.running:
            # The load stays as it is: each row that ends is replaced by a request with a prompt.
            replaced = (step.decodes - 1) / traffic.mean_steps(max_new_tokens)
            between += replaced * step.prompt_seconds(traffic.mean_prompt)
        num_steps = max(0.0, length - 1) / traffic.tokens_per_step
        return Prediction(planned + wait, first, first + num_steps * between)

    def drain_seconds(
        self, rows: Iterable[RunningRow], *, waiting: tuple[int, int], now_in_step: float = 0.0
    ) -> float | None:
        """Return seconds until the first of the waiting requests has left the queue.

        `waiting` is the number of waiting requests, and the sum of their prompt tokens. None where `predict` gives
        None.
        """
        num_waiting, num_tokens = waiting
        running = list(rows)
        prediction = self.predict(
            running,
            ahead=(0, 0),
            num_prompt_tokens=num_tokens // num_waiting,
            max_new_tokens=self.mean_request(running)[1],
            now_in_step=now_in_step,
        )
        return None if prediction is None else prediction.queue_seconds

    def mean_request(self, rows: Iterable[RunningRow]) -> tuple[int, int]:
        """Return prompt tokens and new tokens of a request like the mean of the last ones."""
        longest = max((row.max_tokens for row in rows), default=1)
        traffic = self.traffic
        return max(1, round(traffic.mean_prompt)), max(1, round(traffic.mean_length(longest)))

    def _queue(
        self,
        running: Sequence[RunningRow],
        ahead: tuple[int, int],
        num_prompt_tokens: int,
        num_cached: int,
        max_new_tokens: int,
    ) -> _Queue:
        num_ahead, tokens_ahead = ahead
        num_kv_tokens = sum([row.num_kv_tokens for row in running])
        num_free = self._num_free(
            running, num_kv_tokens, num_ahead + 1, tokens_ahead + num_prompt_tokens, max_new_tokens
        )
        return _Queue(
            running,
            num_kv_tokens,
            num_ahead,
            tokens_ahead / max(1, num_ahead) * self.traffic.computed_share,
            num_free,
            max(1, num_prompt_tokens - num_cached),
            max_new_tokens,
        )

    def _num_free(
        self,
        running: Sequence[RunningRow],
        num_kv_tokens: int,
        num_joining: int,
        num_tokens: int,
        max_new_tokens: int,
    ) -> int:
        """Return the number of the next `num_joining` requests that find a slot and blocks at once."""
        free_slots = self._max_batch_size - len(running)
        if self._reserve_all:
            num_tokens += num_joining * max_new_tokens
            num_kv_tokens += sum([row.max_tokens - row.num_tokens_planned for row in running])
        # A last block is half full on average; a block is left over for each row to grow.
        needed = num_tokens / self._block_size + num_joining / 2
        free = self._num_blocks - num_kv_tokens / self._block_size - 1.5 * len(running)
        if needed <= free or not running:
            return free_slots
        return min(free_slots, int(max(0.0, free) / needed * num_joining))

    def _typical_step(self, queue: _Queue, num_kv_tokens: float) -> _Step | None:
        """Return a step once requests with `num_kv_tokens` each have the free slots; None before the first fit."""
        num_rows = len(queue.running)
        num_joining = max(not num_rows, min(queue.num_ahead + 1, queue.num_free))
        decodes = num_rows + num_joining
        context = queue.num_kv_tokens + round(num_joining * num_kv_tokens)
        load = StepLoad(decodes=decodes, context=context)
        seconds, beside = self._cost.seconds(load), self._cost.seconds_beside_prompts(load)
        if seconds is None or beside is None:
            return None
        room = max(self._block_size, self._max_batch_prefill_tokens - decodes)
        longest = max_step_seconds(seconds, beside, num_rows, self._target)
        least = self._cost.prompt_seconds(self._block_size, start=0)
        return _Step(self._cost, decodes, seconds, room, max(longest - beside, least))

    def _next_step(
        self, queue: _Queue, step: _Step, now_in_step: float, in_flight: Sequence[StepLoad]
    ) -> tuple[float, float]:
        """Return seconds from now until the next plan, and until the step that it plans begins."""
        if not queue.running:
            return 0.0, 0.0
        steps = [self._cost.seconds(load) or 0.0 for load in in_flight] or [step.seconds]
        left = max(0.0, steps[0] - now_in_step)
        if self._depth == 1:
            return left, left
        open_for = self._late.open_part(steps[0])
        is_open = len(steps) == 1 if in_flight else now_in_step < open_for
        if is_open:
            return max(0.0, open_for - now_in_step), left
        # The next step is planned already, and the request joins the one after it.
        following = steps[-1] if len(steps) > 1 else step.seconds
        return left + self._late.open_part(following), left + following

    def _queue_seconds(self, queue: _Queue, step: _Step) -> float:
        """Return seconds between the next plan and the one that admits the request."""
        left = [
            (row.num_prompt_left, row.num_kv_tokens)
            for row in queue.running
            if not row.num_tokens_planned
        ]
        longest, start = max(left, default=(0, 0))
        has_slot = queue.num_ahead < queue.num_free
        if self._shortest_first and has_slot and queue.num_left <= longest_overtaking(longest):
            return 0.0
        unfinished = sum([each for each, _ in left])
        num_steps = step.num_steps(unfinished, start)
        num_steps += queue.num_ahead * step.num_steps(queue.prompt_ahead)
        if not has_slot:
            num_steps = max(num_steps, self._steps_until_slot(queue))
        # Rows that end leave a slot at the end of a step; without rows, none is in flight.
        seconds = max(0.0, num_steps - bool(queue.running)) * step.seconds
        seconds += queue.num_ahead * step.prompt_seconds(queue.prompt_ahead)
        return seconds + step.prompt_seconds(unfinished, start)

    def _steps_until_slot(self, queue: _Queue) -> float:
        """Steps until one row more has ended than there are requests ahead without a slot."""
        # A row ends, and its slot is free, `depth` steps after the plan of its last token.
        turnover = 2 * (self._depth - 1)
        lengths = self.traffic.steps_to_come(queue.max_new_tokens)
        ends = [turnover + 1 + left for left in self.traffic.steps_left(queue.running)]
        ends.extend(turnover + next(lengths) for _ in range(min(queue.num_free, queue.num_ahead)))
        if not ends:
            return 0.0
        heapify(ends)
        num_ends = queue.num_ahead - queue.num_free
        for length in islice(lengths, min(num_ends, _MOST_ENDS)):
            heapreplace(ends, ends[0] + length + turnover)
        mean = self.traffic.mean_steps(queue.max_new_tokens) + turnover
        return ends[0] + max(0, num_ends - _MOST_ENDS) * mean / len(ends)
