"""The course of a request whose prompt pauses the decodes of others."""

from __future__ import annotations

from millrace_router.prediction.cost import CostModel
from millrace_router.prediction.course import Batch, Course, Newcomer, StepPipeline
from millrace_router.prediction.prefill_pauses import PausedBatch, PauseRule, Pauses
from millrace_router.prediction.step_load import StepLoad
from millrace_router.prediction.traffic import TrafficStatistics


class PausedCourse:
    """Plays the rule through by which prompts pause decodes, until the joiner's own pause, and prices the steps.

    How the last steps went is seen from the rows: those that joined last have as many tokens as steps were planned
    since. Requests keep coming as they must for the batch to stay as large as it is (Little's law).
    """

    def __init__(
        self,
        cost: CostModel,
        experience: TrafficStatistics,
        pipeline: StepPipeline,
        rule: PauseRule,
        *,
        max_batch_prefill_tokens: int,
    ) -> None:
        self._cost = cost
        self._experience = experience
        self._pipeline = pipeline
        self._rule = rule
        self._max_batch_prefill_tokens = max_batch_prefill_tokens

    def foretell(self, batch: Batch, joiner: Newcomer) -> Course | None:
        """None while the cost model knows nothing."""
        if self._cost.seconds(StepLoad(decodes=1)) is None:
            return None
        pauses = self._pauses(batch, joiner)
        begin = self._prefill_seconds(1, batch.num_prompt_left)
        begin += self._prefill_seconds(
            pauses.num_joined, pauses.num_joined * joiner.prompt_ahead, pauses.num_pauses
        )
        begin += pauses.num_decodes * self._decode_seconds(batch, joiner, pauses.mean_rows)
        queue = begin
        if batch.num_rows:
            until_next, last = self._in_flight(batch, joiner)
            begin += until_next
            if pauses.num_decodes:
                last = self._decode_seconds(batch, joiner, pauses.mean_rows)
            # A plan is made late in the step before its own.
            queue = max(0.0, begin - (last - self._pipeline.open_part(last)))
        first = begin + self._own_prefill_seconds(joiner, pauses)
        return Course(queue, first, self._step_seconds(batch, joiner))

    def _pauses(self, batch: Batch, joiner: Newcomer) -> Pauses:
        since, owes_decode = self._since_prefill(batch)
        num_ahead, unknown = joiner.num_ahead, joiner.max_new_tokens
        prompt = (num_ahead * joiner.prompt_ahead + joiner.num_left) / (num_ahead + 1)
        experience = self._experience
        # With two steps in flight the end of a row is known one step late.
        late = self._pipeline.depth - 1
        return PausedBatch(
            rule=self._rule,
            ends=[late + left for left in experience.steps_left(batch.rows)],
            lengths=experience.steps_to_come(unknown),
            num_free=joiner.num_places,
            most_joining=max(1, int(self._max_batch_prefill_tokens / prompt)),
            arrivals_per_decode=batch.num_rows / (experience.mean_steps(unknown) + late),
            since=since + owes_decode,
            num_decodes=float(owes_decode),
            row_decodes=float(owes_decode * batch.num_rows),
        ).until_joined(num_ahead)

    def _since_prefill(self, batch: Batch) -> tuple[float, bool]:
        """Decodes planned since the last prefill, which counts as one, and whether that paused others."""
        if batch.num_prompt_left:
            # A replay longer than a step goes on, whatever waits.
            return 1.0, batch.num_rows > 1
        planned = [row.num_tokens_planned for row in batch.rows]
        least = min(planned, default=1)
        since = 1.0 + (least - 1) / self._experience.tokens_per_step
        return since, least == 1 and max(planned, default=1) > 1

    def _in_flight(self, batch: Batch, joiner: Newcomer) -> tuple[float, float]:
        """Seconds until the step that is planned next begins, and of the step before it.

        One step is in flight while that is open for who arrives, and two from then on.
        """
        decode, now = self._decode_seconds(batch, joiner, batch.num_rows), joiner.now_in_step
        since, _ = self._since_prefill(batch)
        steps = [decode] if now < self._pipeline.open_part(decode) else [decode, decode]
        if since <= 2.0:
            prefill = self._last_prefill_seconds(batch)
            is_open = now < self._pipeline.open_part(prefill)
            if since == 1.0:
                steps = [prefill] if is_open else [decode, prefill]
            elif not is_open:
                steps = [prefill, decode]
        return max(0.0, steps[0] - now) + sum(steps[1:]), steps[-1]

    def _last_prefill_seconds(self, batch: Batch) -> float:
        least = min(row.num_tokens_planned for row in batch.rows)
        prompts = [row.num_kv_tokens for row in batch.rows if row.num_tokens_planned == least]
        return self._prefill_seconds(len(prompts), sum(prompts) * self._experience.computed_share)

    def _own_prefill_seconds(self, joiner: Newcomer, pauses: Pauses) -> float:
        """Of the step that computes the joiner's prompt, beside those of others before and after it."""
        num_others = pauses.num_joining - 1
        num_before = min(num_others, joiner.num_ahead - pauses.num_joined)
        others = num_before * joiner.prompt_ahead
        others += (num_others - num_before) * self._experience.mean_prompt
        return self._prefill_seconds(pauses.num_joining, joiner.num_left + others)

    def _step_seconds(self, batch: Batch, joiner: Newcomer) -> float:
        """Of a step while load goes on as it is: for each row that ends another one brings its prompt."""
        size = max(1, batch.num_rows + min(joiner.num_ahead + 1, joiner.num_places))
        seconds = self._decode_seconds(batch, joiner, size)
        if not batch.num_rows or size == 1:
            return seconds
        replaced = (size - 1) / self._experience.mean_steps(joiner.max_new_tokens)
        # Decodes from one pause to the next.
        enough = max(1, self._rule.least(size)) / replaced
        period = max(1.0, min(enough, self._rule.max_waiting_tokens))
        joining = period * replaced
        pause = self._prefill_seconds(joining, joining * self._experience.mean_prompt)
        return seconds + pause / period

    def _decode_seconds(self, batch: Batch, joiner: Newcomer, num_rows: float) -> float:
        size = max(1, batch.num_rows, round(num_rows))
        context = batch.context(size, joiner.num_kv_tokens) * num_rows / size
        load = StepLoad(decodes=round(num_rows), context=round(context))
        return self._cost.seconds(load) or 0.0

    def _prefill_seconds(
        self, num_prompts: float, num_tokens: float, num_steps: float = 1
    ) -> float:
        """Of `num_steps` that compute so many prompts, of so many tokens in all."""
        if num_tokens <= 0 or num_prompts <= 0 or num_steps <= 0:
            return 0.0
        pairs = num_tokens * (num_tokens / num_prompts + 1) / 2
        load = StepLoad(
            prefill_tokens=max(1, round(num_tokens / num_steps)),
            prefill_pairs=round(pairs / num_steps),
            num_chunks=max(1, round(num_prompts / num_steps)),
        )
        return num_steps * (self._cost.seconds(load) or 0.0)
