"""When a request that arrived now would be served."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import cycle, islice
from typing import Protocol

from millrace_router.answer_lengths import AnswerLengths
from millrace_router.cost import CostModel
from millrace_router.late_planning import LatePlanning
from millrace_router.step_load import StepLoad

DEPTH = 2
"""Steps in flight: a row ends, and its place is free, this many steps after the plan that saw it end."""
_MOST_ENDS = 128
"""Ends played through one by one; more entries ahead than that are counted at the mean rate."""
_PROMPT_RATE = 1 / 64
"""How far one answer moves what is known of prompts."""
_YIELD_RATE = 1 / 64
"""How far one step moves what is known of tokens per row and step."""
_GOLDEN = (math.sqrt(5) - 1) / 2


class RunningRow(Protocol):
    """What a forecast needs to know of a row."""

    @property
    def slot(self) -> int:
        """Its place in the batch."""

    @property
    def num_prompt_left(self) -> int:
        """Input tokens that no step computes yet."""

    @property
    def num_tokens_planned(self) -> int:
        """New tokens that the steps planned so far yield."""

    @property
    def max_tokens(self) -> int:
        """New tokens it may yield."""

    @property
    def num_kv_tokens(self) -> int:
        """KV positions filled once everything planned has run."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds from now."""

    queue_seconds: float
    """Until the plan that admits it."""
    first_token_seconds: float
    finish_seconds: float


@dataclass(frozen=True, slots=True)
class _Arrivals:
    """Requests that join after each other."""

    count: int
    num_prompt_tokens: float


@dataclass(frozen=True, slots=True)
class _Batch:
    """What runs now."""

    rows: list[RunningRow]
    num_rows: int
    num_kv_tokens: int
    """Held, and promised where everything is."""
    num_prompt_left: int


@dataclass(frozen=True, slots=True)
class _Pace:
    """A step as most will be until the request is served."""

    decodes: int
    context: int
    seconds: float
    room: int
    """Prompt tokens it can hold beside its decodes."""


