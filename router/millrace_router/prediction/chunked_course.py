"""The course of a request whose prompt is computed beside the decodes of others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import islice

from millrace_router.prediction.cost import CostModel
from millrace_router.prediction.course import Batch, Course, Newcomer, StepPipeline
from millrace_router.prediction.step_load import StepLoad
from millrace_router.prediction.traffic import TrafficStatistics

_MOST_ENDS = 128
"""Ends played through one by one; more entries ahead than that are counted at the mean rate."""


@dataclass(frozen=True, slots=True)
class _Pace:
    """A step as most will be until the request is served."""

    decodes: int
    context: int
    seconds: float
    room: int
    """Prompt tokens it can hold beside its decodes."""


class ChunkedCourse:
    """Plays the ends of running rows through until there is a place for the joiner.

    Whoever takes the place that is free ends as the last answers did. The steps in between are priced by the cost
    model at the batch's size, with the prompts of those ahead on top.
    """

    def __init__(
        self,
        cost: CostModel,
        experience: TrafficStatistics,
        pipeline: StepPipeline,
        *,
        max_batch_prefill_tokens: int,
        block_size: int,
        target_inter_token_latency: float | None,
    ) -> None:
        self._cost = cost
        self._experience = experience
        self._pipeline = pipeline
        self._max_batch_prefill_tokens = max_batch_prefill_tokens
        self._block_size = block_size
        self._target = target_inter_token_latency

    def foretell(self, batch: Batch, joiner: Newcomer) -> Course | None:
        """None while the cost model knows nothing."""
        size = batch.num_rows + min(joiner.num_ahead + 1, joiner.num_places)
        pace = self._pace(batch, size, joiner.num_kv_tokens)
        if pace is None:
            return None
        queue = self._queue_seconds(batch, pace, joiner)
        in_flight, now_in_step = 0.0, joiner.now_in_step
        if batch.num_rows:
            # A plan is made late in the step before its own; what comes earlier in a step is still in time for it.
            open_for = self._pipeline.open_part(pace.seconds)
            queue += open_for - (pace.seconds if now_in_step < open_for else 0.0)
            in_flight = max(0.0, (self._pipeline.depth - 1) * pace.seconds - open_for)
        queue = max(0.0, queue - min(now_in_step, pace.seconds))
        num_left = joiner.num_left
        prefill = self._prompt_seconds(pace, num_left, joiner.num_prompt_tokens - num_left)
        num_chunks = math.ceil(num_left / pace.room)
        first = queue + in_flight + num_chunks * pace.seconds + prefill
        step = pace.seconds
        if batch.num_rows:
            # Load goes on as it is: for each row that ends another one brings its prompt.
            replaced = (pace.decodes - 1) / self._experience.mean_steps(joiner.max_new_tokens)
            step += replaced * self._prompt_seconds(pace, self._experience.mean_prompt, 0)
        return Course(queue, first, step)

    def _pace(self, batch: Batch, size: int, num_kv_tokens: float) -> _Pace | None:
        """Steps of `size` rows; those beyond what runs now hold `num_kv_tokens` each."""
        decodes = max(1, size)
        context = batch.context(decodes, num_kv_tokens)
        seconds = self._cost.seconds(StepLoad(decodes=decodes, context=context))
        if seconds is None:
            return None
        room = max(self._block_size, self._max_batch_prefill_tokens - decodes)
        if self._target is not None and batch.num_rows:
            room = self._cost.prefill_tokens_within(
                self._target,
                decodes=decodes,
                context=context,
                start=0,
                least=self._block_size,
                most=room,
            )
        return _Pace(decodes, context, seconds, room)

    def _queue_seconds(self, batch: Batch, pace: _Pace, joiner: Newcomer) -> float:
        """Until the plan that admits the joiner, from the start of the oldest step in flight."""
        prompts = batch.num_prompt_left + joiner.num_ahead * joiner.prompt_ahead
        num_steps = float(bool(batch.num_rows))
        if joiner.num_ahead >= joiner.num_places:
            num_steps = self._steps_until_place(batch, joiner)
        seconds = max(num_steps, prompts / pace.room) * pace.seconds
        seconds += joiner.num_ahead * self._prompt_seconds(pace, joiner.prompt_ahead, 0)
        return seconds + self._prompt_seconds(pace, batch.num_prompt_left, 0)

    def _steps_until_place(self, batch: Batch, joiner: Newcomer) -> float:
        """Steps until as many rows have ended as there are entries ahead without a place, and one more."""
        depth, num_ahead, num_places = self._pipeline.depth, joiner.num_ahead, joiner.num_places
        turnover = 2 * (depth - 1)
        lengths = self._experience.steps_to_come(joiner.max_new_tokens)
        ends = [2 * depth - 1 + left for left in self._experience.steps_left(batch.rows)]
        ends.extend(turnover + next(lengths) for _ in range(min(num_places, num_ahead)))
        if not ends:
            return 0.0
        heapify(ends)
        num_ends = num_ahead - num_places
        for length in islice(lengths, min(num_ends, _MOST_ENDS)):
            heapreplace(ends, ends[0] + length + turnover)
        mean = self._experience.mean_steps(joiner.max_new_tokens) + turnover
        return ends[0] + max(0, num_ends - _MOST_ENDS) * mean / len(ends)

    def _prompt_seconds(self, pace: _Pace, num_tokens: float, start: int) -> float:
        """What computing a prompt from `start` on adds to the steps that it shares with decodes."""
        if num_tokens <= 0:
            return 0.0
        num_steps = math.ceil(num_tokens / pace.room)
        load = StepLoad(
            prefill_tokens=max(1, round(num_tokens / num_steps)),
            prefill_pairs=round(num_tokens * (start + (num_tokens + 1) / 2) / num_steps),
            num_chunks=1,
            decodes=pace.decodes,
            context=pace.context,
        )
        return num_steps * ((self._cost.seconds(load) or 0.0) - pace.seconds)
