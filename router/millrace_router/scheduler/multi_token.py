"""Decodes of more than one KV position: what each may fill, and what it has filled once that is known."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from millrace_router.prediction.step_load import StepLoad
from millrace_router.scheduler.block_manager import BlockManager
from millrace_router.scheduler.draft_length import LengthPolicy
from millrace_router.scheduler.preemption import LOOKAHEAD
from millrace_router.scheduler.row import Row
from millrace_router.scheduler.step_plan import StepPlan

_SHARE_RATE = 1 / 16
"""How far one step moves what is known of the positions that are used."""


@dataclass(slots=True)
class Progress:
    """What became of a step with flexible rows."""

    load: StepLoad
    """Of what it has really computed."""
    advances: list[int] = field(default_factory=list)
    """KV positions that each of its decodes has filled; empty: one each."""
    drafted: int = 0
    """Guesses."""
    accepted: int = 0
    """Those that were right."""
    num_rows: int = 0
    """Flexible rows that have not ended and may have yielded tokens."""
    num_tokens: int = 0
    """What they have yielded."""


def grow(row: Row, blocks: BlockManager, plan: StepPlan) -> bool:
    """Give `row` the blocks for what is planned; whether they were there."""
    grown = blocks.grow(row.slot, row.num_kv_tokens)
    if grown is None:
        return False
    plan.grown += [(row.slot, block) for block in grown]
    row.num_kv_owned += len(grown) * blocks.block_size
    return True


class MultiTokenRows:
    """Allows decodes more than the one position that each needs: for tokens a grammar has forced, and for guesses.

    The shards decide what a decode computes, and the next step is sent before they have said so. Hence the positions
    of a row are bounded from above: by those that the last answer told, and all that steps in flight may fill. Blocks
    are there up to the bound, and each answer lowers it. The bound never exceeds what the row can ever need, so that
    no promise of blocks is exceeded; and because each allowance leaves a position for the next step where there is
    one, a row close to its end waits for no answer.
    """

    def __init__(self, blocks: BlockManager, policy: LengthPolicy | None) -> None:
        """Without a policy nothing is guessed."""
        self._blocks = blocks
        self._policy = policy
        self._share = 1.0
        """Extra positions that were computed, of those allowed: chains and guesses may be few."""

    def expected(self, load: StepLoad) -> StepLoad:
        """What a step of the planned `load` is going to compute, as steps went before."""
        return load.with_extra(round(self._share * load.extra_positions))

    def plan_decodes(self, rows: Collection[Row], plan: StepPlan, *, most: int) -> None:
        """Let those of `rows` decode that can, at a position each, and allow them more up to `most` in all.

        If those are too few, guesses go without first. Blocks that rows may need for the next steps are left to them.
        """
        flexible: dict[int, Row] = {}
        context = 0
        for row in rows:
            # Runs for every token there is, hence few calls.
            if 0 < row.num_tokens_planned < row.max_tokens:
                if row.is_flexible and row.num_room <= 0:
                    continue
                row.num_kv_tokens += 1
                if row.num_kv_tokens > row.num_kv_owned and not grow(row, self._blocks, plan):
                    row.num_kv_tokens -= 1
                    continue
                row.num_tokens_planned += 1
                context += row.num_kv_tokens
                if row.is_flexible:
                    flexible[len(plan.decodes)] = row
                plan.decodes.append(row.slot)
        plan.flexible = [row.slot for row in flexible.values()]
        plan.load.decodes, plan.load.context = len(plan.decodes), context
        self._widen(flexible, plan, most=most - len(plan.decodes), spare=LOOKAHEAD * len(rows))

    def _widen(self, flexible: Mapping[int, Row], plan: StepPlan, *, most: int, spare: int) -> None:
        """Allow rows, by their place among the decodes, up to `most` further positions, and leave `spare` blocks."""
        rows = list(flexible.values())
        extras, left = [], max(0, most)
        for row in rows:
            extra = min(row.entry.max_jump_forward_tokens, left)
            extras.append(extra)
            left -= extra
        guesses: Sequence[int] = [0] * len(rows)
        if self._policy is not None:
            known = [(row.entry.acceptance, row.num_kv_tokens) for row in rows]
            guesses = self._policy.lengths(known, plan.load)
            for place, length in enumerate(guesses):
                more = min(length - extras[place], left)
                if more > 0:
                    extras[place] += more
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
            for place, extra, length in zip(flexible, extras, guesses, strict=True):
                if extra:
                    plan.wide.append(place)
                    plan.decode_tokens[place] += extra
                    plan.draft_tokens[place] = min(length, extra)

    def settle(
        self,
        plan: StepPlan,
        row_of: Callable[[int], Row | None],
        *,
        counts: Iterable[tuple[int, int]],
        computed: Iterable[tuple[int, int, int]],
        failed_slots: Container[int],
    ) -> Progress:
        """Correct what was assumed of flexible rows by what the answer to `plan` says, before its tokens are delivered.

        `counts` and `computed` are as in `wire.StepResult`. The caller adds what rows have advanced by.

        Raises:
            ValueError: a row has filled other positions than it was allowed.

        """
        num_tokens, progress = dict(counts), Progress(plan.load)
        for slot in plan.flexible:
            if (row := row_of(slot)) is not None:
                found = num_tokens.get(slot, 0)
                row.num_tokens_planned += found - 1
                progress.num_rows += 1
                progress.num_tokens += found
        if not plan.wide:
            return progress
        answers = {slot: (positions, drafted) for slot, positions, drafted in computed}
        num_extra = 0
        progress.advances = [1] * len(plan.decodes)
        for place in plan.wide:
            slot, allowed, guesses = (
                plan.decodes[place],
                plan.decode_tokens[place],
                plan.draft_tokens[place],
            )
            positions, drafted = answers.get(slot, (-1, 0))
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
                # After a chain that a grammar forced, guesses were no use, whatever they were.
                if guesses and num_tokens.get(slot) == 1 + accepted:
                    self._learn(row, allowed=guesses, drafted=drafted, accepted=accepted)
            row.num_kv_tokens -= allowed - advance
            progress.advances[place] = advance
        progress.load = plan.load.with_extra(num_extra)
        self._share += _SHARE_RATE * (num_extra / plan.load.extra_positions - self._share)
        return progress

    def paid(self, progress: Progress, seconds: float) -> None:
        """Take note of what a step has taken."""
        if self._policy is not None:
            self._policy.paid(progress.load, seconds, accepted=progress.accepted)

    def _learn(self, row: Row, *, allowed: int, drafted: int, accepted: int) -> None:
        if self._policy is not None:
            history = row.entry.acceptance
            self._policy.observe(history, allowed=allowed, drafted=drafted, accepted=accepted)

    def _extend(self, row: Row, extra: int, plan: StepPlan, spare: int) -> int:
        """Allow `row` up to `extra` further positions, as far as it has room; how many."""
        extra = min(extra, row.num_room - 1)
        lacking = row.num_kv_tokens + extra - row.num_kv_owned
        if lacking > 0 and not row.promised:
            blocks = self._blocks
            if blocks.num_available - blocks.count(lacking) < spare:
                extra -= lacking
        if extra <= 0:
            return 0
        plan.load.extra_positions += extra
        plan.load.context += extra * row.num_kv_tokens + extra * (extra + 1) // 2
        row.num_kv_tokens += extra
        if row.num_kv_tokens > row.num_kv_owned:
            grow(row, self._blocks, plan)
        return extra


def _advance(row: Row, allowed: int, positions: int) -> tuple[int, int]:
    """How many positions `row` has filled, and how many of those are not guesses.

    A shard lets tokens of a chain wait where they would lengthen the step for everybody, but for one.
    """
    advance = positions - row.num_computed
    if not 1 <= advance <= allowed:
        raise ValueError(f"a shard filled {advance} positions where 1 to {allowed} were to be")
    return advance, min(row.entry.num_inputs - row.num_computed, advance)