class Forecaster:
    """Predicts queue time, first token and end, by playing the ends of running rows through.

    A row ends at a quantile of what answers like it have left: quantiles by the golden ratio of the slot cover the
    distribution evenly (a Weyl sequence), so the k-th of these ends estimates the k-th order statistic, which k
    times the mean would not. Whoever takes the place that is free ends as the last answers did. The steps in between
    are priced by the cost model at the batch's size, with the prompts of those ahead on top.
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
        target_inter_token_latency: float | None = None,
        late: LatePlanning | None = None,
    ) -> None:
        self._cost = cost
        self._max_batch_size = max_batch_size
        self._max_batch_prefill_tokens = max_batch_prefill_tokens
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._reserve_all = reserve_all
        self._target = target_inter_token_latency
        self._late = late or LatePlanning(cost, most=0.0)
        self._lengths = AnswerLengths()
        self._computed_share = 1.0
        self._tokens_per_step = 1.0
        """Of a row: more where guesses are right."""
        self._mean_prompt = 0.0
        quantiles = (((slot + 0.5) * _GOLDEN) % 1.0 for slot in range(max_batch_size))
        self._hazards = [-math.log1p(-quantile) for quantile in quantiles]

    def finished(
        self, *, num_prompt: int, num_generated: int, max_new_tokens: int, num_cached: int = 0
    ) -> None:
        """Learn from an answer; one whose reader left counts with `max_new_tokens` = `num_generated`."""
        self._lengths.add(num_generated, max_new_tokens)
        num_computed = num_prompt - num_cached
        share = num_computed / max(1, num_prompt)
        self._computed_share += _PROMPT_RATE * (share - self._computed_share)
        self._mean_prompt += _PROMPT_RATE * (num_computed - self._mean_prompt)

    def yielded(self, num_tokens: int, num_rows: int) -> None:
        """Learn from a step in which so many rows that might yield several tokens have yielded so many."""
        found = num_tokens / num_rows
        self._tokens_per_step += _YIELD_RATE * (found - self._tokens_per_step)

    def predict(
        self,
        rows: Iterable[RunningRow],
        *,
        ahead: tuple[int, int],
        num_prompt_tokens: int,
        max_new_tokens: int,
        num_cached: int = 0,
        now_in_step: float = 0.0,
    ) -> Prediction | None:
        """For a request that arrives while `rows` run; None while the cost model knows nothing.

        `ahead` is how many entries are served before it and their prompt tokens; `now_in_step` for how many seconds
        the oldest step in flight has run.
        """
        batch = self._survey(rows)
        num_ahead, tokens_ahead = ahead
        own_length = self._lengths.expected_left(0, max_new_tokens)
        num_places = self._num_places(
            batch, num_ahead + 1, tokens_ahead + num_prompt_tokens, max_new_tokens
        )
        size = batch.num_rows + min(num_ahead + 1, num_places)
        pace = self._pace(batch, size, num_prompt_tokens + own_length / 2)
        if pace is None:
            return None
        others = _Arrivals(num_ahead, tokens_ahead / max(1, num_ahead) * self._computed_share)
        queue = self._queue_seconds(batch, pace, others, num_places, max_new_tokens)
        in_flight = 0.0
        if batch.num_rows:
            # A plan is made late in the step before its own; what comes earlier in a step is still in time for it.
            open_for = self._late.open_part(pace.seconds)
            queue += open_for - (pace.seconds if now_in_step < open_for else 0.0)
            in_flight = (DEPTH - 1) * pace.seconds - open_for
        queue = max(0.0, queue - min(now_in_step, pace.seconds))
        num_left = max(1, num_prompt_tokens - num_cached)
        prefill = self._prompt_seconds(pace, num_left, num_prompt_tokens - num_left)
        num_chunks = math.ceil(num_left / pace.room)
        first = queue + in_flight + num_chunks * pace.seconds + prefill
        step = pace.seconds
        if batch.num_rows:
            # Load goes on as it is: for each row that ends another one brings its prompt.
            replaced = (pace.decodes - 1) / self._mean_steps(max_new_tokens)
            step += replaced * self._prompt_seconds(pace, self._mean_prompt, 0)
        num_steps = max(0.0, own_length - 1) / self._tokens_per_step
        return Prediction(queue, first, first + num_steps * step)

    def drain_seconds(
        self,
        rows: Iterable[RunningRow],
        *,
        waiting: tuple[int, int],
        num_leaving: int = 1,
        now_in_step: float = 0.0,
    ) -> float | None:
        """Until `num_leaving` of the `waiting` entries (how many, their prompt tokens) have left the queue.

        None while the cost model knows nothing; 0 when not so many wait.
        """
        num_waiting, num_tokens = waiting
        if num_leaving > num_waiting:
            return 0.0
        running, mean = list(rows), num_tokens // num_waiting
        limit = round(self._mean_length(max((row.max_tokens for row in running), default=1)))
        prediction = self.predict(
            running,
            ahead=(num_leaving - 1, mean * (num_leaving - 1)),
            num_prompt_tokens=mean,
            max_new_tokens=limit,
            now_in_step=now_in_step,
        )
        return None if prediction is None else prediction.queue_seconds

    def _survey(self, rows: Iterable[RunningRow]) -> _Batch:
        running = list(rows)
        num_kv_tokens = sum([row.num_kv_tokens for row in running])
        if self._reserve_all:
            num_kv_tokens += sum([row.max_tokens - row.num_tokens_planned for row in running])
        num_prompt_left = sum(
            [row.num_prompt_left for row in running if not row.num_tokens_planned]
        )
        return _Batch(running, len(running), num_kv_tokens, num_prompt_left)

    def _num_places(
        self, batch: _Batch, num_joining: int, num_tokens: int, max_new_tokens: int
    ) -> int:
        """How many of those who join next find a slot and blocks at once."""
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

    def _pace(self, batch: _Batch, size: int, num_kv_tokens: float) -> _Pace | None:
        """Steps of `size` rows; those beyond what runs now hold `num_kv_tokens` each."""
        decodes = max(1, size)
        context = batch.num_kv_tokens + round(max(0, decodes - batch.num_rows) * num_kv_tokens)
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

    def _queue_seconds(
        self, batch: _Batch, pace: _Pace, ahead: _Arrivals, num_places: int, max_new_tokens: int
    ) -> float:
        """Until the plan that admits the one behind `ahead`, from the start of the oldest step in flight."""
        prompts = batch.num_prompt_left + ahead.count * ahead.num_prompt_tokens
        num_steps = float(bool(batch.num_rows))
        if ahead.count >= num_places:
            num_steps = self._steps_until_place(batch, ahead.count, num_places, max_new_tokens)
        seconds = max(num_steps, prompts / pace.room) * pace.seconds
        seconds += ahead.count * self._prompt_seconds(pace, ahead.num_prompt_tokens, 0)
        return seconds + self._prompt_seconds(pace, batch.num_prompt_left, 0)

    def _steps_until_place(
        self, batch: _Batch, num_ahead: int, num_places: int, max_new_tokens: int
    ) -> float:
        """Steps until as many rows have ended as there are entries ahead without a place, and one more."""
        turnover, at_once = 2 * (DEPTH - 1), self._tokens_per_step
        lengths = cycle(self._lengths.recent or (max_new_tokens,))
        quantile_left, hazards = self._lengths.quantile_left, self._hazards
        ends = [
            2 * DEPTH
            - 1
            + quantile_left(
                row.num_tokens_planned, row.max_tokens, hazards[row.slot % len(hazards)]
            )
            / at_once
            for row in batch.rows
        ]
        ends.extend(turnover + next(lengths) / at_once for _ in range(min(num_places, num_ahead)))
        if not ends:
            return 0.0
        heapify(ends)
        num_ends = num_ahead - num_places
        for length in islice(lengths, min(num_ends, _MOST_ENDS)):
            heapreplace(ends, ends[0] + length / at_once + turnover)
        mean = self._mean_steps(max_new_tokens) + turnover
        return ends[0] + max(0, num_ends - _MOST_ENDS) * mean / len(ends)

    def _mean_steps(self, unknown: int) -> float:
        return self._mean_length(unknown) / self._tokens_per_step

    def _mean_length(self, unknown: int) -> float:
        recent = self._lengths.recent
        return sum(recent) / len(recent) if recent else float(unknown)

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
