"""Predicts when a request that arrives now is served."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import islice

from millrace_router.prediction.batch import Batch, Newcomer, RunningRow
from millrace_router.prediction.cost import CostModel
from millrace_router.prediction.late_planning import LatePlanning
from millrace_router.prediction.step_load import StepLoad
from millrace_router.prediction.traffic import TrafficStatistics
from millrace_router.prediction.typical_step import TypicalStep
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
        """The prediction for a request that may be admitted no sooner than after `seconds`."""
        late = max(0.0, seconds - self.queue_seconds)
        return Prediction(
            self.queue_seconds + late, self.first_token_seconds + late, self.finish_seconds + late
        )


class Forecaster:
    """Predicts queue time, first token and end of a request from the running batch.

    It simulates the ends of running rows until there is a place for the request. A request that takes a free place
    ends as the last answers did. The cost model prices the steps in between at the size of the batch, with the prompts
    of the requests ahead on top.

    Without chunked prefill or continuous batching it predicts nothing: the time of a prompt then depends on later
    arrivals.
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
        predicts: bool = True,
        shortest_first: bool = True,
        target_inter_token_latency: float | None = None,
        steps_in_flight: int = 2,
        late: LatePlanning | None = None,
    ) -> None:
        """`predicts` is whether the batching can be predicted; the others are as in `Budgets`."""
        self._cost = cost
        self._max_batch_size = max_batch_size
        self._max_batch_prefill_tokens = max_batch_prefill_tokens
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._reserve_all = reserve_all
        self._predicts = predicts
        self._shortest_first = shortest_first
        self._target = target_inter_token_latency
        self._depth = steps_in_flight
        self._late = late or LatePlanning(cost, most=0.0)
        self._traffic = TrafficStatistics(max_batch_size=max_batch_size)

    def finished(
        self, *, num_prompt: int, num_generated: int, max_new_tokens: int, num_cached: int = 0
    ) -> None:
        """Learn from an answer; for one whose client left, `max_new_tokens` is `num_generated`."""
        self._traffic.finished(
            num_prompt=num_prompt,
            num_generated=num_generated,
            max_new_tokens=max_new_tokens,
            num_cached=num_cached,
        )

    def yielded(self, num_tokens: int, num_rows: int) -> None:
        """Learn from a step in which `num_rows` multi-token rows have yielded `num_tokens`."""
        self._traffic.yielded(num_tokens, num_rows)

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

        None where the batching cannot be predicted, and until the cost model has observed enough.

        `ahead` is the number of requests that are served before it, and the sum of their prompt tokens; `now_in_step`
        is the number of seconds since the oldest step in flight began. Without the loads `in_flight`, the oldest first,
        steps like most others are taken to be in flight.
        """
        if not self._predicts:
            return None
        batch, traffic = self._survey(rows), self._traffic
        num_ahead, tokens_ahead = ahead
        own_length = traffic.lengths.expected_left(0, max_new_tokens)
        newcomer = Newcomer(
            num_ahead=num_ahead,
            prompt_ahead=tokens_ahead / max(1, num_ahead) * traffic.computed_share,
            num_prompt_tokens=num_prompt_tokens,
            num_cached=num_cached,
            max_new_tokens=max_new_tokens,
            num_kv_tokens=num_prompt_tokens + own_length / 2,
            num_places=self._num_places(
                batch, num_ahead + 1, tokens_ahead + num_prompt_tokens, max_new_tokens
            ),
            now_in_step=now_in_step,
            steps=tuple(self._cost.seconds(load) or 0.0 for load in in_flight),
        )
        step = self._typical_step(batch, newcomer)
        if step is None:
            return None
        queue, first = self._until_first_token(batch, newcomer, step)
        num_steps = max(0.0, own_length - 1) / traffic.tokens_per_step
        finish = first + num_steps * self._seconds_between_tokens(batch, newcomer, step)
        return Prediction(queue, first, finish)

    def drain_seconds(
        self,
        rows: Iterable[RunningRow],
        *,
        waiting: tuple[int, int],
        num_leaving: int = 1,
        now_in_step: float = 0.0,
    ) -> float | None:
        """Seconds until `num_leaving` requests have left the queue.

        `waiting` is the number of waiting requests, and the sum of their prompt tokens. None where `predict` gives
        None; 0 when fewer than `num_leaving` wait.
        """
        num_waiting, num_tokens = waiting
        if num_leaving > num_waiting:
            return 0.0
        running, mean = list(rows), num_tokens // num_waiting
        _, limit = self.mean_request(running)
        prediction = self.predict(
            running,
            ahead=(num_leaving - 1, mean * (num_leaving - 1)),
            num_prompt_tokens=mean,
            max_new_tokens=limit,
            now_in_step=now_in_step,
        )
        return None if prediction is None else prediction.queue_seconds

    def mean_request(self, rows: Iterable[RunningRow]) -> tuple[int, int]:
        """Prompt tokens and new tokens of a request like the mean of the last ones."""
        longest = max((row.max_tokens for row in rows), default=1)
        traffic = self._traffic
        return max(1, round(traffic.mean_prompt)), max(1, round(traffic.mean_length(longest)))

    def _survey(self, rows: Iterable[RunningRow]) -> Batch:
        running = list(rows)
        num_kv_tokens = sum([row.num_kv_tokens for row in running])
        if self._reserve_all:
            num_kv_tokens += sum([row.max_tokens - row.num_tokens_planned for row in running])
        left = [
            (row.num_prompt_left, row.num_kv_tokens)
            for row in running
            if not row.num_tokens_planned
        ]
        longest, start = max(left, default=(0, 0))
        num_left = sum([each for each, _ in left])
        return Batch(running, len(running), num_kv_tokens, num_left, longest, start)

    def _num_places(
        self, batch: Batch, num_joining: int, num_tokens: int, max_new_tokens: int
    ) -> int:
        """The number of the next `num_joining` requests that find a slot and blocks at once."""
        free_slots = self._max_batch_size - batch.num_rows
        if self._reserve_all:
            num_tokens += num_joining * max_new_tokens
        # A last block is half full on average; a block is left over for each row to grow.
        needed = num_tokens / self._block_size + num_joining / 2
        used = batch.num_kv_tokens / self._block_size + 1.5 * batch.num_rows
        free = max(0.0, self._num_blocks - used)
        if needed <= free or not batch.num_rows:
            return free_slots
        return min(free_slots, int(free / needed * num_joining))

    def _typical_step(self, batch: Batch, newcomer: Newcomer) -> TypicalStep | None:
        """A step of the batch once the newcomer and the requests ahead of it have taken the free places."""
        size = batch.num_rows + min(newcomer.num_ahead + 1, newcomer.num_places)
        decodes = max(1, size)
        context = batch.context(decodes, newcomer.num_kv_tokens)
        load = StepLoad(decodes=decodes, context=context)
        seconds, beside = self._cost.seconds(load), self._cost.seconds_beside_prompts(load)
        if seconds is None or beside is None:
            return None
        room = max(self._block_size, self._max_batch_prefill_tokens - decodes)
        target = self._target or math.inf
        if self._shortest_first:
            target = min(target, max_step_seconds(beside))
        if target < math.inf and batch.num_rows:
            room = self._cost.prefill_tokens_within(
                target,
                decodes=decodes,
                context=context,
                start=0,
                least=self._block_size,
                most=room,
            )
        return TypicalStep(self._cost, decodes, context, seconds, room)

    def _until_first_token(
        self, batch: Batch, newcomer: Newcomer, step: TypicalStep
    ) -> tuple[float, float]:
        """Seconds from now until the plan that admits the newcomer, and until its first token."""
        planned, begins = self._until_next_step(batch, newcomer, step)
        num_left, others = newcomer.num_left, 0.0
        if not (self._shortest_first and newcomer.overtakes(batch, longest_overtaking)):
            others = self._queue_seconds(batch, newcomer, step)
        prefill = step.prompt_seconds(num_left, newcomer.num_prompt_tokens - num_left)
        num_chunks = math.ceil(num_left / step.room)
        return planned + others, begins + others + num_chunks * step.seconds + prefill

    def _until_next_step(
        self, batch: Batch, newcomer: Newcomer, step: TypicalStep
    ) -> tuple[float, float]:
        """Seconds from now until the next plan, and until the step that it plans begins."""
        if not batch.num_rows:
            return 0.0, 0.0
        steps = newcomer.steps or (step.seconds,)
        left, open_for = steps[0] - newcomer.now_in_step, self._late.open_part(steps[0])
        if self._depth == 1:
            return max(0.0, left), max(0.0, left)
        is_open = len(steps) == 1 if newcomer.steps else newcomer.now_in_step < open_for
        if is_open:
            return max(0.0, open_for - newcomer.now_in_step), max(0.0, left)
        # The next step is planned already, and the newcomer joins the one after it.
        following = steps[-1] if len(steps) > 1 else step.seconds
        left = max(0.0, left)
        return left + self._late.open_part(following), left + following

    def _seconds_between_tokens(self, batch: Batch, newcomer: Newcomer, step: TypicalStep) -> float:
        seconds = step.seconds
        if batch.num_rows:
            # The load stays as it is: each row that ends is replaced by a request with a prompt.
            replaced = (step.decodes - 1) / self._traffic.mean_steps(newcomer.max_new_tokens)
            seconds += replaced * step.prompt_seconds(self._traffic.mean_prompt, 0)
        return seconds

    def _queue_seconds(self, batch: Batch, newcomer: Newcomer, step: TypicalStep) -> float:
        """Seconds between the next plan and the one that admits the newcomer."""
        prompts = batch.num_prompt_left + newcomer.num_ahead * newcomer.prompt_ahead
        num_steps = float(bool(batch.num_rows))
        if newcomer.num_ahead >= newcomer.num_places:
            num_steps = self._steps_until_place(batch, newcomer)
        # Rows that end leave a place at the end of a step; without rows, none is in flight.
        num_steps = max(num_steps, prompts / step.room) - bool(batch.num_rows)
        seconds = max(0.0, num_steps) * step.seconds
        seconds += newcomer.num_ahead * step.prompt_seconds(newcomer.prompt_ahead)
        return seconds + step.prompt_seconds(batch.num_prompt_left, batch.longest_prompt_start)

    def _steps_until_place(self, batch: Batch, newcomer: Newcomer) -> float:
        """Steps until one row more has ended than there are requests ahead without a place."""
        depth, num_ahead, num_places = self._depth, newcomer.num_ahead, newcomer.num_places
        # A row ends, and its place is free, `depth` steps after the plan of its last token.
        turnover = 2 * (depth - 1)
        lengths = self._traffic.steps_to_come(newcomer.max_new_tokens)
        ends = [2 * depth - 1 + left for left in self._traffic.steps_left(batch.rows)]
        ends.extend(turnover + next(lengths) for _ in range(min(num_places, num_ahead)))
        if not ends:
            return 0.0
        heapify(ends)
        num_ends = num_ahead - num_places
        for length in islice(lengths, min(num_ends, _MOST_ENDS)):
            heapreplace(ends, ends[0] + length + turnover)
        mean = self._traffic.mean_steps(newcomer.max_new_tokens) + turnover
        return ends[0] + max(0, num_ends - _MOST_ENDS) * mean / len(ends)
