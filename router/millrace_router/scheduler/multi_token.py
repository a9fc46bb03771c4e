"""Decodes that may fill more than one KV position: their limits, and their results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from millrace_router.prediction.step_load import StepLoad
from millrace_router.scheduler.block_manager import BlockManager, grow
from millrace_router.scheduler.draft_length import DraftPolicy
from millrace_router.scheduler.preemption import LOOKAHEAD
from millrace_router.scheduler.step_plan import Row, StepPlan

_SHARE_RATE = 1 / 16
"""Weight of one step in the mean share of allowed positions that are computed."""


@dataclass(slots=True)
class Progress:
    """The results of a step with multi-token rows."""

    load: StepLoad
    """The load that was computed."""
    advances: list[int] = field(default_factory=list)
    """KV positions that each decode has filled; empty if each has filled one."""
    drafted: int = 0
    """Draft tokens that were verified."""
    accepted: int = 0
    """Draft tokens that were accepted."""
    num_rows: int = 0
    """Multi-token rows that are still running."""
    num_tokens: int = 0
    """New tokens of those rows."""


class MultiTokenRows:
    """Allows decodes more than one position: for tokens that a grammar forces, and for draft tokens.

    The shards decide how many positions a decode fills, and the router sends the next step before their answer. So the
    positions of a row are bounded from above: by those in the last answer, and all that the steps in flight may fill.
    The row owns blocks up to the bound, and each answer lowers the bound. It never exceeds what the row can ever need,
    so no promise of blocks is exceeded. Each step leaves one position for the next step where there is one, so a row
    close to its end does not wait for an answer.
    """

    def __init__(self, blocks: BlockManager, policy: DraftPolicy | None) -> None:
        """Without a policy there are no draft tokens."""
        self.slots: set[int] = set()
        """Slots of the running multi-token rows."""
        self._blocks = blocks
        self._policy = policy
        self._computed_share = 1.0
        """Mean share of the allowed extra positions that were computed."""

    def expected_load(self, load: StepLoad) -> StepLoad:
        """Return the load that a step of the planned `load` is expected to compute, judging by earlier steps."""
        return load.with_extra(round(self._computed_share * load.extra_positions))

    def plan_decodes(self, rows: Collection[Row], plan: StepPlan, *, most: int) -> None:
        """Decode each of `rows` that can, and allow the step up to `most` positions in all.

        Draft tokens give way first. The blocks that rows may need for the next steps are left free.
        """
        multi_token: dict[int, Row] = {}
        context = 0
        for row in rows:
            # Runs for every generated token, so it makes few calls.
            if 0 < row.num_tokens_planned < row.max_tokens:
                if row.is_multi_token and row.num_room <= 0:
                    continue
                row.num_kv_tokens += 1
                if row.num_kv_tokens > row.num_kv_owned and not grow(row, self._blocks, plan.grown):
                    row.num_kv_tokens -= 1
                    continue
                row.num_tokens_planned += 1
                context += row.num_kv_tokens
                if row.is_multi_token:
                    multi_token[len(plan.decodes)] = row
                plan.decodes.append(row.slot)
        plan.multi_token_slots = [row.slot for row in multi_token.values()]
        plan.load.decodes, plan.load.context = len(plan.decodes), context
        most -= len(plan.decodes)
        self._allow_extra(multi_token, plan, most=most, spare=LOOKAHEAD * len(rows))

    def _allow_extra(
        self, multi_token: Mapping[int, Row], plan: StepPlan, *, most: int, spare: int
    ) -> None:
        """Allow rows, by their index in `plan.decodes`, up to `most` extra positions; leave `spare` blocks free."""
        rows = list(multi_token.values())
        extras, left = [], max(0, most)
        for row in rows:
            extra = min(row.entry.max_jump_forward_tokens, left)
            extras.append(extra)
            left -= extra
        drafts: Sequence[int] = [0] * len(rows)
        if self._policy is not None:
            candidates = [(row.entry.acceptance, row.num_kv_tokens) for row in rows]
            drafts = self._policy.lengths(candidates, plan.load)
            for index, length in enumerate(drafts):
                more = min(length - extras[index], left)
                if more > 0:
                    extras[index] += more
                    left -= more
        if not any(extras):
            return
        extras = [
            self._extend(row, extra, plan, spare) if extra else 0
            for row, extra in zip(rows, extras, strict=True)
        ]
        if any(extras):
            plan.decode_tokens = [1] * len(plan.decodes)
            plan.draft_tokens = [0] * len(plan.decodes)
            for index, extra, length in zip(multi_token, extras, drafts, strict=True):
                if extra:
                    plan.multi_position.append(index)
                    plan.decode_tokens[index] += extra
                    plan.draft_tokens[index] = min(length, extra)

    def verify(
        self,
        plan: StepPlan,
        row_of: Callable[[int], Row | None],
        *,
        counts: Iterable[tuple[int, int]],
        computed: Iterable[tuple[int, int, int]],
        failed_slots: Container[int],
    ) -> Progress:
        """Correct the counts of multi-token rows by the answer to `plan`, before its tokens are delivered.

        `counts` and `computed` are as in `step_result.StepResult`. The caller adds the advances to the rows' positions.

        Raises:
            ValueError: a row has filled no position, or more than it was allowed.

        """
        num_tokens, progress = dict(counts), Progress(plan.load)
        for running in filter(None, map(row_of, plan.multi_token_slots)):
            num_yielded = num_tokens.get(running.slot, 0)
            running.num_tokens_planned += num_yielded - 1
            progress.num_rows += 1
            progress.num_tokens += num_yielded
        if not plan.multi_position:
            return progress
        answers, num_extra = {slot: answer for slot, *answer in computed}, 0
        progress.advances = [1] * len(plan.decodes)
        for index in plan.multi_position:
            slot, allowed = plan.decodes[index], plan.decode_tokens[index]
            positions, drafted = answers.get(slot, [-1, 0])
            progress.drafted += drafted
            num_extra += drafted
            if (row := row_of(slot)) is None:
                continue
            advance = 0
            if slot not in failed_slots:
                advance, pending = _advance(row, allowed, positions)
                accepted = advance - pending
                progress.accepted += accepted
                num_extra += pending - 1
                # After tokens that a grammar forced, the draft tokens could not be accepted.
                drafts = plan.draft_tokens[index]
                if drafts and num_tokens.get(slot) == 1 + accepted:
                    self._learn(row, allowed=drafts, drafted=drafted, accepted=accepted)
            row.num_kv_tokens -= allowed - advance
            progress.advances[index] = advance
        progress.load = plan.load.with_extra(num_extra)
        share = num_extra / plan.load.extra_positions
        self._computed_share += _SHARE_RATE * (share - self._computed_share)
        return progress

    def step_took(self, progress: Progress, seconds: float) -> None:
        """Learn the duration of the step with these results."""
        if self._policy is not None:
            self._policy.step_took(progress.load, seconds, accepted=progress.accepted)

    def _learn(self, row: Row, *, allowed: int, drafted: int, accepted: int) -> None:
        if self._policy is not None:
            history = row.entry.acceptance
            self._policy.observe(history, allowed=allowed, drafted=drafted, accepted=accepted)

    def _extend(self, row: Row, extra: int, plan: StepPlan, spare: int) -> int:
        """Allow `row` up to `extra` more positions, as far as it has room; return how many."""
        extra = min(extra, row.num_room - 1)
        lacking = row.num_kv_tokens + extra - row.num_kv_owned
        if lacking > 0 and not row.promised:
            blocks = self._blocks
            if blocks.num_available - blocks.count(lacking) < spare:
                extra -= lacking
        if self._blocks.windows:
            extra = min(extra, self._blocks.window_room(row.slot) - row.num_kv_tokens)
        if extra <= 0:
            return 0
        plan.load.extra_positions += extra
        plan.load.context += extra * row.num_kv_tokens + extra * (extra + 1) // 2
        row.num_kv_tokens += extra
        if row.num_kv_tokens > row.num_kv_owned:
            grow(row, self._blocks, plan.grown)
        return extra


def _advance(row: Row, allowed: int, positions: int) -> tuple[int, int]:
    """Return the number of positions that `row` has filled, and how many of them are not draft tokens.

    A shard may postpone all but one of the forced tokens where they would make the step longer for all rows.
    """
    advance = positions - row.num_computed
    if not 1 <= advance <= allowed:
        raise ValueError(f"a shard filled {advance} positions where 1 to {allowed} were allowed")
    return advance, min(row.entry.num_inputs - row.num_computed, advance)
