"""One step on the device: change the batch, guess, run the model, sample, bring the tokens to the host."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from millrace_shard.arrays import Ints, no_ints
from millrace_shard.batch.batch import Batch
from millrace_shard.batch.draft_tokens import DraftTokens
from millrace_shard.batch.pending_verification import PendingVerification
from millrace_shard.batch.sequence import Sequence
from millrace_shard.batch.step import BatchChange, Forward
from millrace_shard.batch.step_layout import StepLayout, StepRows, WideRows
from millrace_shard.batch.step_tokens import StepTokens, expected
from millrace_shard.device.stopwatch import Stopwatch
from millrace_shard.kernels.base import Kernels, LayerCache
from millrace_shard.model_runner.decode_graphs import DecodeGraphs
from millrace_shard.model_runner.launched_step import LaunchedStep
from millrace_shard.model_runner.prompt_logprobs import PromptLogprobs, prompt_logprobs
from millrace_shard.models.interface import CausalModel
from millrace_shard.sampling.sampler import Sampled, Sampler
from millrace_shard.sampling.watermark import Watermark
from millrace_shard.speculation.proposer import Proposer
from millrace_shard.structured_output.manager import GrammarManager
from millrace_shard.structured_output.step_masks import Guidance, Rulings

logger = logging.getLogger(__name__)


def void() -> None:
    """Nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingFeatures:
    """What has a say in the choice of tokens beside the model, or speeds it up."""

    guides: GrammarManager | None = None
    """Without, no sequence may have a grammar."""
    proposer: Proposer | None = None
    """Without, nothing is guessed."""
    watermark: Watermark | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What a step is to compute."""

    prepared: StepLayout | None
    """None where there is nothing to compute."""
    guesses: DraftTokens
    wide: WideRows = field(default_factory=WideRows)
    invalid_slots: Ints = field(default_factory=no_ints)


class StepRunner:
    """The model with its KV cache and batch."""

    def __init__(
        self,
        model: CausalModel,
        kernels: Kernels,
        cache: Many[LayerCache],
        batch: Batch,
        graphs: DecodeGraphs | None = None,
        aids: DecodingFeatures | None = None,
    ) -> None:
        """`graphs` over the same cache and batch run the steps of decodes alone that they have room for."""
        aids = aids or DecodingFeatures()
        self._model = model
        self._kernels = kernels
        self._cache = cache
        self._graphs = graphs
        self._sampler = Sampler(batch.history.table, model.info.eos_token_ids, aids.watermark)
        self._biases = self._sampler.biases
        self._guidance = Guidance(aids.guides)
        self._proposer = aids.proposer
        self._unsettled = PendingVerification(batch.limits.max_batch_size)
        self._no_guesses = DraftTokens.none(0, batch.device)
        self.batch = batch

    def clear(self) -> None:
        """Drop every sequence."""
        self.batch.clear()
        self._guidance.clear()
        self._biases.clear()
        self._unsettled.clear()

    def drop(self, slots: Ints) -> None:
        """Drop the sequences in `slots`. Raises StepInvalid."""
        self.batch.drop(slots)
        self._guidance.drop(slots)
        self._biases.drop(slots)

    def launch(self, step: Forward, when_laid_out: Callable[[], None] = void) -> LaunchedStep:
        """Submit a step; `when_laid_out` is called before its forward pass, if there is one, and before guessing.

        Raises StepInvalid, or whatever the device raises; sequences have not advanced then.

        Waits for tokens of earlier steps only where a row had guesses in them, or is to have some now that cannot be
        made without these tokens.
        """
        watch = Stopwatch(self.batch.device)
        if step.change:
            self._change(step.change)
        if step.change.admitted:
            watch.concat_ns = watch.since_start_ns()
        plan = self._repeat(step)
        if plan is None:
            if step.draft_tokens.any():
                # Guessing takes time, of which the step before is neither to wait for nor to be blamed for any.
                when_laid_out()
            plan = self._plan(step)
        prepared, guesses = plan.prepared, plan.guesses
        if prepared is None:
            watch.mark()
            return LaunchedStep(watch, wide=plan.wide, invalid_slots=plan.invalid_slots)
        pending = self._guidance.start(prepared, guesses)
        logits, prompts = self._forward(prepared, when_laid_out)
        watch.mark()
        rulings = None if pending is None else pending.result(self.batch.device)
        sampled = self._sample(logits, prepared, rulings) if len(prepared.sampled) else None
        tokens = None
        if sampled is not None:
            tokens = self._tokens_of(prepared, sampled, watch, guesses, rulings)
        launched = LaunchedStep(
            watch,
            wide=plan.wide,
            tokens=tokens,
            tops=sampled.top if sampled else (),
            prompts=prompts,
            unfinished=self._check_unfinished(logits, prepared),
            invalid_slots=plan.invalid_slots,
        )
        self._commit(prepared, tokens)
        return launched

    def _repeat(self, step: Forward) -> _Plan | None:
        """Most steps are the one before, one position on."""
        if self._proposer is not None:
            if not self.batch.sequences.may_repeat(step.decode_slots):
                return None
            self._settle(step)
            step = self._without_vain_drafts(step, self._proposer)
        repeated = self.batch.sequences.repeat(step)
        if repeated is None:
            return None
        prepared, wide = repeated
        return _Plan(prepared=prepared, guesses=self._nothing(len(prepared.slots)), wide=wide)

    def _without_vain_drafts(self, step: Forward, proposer: Proposer) -> Forward:
        """`step` without its allowance of guesses where nobody is going to have any."""
        if not len(step.draft_tokens):
            return step
        _, most_guesses = step.allowances()
        slots = step.decode_slots[most_guesses > 0]
        if proposer.has_guesses(slots, self.batch.sequences.num_tokens(slots)):
            return step
        return replace(step, draft_tokens=no_ints())

    def _plan(self, step: Forward) -> _Plan:
        step, invalid_slots = self.batch.without_invalid(step)
        self._settle(step)
        if self._proposer is not None:
            step = self._without_vain_drafts(step, self._proposer)
        rows = self.batch.sequences.rows(step)
        guesses = self._propose(rows)
        prepared = self.batch.sequences.prepare(rows, guesses.counts) if len(rows.slots) else None
        return _Plan(
            prepared=prepared, guesses=guesses, wide=rows.wide, invalid_slots=invalid_slots
        )

    def _change(self, change: BatchChange) -> None:
        blocks = self.batch.apply(change)
        self._guidance.drop(change.dropped_slots)
        self._biases.drop(change.dropped_slots)
        for sequence in change.admitted:
            if self.batch.slots.is_valid(sequence.slot):
                self._admit(sequence)
        self._clear_blocks(blocks)

    def _admit(self, sequence: Sequence) -> None:
        self._biases.put(sequence.slot, sequence.parameters.bias)
        if not self._guidance.admit(sequence):
            logger.error("a sequence has a grammar, which none may have here, and fails alone")
            self._fail(np.array([sequence.slot]))
        if self._proposer is not None:
            self._proposer.admit(sequence)

    def _fail(self, slots: Ints) -> None:
        """The sequences in `slots` fail, alone, in the next step that has them sample."""
        ones = torch.ones(len(slots), dtype=torch.bool, device=self.batch.device)
        self.batch.failed.add(slots, ones)

    def _settle(self, step: Forward) -> None:
        """Look at the tokens of earlier steps, as many as this one depends on, and of all that are done."""
        reads = self._proposer is not None and self._proposer.reads_tokens
        drafting = step.decode_slots[step.allowances()[1] > 0] if reads else no_ints()
        for tokens in self._unsettled.due(step.decode_slots, drafting):
            self._count(tokens)
            if self._proposer is not None and reads:
                self._read(tokens, self._proposer)

    def _count(self, tokens: StepTokens) -> None:
        rows = tokens.awaited
        slots, admissions = tokens.prepared.yield_slots[rows], tokens.prepared.admissions[rows]
        # A row that failed yields nothing, and says so again in whatever step names it next.
        there = self.batch.sequences.settle(
            slots, admissions, np.maximum(tokens.emitted.counts[rows], 1)
        )
        if self._proposer is not None:
            self._proposer.settle(slots[there], self.batch.sequences.num_computed(slots[there]))

    def _read(self, tokens: StepTokens, proposer: Proposer) -> None:
        prepared, emitted = tokens.prepared, tokens.emitted
        there = self.batch.slots.hold(prepared.yield_slots, prepared.admissions)[emitted.rows]
        slots = prepared.yield_slots[emitted.rows]
        proposer.read(slots[there], emitted.positions[there], emitted.ids[there])

    def _propose(self, rows: StepRows) -> DraftTokens:
        if self._proposer is None or not (rows.num_chunks or rows.most_guesses.any()):
            return self._nothing(len(rows.slots))
        guesses = self._proposer.propose(rows)
        if len(guesses):
            self.batch.history.write(*guesses.places(rows.slots, rows.num_tokens), guesses.ids)
        return guesses

    def _nothing(self, num_rows: int) -> DraftTokens:
        """No guesses."""
        if len(self._no_guesses.counts) != num_rows:
            self._no_guesses = DraftTokens.none(num_rows, self.batch.device)
        return self._no_guesses

    def _forward(
        self, prepared: StepLayout, when_laid_out: Callable[[], None]
    ) -> tuple[Tensor, PromptLogprobs | None]:
        """Logits of `prepared.logit_rows`, and the scores of prompts that want any."""
        graphs = self._graphs
        if graphs is not None and prepared.is_plain and graphs.fits(len(prepared.slots)):
            when_laid_out()
            return graphs.logits(prepared.slots, prepared.starts), None
        if prepared.is_plain:
            decodes = self.batch.ragged_decodes(prepared.slots, prepared.starts)
            when_laid_out()
            return self._model.forward(decodes, self._cache), None
        scores = len(prepared.prompt_rows) > 0
        ragged = self.batch.ragged(
            prepared.slots,
            prepared.starts,
            prepared.counts,
            prepared.state_rows if scores else prepared.logit_rows,
        )
        when_laid_out()
        if not scores:
            return self._model.forward(ragged, self._cache), None
        states = self._model.states(ragged, self._cache)
        logits = self._model.logits(states[self.batch.to_device(prepared.logit_states)])
        return logits, prompt_logprobs(states, self._model, prepared, self.batch)

    def _clear_blocks(self, blocks: Ints) -> None:
        if not len(blocks):
            return
        index = self.batch.to_device(blocks)
        for layer in self._cache:
            self._kernels.zero_blocks(layer, index)
        if self._proposer is not None:
            self._proposer.clear_blocks(index)

    def _check_unfinished(self, logits: Tensor, prepared: StepLayout) -> tuple[Ints, Tensor] | None:
        """Slots with more to compute, and which are not finite: the router may share their blocks from now on."""
        if not len(prepared.unfinished):
            return None
        failed = ~logits[len(prepared.sampled) :].amax(dim=-1).isfinite()
        self.batch.failed.add(prepared.unfinished, failed)
        return prepared.unfinished, failed

    def _sample(self, logits: Tensor, prepared: StepLayout, rulings: Rulings | None) -> Sampled:
        masks = None if rulings is None else rulings.masks
        sampled = self._sampler.sample(logits[: len(prepared.sampled)], prepared.sampling, masks)
        if rulings is not None and rulings.failed:
            self._fail(np.array(list(rulings.failed), dtype=np.int64))
        failed = self.batch.put(prepared, sampled.ids, sampled.failed)
        if rulings is not None and rulings.forced:
            self._force(prepared, rulings)
        return replace(sampled, failed=failed)

    def _force(self, prepared: StepLayout, rulings: Rulings) -> None:
        """Have what a grammar forces take the place of what was sampled."""
        rows = np.array(list(rulings.forced), dtype=np.int64)
        lengths = np.array([len(chain) for chain in rulings.forced.values()], dtype=np.int64)
        ids = np.array([id_ for chain in rulings.forced.values() for id_ in chain], dtype=np.int64)
        chains = DraftTokens(counts=lengths, ids=self.batch.to_device(ids))
        ends = (prepared.starts + prepared.counts - prepared.guesses)[prepared.yields[rows]]
        self.batch.history.write(*chains.places(prepared.yield_slots[rows], ends), chains.ids)

    def _tokens_of(
        self,
        prepared: StepLayout,
        sampled: Sampled,
        watch: Stopwatch,
        guesses: DraftTokens,
        rulings: Rulings | None,
    ) -> StepTokens:
        guessed = expected(prepared, guesses.ids) if len(guesses) else None
        forced = {} if rulings is None else rulings.forced
        tokens = StepTokens(prepared, sampled, watch, expected=guessed, forced=forced)
        if rulings is not None:
            tokens.failure_reasons = rulings.failed
        if self._proposer is not None:
            self._proposer.follow(tokens.prepared, sampled.ids, guessed, forced)
        return tokens

    def _commit(self, prepared: StepLayout, tokens: StepTokens | None) -> None:
        if tokens is None:
            self.batch.sequences.commit(prepared, no_ints())
            return
        self.batch.sequences.commit(prepared, tokens.num_known())
        self._guidance.follow(tokens)
        if len(tokens.awaited) or (self._proposer is not None and self._proposer.reads_tokens):
            self._unsettled.add(tokens)
