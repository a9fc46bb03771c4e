"""When a request that arrived now would be served."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from millrace_router.prediction.chunked_course import ChunkedCourse
from millrace_router.prediction.cost import CostModel
from millrace_router.prediction.course import Batch, Newcomer, RunningRow, StepPipeline
from millrace_router.prediction.late_planning import LatePlanning
from millrace_router.prediction.paused_course import PausedCourse
from millrace_router.prediction.prefill_pauses import PauseRule
from millrace_router.prediction.traffic import TrafficStatistics


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds from now."""

    queue_seconds: float
    """Until the plan that admits it."""
    first_token_seconds: float
    finish_seconds: float


class Forecaster:
    """Predicts queue time, first token and end, by playing the batch through, with prompts as the planner treats them.

    They are computed beside decodes, or by a `PauseRule` in steps of their own.
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
        steps_in_flight: int = 2,
        late: LatePlanning | None = None,
        pause_rule: PauseRule | None = None,
    ) -> None:
        self._max_batch_size = max_batch_size
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._reserve_all = reserve_all
        self._experience = TrafficStatistics(max_batch_size=max_batch_size)
        pipeline = StepPipeline(steps_in_flight, late or LatePlanning(cost, most=0.0))
        self._course: ChunkedCourse | PausedCourse
        if pause_rule is None:
            self._course = ChunkedCourse(
                cost,
                self._experience,
                pipeline,
                max_batch_prefill_tokens=max_batch_prefill_tokens,
                block_size=block_size,
                target_inter_token_latency=target_inter_token_latency,
            )
        else:
            self._course = PausedCourse(
                cost,
                self._experience,
                pipeline,
                pause_rule,
                max_batch_prefill_tokens=max_batch_prefill_tokens,
            )

    def finished(
        self, *, num_prompt: int, num_generated: int, max_new_tokens: int, num_cached: int = 0
    ) -> None:
        """Learn from an answer; one whose reader left counts with `max_new_tokens` = `num_generated`."""
        self._experience.finished(
            num_prompt=num_prompt,
            num_generated=num_generated,
            max_new_tokens=max_new_tokens,
            num_cached=num_cached,
        )

    def yielded(self, num_tokens: int, num_rows: int) -> None:
        """Learn from a step in which so many rows that might yield several tokens have yielded so many."""
        self._experience.yielded(num_tokens, num_rows)

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
        batch, experience = self._survey(rows), self._experience
        num_ahead, tokens_ahead = ahead
        own_length = experience.lengths.expected_left(0, max_new_tokens)
        joiner = Newcomer(
            num_ahead=num_ahead,
            prompt_ahead=tokens_ahead / max(1, num_ahead) * experience.computed_share,
            num_prompt_tokens=num_prompt_tokens,
            num_cached=num_cached,
            max_new_tokens=max_new_tokens,
            num_kv_tokens=num_prompt_tokens + own_length / 2,
            num_places=self._num_places(
                batch, num_ahead + 1, tokens_ahead + num_prompt_tokens, max_new_tokens
            ),
            now_in_step=now_in_step,
        )
        course = self._course.foretell(batch, joiner)
        if course is None:
            return None
        first = course.first_token_seconds
        num_steps = max(0.0, own_length - 1) / experience.tokens_per_step
        return Prediction(course.queue_seconds, first, first + num_steps * course.step_seconds)

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
        limit = round(
            self._experience.mean_length(max((row.max_tokens for row in running), default=1))
        )
        prediction = self.predict(
            running,
            ahead=(num_leaving - 1, mean * (num_leaving - 1)),
            num_prompt_tokens=mean,
            max_new_tokens=limit,
            now_in_step=now_in_step,
        )
        return None if prediction is None else prediction.queue_seconds

    def _survey(self, rows: Iterable[RunningRow]) -> Batch:
        running = list(rows)
        num_kv_tokens = sum([row.num_kv_tokens for row in running])
        if self._reserve_all:
            num_kv_tokens += sum([row.max_tokens - row.num_tokens_planned for row in running])
        num_prompt_left = sum(
            [row.num_prompt_left for row in running if not row.num_tokens_planned]
        )
        return Batch(running, len(running), num_kv_tokens, num_prompt_left)

    def _num_places(
        self, batch: Batch, num_joining: int, num_tokens: int, max_new_tokens: int
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
