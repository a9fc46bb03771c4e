"""Runs a step on the device: change the batch, draft, run the model, sample, copy the tokens to the host."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from millrace_shard.arrays import Ints, no_ints
from millrace_shard.batch.batch import Batch
from millrace_shard.batch.sequence import Sequence
from millrace_shard.batch.step import BatchChange, Encode, Forward
from millrace_shard.batch.step_layout import DraftTokens, MultiTokenRows, StepLayout
from millrace_shard.batch.step_tokens import StepTokens, expected
from millrace_shard.device.stopwatch import DeviceProgress, Stopwatch
from millrace_shard.errors import StepInvalid
from millrace_shard.kernels.base import Kernels, LayerCache
from millrace_shard.kernels.kv_store import KEY_BYTES, KVStore
from millrace_shard.model_runner.decode_graphs import DecodeGraphs
from millrace_shard.model_runner.launched_step import (
    LaunchedStep,
    PooledRows,
    PromptLogprobs,
    pooled_rows,
    prompt_logprobs,
)
from millrace_shard.model_runner.step_inputs import StepInputs, upload_inputs
from millrace_shard.model_runner.step_planner import StepPlan, StepPlanner
from millrace_shard.model_runner.token_graphs import Choice
from millrace_shard.models.interface import CausalModel
from millrace_shard.sampling.sampler import Sampled, Sampler
from millrace_shard.sampling.sampling_rows import SamplingRows
from millrace_shard.sampling.watermark import Watermark
from millrace_shard.speculation.proposer import Proposer
from millrace_shard.structured_output.manager import GrammarConstraints, GrammarManager, StepMasks
from millrace_shard.vision.encoder import ImageEncoder

logger = logging.getLogger(__name__)


def noop() -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingFeatures:
    """Optional parts of decoding."""

    grammars: GrammarManager | None = None
    """None: a sequence with a grammar fails."""
    proposer: Proposer | None = None
    """None: there are no draft tokens."""
    watermark: Watermark | None = None
    kv_store: KVStore | None = None
    """The memory of the KV cache, if that outlives the process."""
    images: ImageEncoder | None = None
    """None: the model reads no images."""


class StepRunner:
    """Runs the steps of a batch through the model, its KV cache and the sampler."""

    def __init__(
        self,
        model: CausalModel,
        kernels: Kernels,
        cache: Many[LayerCache],
        batch: Batch,
        graphs: DecodeGraphs | None = None,
        features: DecodingFeatures | None = None,
        *,
        dtype: torch.dtype,
    ) -> None:
        """`graphs` over the same cache and batch run the plain steps that fit into them; `dtype` is the model's."""
        features = features or DecodingFeatures()
        self._dtype = dtype
        self._model = model
        self._kernels = kernels
        self._cache = cache
        self._graphs = graphs
        self._sampler = Sampler(
            batch.token_table.table,
            model.info.eos_token_ids,
            features.watermark,
            kernels.sampling,
        )
        self._step_masks = StepMasks(features.grammars)
        self._proposer = features.proposer
        self._planner = StepPlanner(batch, features.proposer)
        self._progress = DeviceProgress()
        self.times_device = False
        """Whether steps are timed on the device rather than by the host's clock; see Stopwatch."""
        self._uncleared = no_ints()
        """Blocks to clear before the next forward pass."""
        self._kv_store = features.kv_store
        if self._kv_store is not None:
            batch.states.keep_in(self._kv_store, sum(batch.limits.group_sizes))
        self.images = features.images
        self._request_ids: dict[int, int] = {}
        """The request of the last sequence in each slot."""
        self.batch = batch

    def clear(self) -> None:
        self.batch.clear()
        self._step_masks.clear()
        self._sampler.clear()
        self._planner.clear()
        self._uncleared = no_ints()
        if self.images is not None:
            self.images.clear()

    def drop(self, slots: Ints) -> None:
        """Drop the sequences in `slots`. Raises StepInvalid."""
        self.batch.drop(slots)
        self._step_masks.drop(slots)
        self._sampler.drop(slots)

    def launch(self, step: Forward, on_ready: Callable[[], None] = noop) -> LaunchedStep:
        """Submit a step; calls `on_ready` before the forward pass, if there is one, and before drafting.

        Waits for the tokens of earlier steps only if a row has unverified draft tokens in them, or if the proposer
        needs these tokens for new drafts.

        Raises StepInvalid, or any error of the device; the sequences have not advanced then.
        """
        watch = Stopwatch(self.batch.device, self._progress, by_device=self.times_device)
        if step.change:
            self._change(step.change)
        if len(step.saves.slots):
            self.batch.states.save(step.saves)
        if step.change.admitted:
            watch.concat_ns = watch.since_start_ns()
        plan = self._planner.plan(step, on_ready)
        layout = plan.layout
        if layout is None:
            watch.mark()
            return LaunchedStep(
                watch, multi_token=plan.multi_token, invalid_slots=plan.invalid_slots
            )
        return self._launch(plan, layout, watch, on_ready)

    def encode(self, step: Encode) -> LaunchedStep:
        """Submit the computation of features. Raises StepInvalid, or any error of the device."""
        watch = Stopwatch(self.batch.device, self._progress, by_device=self.times_device)
        if step.change:
            self._change(step.change)
        if self.images is None:
            raise StepInvalid("the model reads no images")
        encoded = self.images.encode(step.image_slots, step.units, step.layers)
        watch.mark()
        return LaunchedStep(
            watch, multi_token=MultiTokenRows(), invalid_slots=no_ints(), encoded=encoded
        )

    def _launch(
        self, plan: StepPlan, layout: StepLayout, watch: Stopwatch, on_ready: Callable[[], None]
    ) -> LaunchedStep:
        pending = self._step_masks.start(layout, plan.drafts)
        uncleared = self.batch.blocks.by_group(self._uncleared)
        inputs = upload_inputs(self.batch, layout, uncleared, self._graphs)
        self._uncleared = no_ints()
        self._clear_blocks(inputs.cleared)
        on_ready()
        logits, prompts, pooled = self._forward(layout, inputs)
        watch.mark()
        constraints = None if pending is None else pending.result(self.batch.device)
        sampled = None
        if len(layout.sampled):
            sampled = self._sample_by_graph(inputs, constraints) or self._sample(
                logits, layout, inputs.rows, constraints
            )
        tokens = None
        if sampled is not None:
            tokens = self._tokens_of(layout, sampled, watch, plan.drafts, constraints)
        if self._proposer is not None:
            self._proposer.advance(layout, inputs.ragged)
        launched = LaunchedStep(
            watch,
            multi_token=plan.multi_token,
            tokens=tokens,
            tops=sampled.top if sampled else (),
            prompts=prompts,
            pooled=pooled,
            unfinished=self._check_unfinished(logits, layout),
            invalid_slots=plan.invalid_slots,
        )
        self._commit(layout, tokens)
        return launched

    def _change(self, change: BatchChange) -> None:
        blocks, rows = self.batch.apply(change)
        if self._kv_store is not None:
            self._register(change, blocks, self._kv_store)
        self._step_masks.drop(change.dropped_slots)
        self._sampler.drop(change.dropped_slots)
        if self.images is not None:
            self.images.free(change.freed_images)
        for sequence in change.admitted:
            if self.batch.slots.is_valid(sequence.slot):
                self._admit(sequence)
        if self._proposer is None:
            self._uncleared = np.concatenate([self._uncleared, blocks])
        else:
            # The draft model may write to them before the forward pass.
            by_group = self.batch.blocks.by_group(blocks)
            self._clear_blocks([self.batch.to_device(each) for each in by_group])
        if len(rows):
            by_group = self.batch.blocks.by_group(rows, self.batch.limits.block_size)
            self._clear_rows([self.batch.to_device(each) for each in by_group])

    def _clear_rows(self, rows: Many[Tensor]) -> None:
        for layer in self._cache:
            if layer.keys.numel():
                self._kernels.zero_rows(layer, rows[layer.group], self._dtype)
        if self._proposer is not None:
            self._proposer.clear_rows(rows[0])

    def _register(self, change: BatchChange, blocks: Ints, store: KVStore) -> None:
        """Let `store` know what `change` says of blocks, of which `blocks` are to be cleared for their sequences."""
        named = np.concatenate([change.sealed_blocks, change.unsealed_blocks])
        end = sum(self.batch.limits.group_sizes) + self.batch.states.num_pages
        if len(named) and (named.min() < 1 or named.max() >= end):
            raise StepInvalid("a sealed or unsealed block or page is not one of the cache")
        if [len(key) for key in change.sealed_keys] != [KEY_BYTES] * len(change.sealed_blocks):
            raise StepInvalid(f"each sealed block has a key of {KEY_BYTES} bytes")
        store.unseal(change.unsealed_blocks)
        store.seal(change.sealed_blocks, change.sealed_keys)
        for sequence in change.admitted:
            self._request_ids[sequence.slot] = sequence.request_id
        slots = dict(zip(change.grown_blocks.tolist(), change.grown_slots.tolist(), strict=True))
        store.hand_out(blocks, [self._request_ids[slots[block]] for block in blocks.tolist()])

    def _admit(self, sequence: Sequence) -> None:
        parameters = sequence.parameters
        self._sampler.admit(sequence.slot, parameters.bias, parameters.rules)
        if not self._step_masks.admit(sequence):
            logger.error("a sequence fails: its grammar is not supported with this model")
            self._fail(np.array([sequence.slot]))
        if self._proposer is not None:
            self._proposer.admit(sequence)

    def _fail(self, slots: Ints) -> None:
        """Let each sequence in `slots` fail in the next step that samples for it."""
        ones = torch.ones(len(slots), dtype=torch.bool, device=self.batch.device)
        self.batch.failed.add(slots, ones)

    def _forward(
        self, layout: StepLayout, inputs: StepInputs
    ) -> tuple[Tensor, PromptLogprobs | None, PooledRows | None]:
        """Logits of `layout.logit_rows`, and the prompt scores and pooled rows that the step requests."""
        if inputs.ragged is None:
            assert self._graphs is not None
            return self._graphs.logits(len(layout.slots), inputs.adapters), None, None
        if not layout.needs_states:
            return self._model.forward(inputs.ragged, self._cache), None, None
        states = self._model.states(inputs.ragged, self._cache)
        adapters = inputs.ragged.logit_adapters
        logits = self._model.logits(
            states[self.batch.to_device(layout.logit_states)],
            None if adapters is None else adapters.select(layout.logit_states),
        )
        scored = states, self._model, layout, self.batch, adapters
        prompts = prompt_logprobs(*scored) if len(layout.prompt_rows) else None
        return logits, prompts, pooled_rows(*scored) if len(layout.pooled) else None

    def _clear_blocks(self, index: Many[Tensor]) -> None:
        """Zero blocks, given for each group."""
        if not any(map(len, index)):
            return
        self._kernels.zero_layers(self._cache, index)
        if self._proposer is not None:
            self._proposer.clear_blocks(index[0])

    def _check_unfinished(self, logits: Tensor, layout: StepLayout) -> tuple[Ints, Tensor] | None:
        """Slots with more to compute and whether each has failed: the router may share their blocks from now on."""
        if not len(layout.unfinished):
            return None
        failed = ~logits[len(layout.sampled) :].amax(dim=-1).isfinite()
        self.batch.failed.add(layout.unfinished, failed)
        return layout.unfinished, failed

    def _sample_by_graph(
        self, inputs: StepInputs, constraints: GrammarConstraints | None
    ) -> Sampled | None:
        """The tokens, stored as by `Batch.put`, if a graph can choose them."""
        if inputs.ragged is not None or constraints is not None or self._graphs is None:
            return None
        groups = self._sampler.groups_of(inputs.rows.parameters)
        if not groups.all_plain:
            return None
        choice = Choice.GREEDY if groups.all_greedy else Choice.PLAIN
        words = self._graphs.tokens(choice, len(inputs.rows.positions))
        return None if words is None else Sampled.of_words(words)

    def _sample(
        self,
        logits: Tensor,
        layout: StepLayout,
        rows: SamplingRows,
        constraints: GrammarConstraints | None,
    ) -> Sampled:
        masks = None if constraints is None else constraints.masks
        sampled = self._sampler.sample(logits[: len(layout.sampled)], rows, masks)
        if constraints is not None and constraints.failed:
            self._fail(np.array(list(constraints.failed), dtype=np.int64))
        failed = self.batch.put(layout, sampled.ids, sampled.failed, rows.device)
        if constraints is not None and constraints.forced:
            self._force(layout, constraints)
        return replace(sampled, failed=failed)

    def _force(self, layout: StepLayout, constraints: GrammarConstraints) -> None:
        """Replace the sampled ids of rows with forced tokens in the token table."""
        rows = np.array(list(constraints.forced), dtype=np.int64)
        forced = DraftTokens.of(
            [np.array(ids, dtype=np.int64) for ids in constraints.forced.values()],
            self.batch.device,
        )
        ends = (layout.starts + layout.counts - layout.num_drafts)[layout.yields[rows]]
        slots, positions = forced.table_index(layout.yield_slots[rows], ends)
        self.batch.token_table.write(slots, positions, forced.ids)

    def _tokens_of(
        self,
        layout: StepLayout,
        sampled: Sampled,
        watch: Stopwatch,
        drafts: DraftTokens,
        constraints: GrammarConstraints | None,
    ) -> StepTokens:
        drafted = expected(layout, drafts.ids) if len(drafts) else None
        forced = {} if constraints is None else constraints.forced
        tokens = StepTokens(layout, sampled, watch, expected=drafted, forced=forced)
        if constraints is not None:
            tokens.failure_reasons = constraints.failed
            tokens.num_open = constraints.num_open
        if self._proposer is not None:
            self._proposer.follow(layout, sampled.ids, drafted, forced)
        return tokens

    def _commit(self, layout: StepLayout, tokens: StepTokens | None) -> None:
        if tokens is None:
            self.batch.sequences.commit(layout, no_ints())
            return
        self.batch.sequences.commit(layout, tokens.num_known())
        self._step_masks.follow(tokens)
        self._planner.add(tokens)
