"""A step whose work is submitted to the device, and its result: tokens, log probabilities of prompts, pooled rows.

The hidden states of a prompt become logits in slices of positions, of which only the scores are kept. So the memory
does not depend on the length of prompts: it holds `SLICE_ELEMENTS` logits, as many log probabilities, and the buffers
of head and `topk`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from millrace_shard.arrays import Floats, Ints, no_floats, no_ints
from millrace_shard.batch.batch import Batch
from millrace_shard.batch.step import StepResult, Timings
from millrace_shard.batch.step_layout import MultiTokenRows, StepLayout
from millrace_shard.batch.step_tokens import Emitted, StepTokens
from millrace_shard.device.stopwatch import Stopwatch
from millrace_shard.device.transfers import start_download
from millrace_shard.kernels.lora.adapter_table import AdapterRows
from millrace_shard.kernels.scores import aligned
from millrace_shard.models.interface import CausalModel
from millrace_shard.sampling.sampler import TopTokens
from millrace_shard.vision.encoder import EncodedTiles


class PooledRows:
    """The values of a step's pooled rows on the way to the host."""

    def __init__(self, parts: Many[tuple[Ints, Ints, Tensor]]) -> None:
        """Each of `parts` has slots [n], the number of values of each [n], and values [sum of them] float32."""
        self._parts = [(slots, counts, start_download(values)) for slots, counts, values in parts]

    def add_to(self, result: StepResult) -> StepResult:
        """`result` with these values; a row whose values are not finite has failed. The step must be done."""
        slots, counts, values = (
            np.concatenate(column)
            for column in zip(
                *((slots, counts, values.numpy()) for slots, counts, values in self._parts),
                strict=True,
            )
        )
        rows = np.repeat(np.arange(len(slots)), counts)
        failed = np.bincount(rows, ~np.isfinite(values), len(slots)) > 0
        return replace(
            result,
            pooled_slots=slots[~failed],
            pooled_counts=counts[~failed],
            pooled_values=values[~failed[rows]],
            failed_slots=np.concatenate([result.failed_slots, slots[failed]]),
        )


def pooled_rows(
    states: Tensor,
    model: CausalModel,
    layout: StepLayout,
    batch: Batch,
    adapters: AdapterRows | None = None,
) -> PooledRows:
    """Pool the rows of `layout.pooled`, at least one; every rank calls this with the same step.

    `states` [S, hidden] are the hidden states of `layout.state_rows`, which have these `adapters`.
    """
    slots = layout.pooled
    ids = [batch.sequences.pooled.of(slot).logit_ids for slot in slots.tolist()]
    num_ids = np.array([len(each) for each in ids], dtype=np.int64)
    parts = []
    if len(plain := np.flatnonzero(num_ids == 0)):
        values = states[batch.to_device(layout.pooled_states[plain])].float()
        counts = np.full(len(plain), values.shape[1], dtype=np.int64)
        parts.append((slots[plain], counts, values.flatten()))
    if len(scored := np.flatnonzero(num_ids)):
        state_index = layout.pooled_states[scored]
        adapter_rows = None if adapters is None else adapters.select(state_index)
        logits = model.logits(states[batch.to_device(state_index)], adapter_rows)
        counts = num_ids[scored]
        rows = np.repeat(np.arange(len(scored)), counts)
        columns = np.array([id_ for row in scored for id_ in ids[row]], dtype=np.int64)
        index = batch.to_device(np.stack([rows, columns]))
        parts.append((slots[scored], counts, logits[index[0], index[1]]))
    return PooledRows(parts)


SLICE_ELEMENTS = 1 << 24
"""Logits in a slice: 64 MiB of float32, or the logits of one position if these are more."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Scores of the prompt tokens that a step has computed: `counts[i]` tokens, with candidates, for `slots[i]`."""

    slots: Ints
    counts: Ints
    num_candidates: Ints
    """Candidates that each slot reports for each of its tokens."""
    scores: Tensor
    """[sum of counts, 1 + W, 2] int32 on the device, as in PendingScores; W is the largest number of candidates."""

    def add_to(self, result: StepResult, scores: Tensor) -> StepResult:
        """`result` with these columns; `scores` is the field of this name, copied to the host."""
        ids, bits = scores.numpy()[..., 0], scores.numpy()[..., 1]
        logprobs = bits.view(np.float32)
        result = replace(
            result,
            prefill_slots=self.slots,
            prefill_counts=self.counts,
            prefill_logprobs=logprobs[:, 0],
        )
        if not self.num_candidates.any():
            return result
        requested = np.repeat(self.num_candidates, self.counts)
        is_requested = np.arange(ids.shape[1] - 1) < requested[:, None]
        return replace(
            result,
            prefill_top_counts=self.num_candidates,
            prefill_top_ids=ids[:, 1:][is_requested].astype(np.int64),
            prefill_top_logprobs=logprobs[:, 1:][is_requested],
        )


def prompt_logprobs(
    states: Tensor,
    model: CausalModel,
    layout: StepLayout,
    batch: Batch,
    adapters: AdapterRows | None = None,
) -> PromptLogprobs:
    """Score the prompts of `layout.prompt_rows`, at least one; every rank calls this with the same step.

    `states` [S, hidden] are the hidden states of `layout.state_rows`, which have these `adapters`.
    """
    rows = layout.prompt_rows
    slots, counts = layout.slots[rows], layout.counts[rows]
    num_candidates = batch.pending_scores.num_candidates[slots]
    token_slots = np.repeat(slots, counts)
    index = batch.to_device(np.stack([token_slots, layout.prompt_targets, layout.prompt_states]))
    targets = batch.token_table.table[index[0], index[1]].long()
    width = int(num_candidates.max())
    height = max(1, SLICE_ELEMENTS // batch.limits.vocab_size)

    def logits(part: slice) -> Tensor:
        adapter_rows = None if adapters is None else adapters.select(layout.prompt_states[part])
        return model.logits(states[index[2, part]], adapter_rows)

    scores = torch.cat(
        [_score(logits(part), targets[part], width) for part in _slices(len(targets), height)]
    )
    ends = counts.cumsum()
    slot, first, last = batch.to_device(np.stack([slots, ends - counts, ends - 1]))
    shifted = scores.roll(1, dims=0)
    shifted[first] = batch.pending_scores.exchange(slot, scores[last])
    return PromptLogprobs(slots, counts, num_candidates, shifted)


def _slices(count: int, height: int) -> Iterator[slice]:
    return (slice(start, start + height) for start in range(0, count, height))


def _score(logits: Tensor, targets: Tensor, width: int) -> Tensor:
    """[n, 1 + width, 2] int32 of `logits` [n, V]: target and likeliest tokens of each row, as in PendingScores."""
    logprobs = aligned(logits).log_softmax(-1)
    columns = logprobs.gather(1, targets[:, None]), targets[:, None]
    if width:
        best = logprobs.topk(width, dim=-1)
        columns = torch.cat([columns[0], best.values], 1), torch.cat([columns[1], best.indices], 1)
    values, ids = columns
    return torch.stack([ids.to(torch.int32), values.view(torch.int32)], dim=-1)


class LaunchedStep:
    """On CUDA the tokens are still being computed; `finish` waits for them."""

    def __init__(  # noqa: PLR0913
        self,
        watch: Stopwatch,
        *,
        multi_token: MultiTokenRows,
        invalid_slots: Ints,
        tokens: StepTokens | None = None,
        tops: tuple[TopTokens, ...] = (),
        prompts: PromptLogprobs | None = None,
        pooled: PooledRows | None = None,
        unfinished: tuple[Ints, Tensor] | None = None,
        encoded: EncodedTiles | None = None,
    ) -> None:
        """`unfinished` has the slots with more to compute, and which of them have failed, [U] bool on the device.

        `watch` lacks only its last mark. `invalid_slots` of the step hold invalid sequences, which did not run.
        """
        self._multi_token = multi_token
        self._watch = watch
        self._tokens = tokens
        self._invalid_slots = invalid_slots
        self._prompts = prompts
        self._tops = [(top, start_download(top.best)) for top in tops]
        self._prompt_scores = start_download(prompts.scores) if prompts else None
        self._pooled = pooled
        self._encoded = encoded
        self._unfinished = unfinished and (unfinished[0], start_download(unfinished[1]))
        watch.mark()

    def finish(self) -> StepResult:
        """The result. Waits for the device without the interpreter lock."""
        self._watch.wait()
        slots, counts, ids, logprobs = no_ints(), no_ints(), no_ints(), no_floats()
        top_counts, top_ids, top_logprobs = no_ints(), no_ints(), no_floats()
        if self._tokens is not None:
            emitted = self._tokens.emitted
            ids, logprobs = emitted.ids, emitted.logprobs
            slots, counts = _yielding(self._tokens)
            top_counts, top_ids, top_logprobs = self._top_columns(self._tokens, emitted)
        computed_positions, drafted_tokens = self._computed_columns()
        result = StepResult(
            slots=slots,
            counts=counts,
            ids=ids,
            logprobs=logprobs,
            top_counts=top_counts,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            failed_slots=self._failed_slots(),
            failure_reasons=self._tokens.failure_reasons if self._tokens else {},
            closed_slots=self._closed_slots(),
            computed_slots=self._multi_token.slots,
            computed_positions=computed_positions,
            drafted_tokens=drafted_tokens,
            checksum=_checksum(slots, counts, ids),
            timings=self._timings(),
        )
        if self._prompts is not None and self._prompt_scores is not None:
            result = self._prompts.add_to(result, self._prompt_scores)
        if self._encoded is not None:
            result = self._encoded.add_to(result)
        return result if self._pooled is None else self._pooled.add_to(result)

    def _closed_slots(self) -> tuple[int, ...]:
        if self._tokens is None or not self._tokens.num_open:
            return ()
        slots, counts = self._tokens.layout.yield_slots, self._tokens.emitted.counts
        return tuple(
            int(slots[row]) for row, num in self._tokens.num_open.items() if counts[row] > num
        )

    def _failed_slots(self) -> Ints:
        failed = self._invalid_slots
        if self._unfinished is not None:
            slots, has_failed = self._unfinished
            failed = np.concatenate([slots[has_failed.numpy()], failed])
        if self._tokens is not None and self._tokens.emitted.some_failed:
            slots = self._tokens.layout.yield_slots[self._tokens.emitted.failed]
            failed = np.concatenate([slots, failed])
        return failed

    def _computed_columns(self) -> tuple[Ints, Ints]:
        """KV positions that each multi-token row has filled, accepted draft tokens included, and its draft tokens."""
        slots = self._multi_token.slots
        if not len(slots):
            return no_ints(), no_ints()
        accepted, drafted = np.zeros((2, len(slots)), dtype=np.int64)
        if self._tokens is not None and len(rows := self._tokens.unverified):
            layout = self._tokens.layout
            order = np.argsort(slots)
            index = order[np.searchsorted(slots, layout.yield_slots[rows], sorter=order)]
            # A failed row does not yield a token, and its positions do not count.
            accepted[index] = np.maximum(self._tokens.emitted.counts[rows] - 1, 0)
            drafted[index] = layout.num_samples[rows] - 1
        return self._multi_token.computed + accepted, drafted

    def _top_columns(self, tokens: StepTokens, emitted: Emitted) -> tuple[Ints, Ints, Floats]:
        """Candidates by token, the likeliest first, then by id. The only candidate of a forced token is itself."""
        if not self._tops:
            return no_ints(), no_ints(), no_floats()
        layout, token_numbers = tokens.layout, np.arange(len(emitted.ids))
        is_forced = emitted.sources < 0
        token_of = np.full(len(layout.sampled), -1, dtype=np.int64)
        token_of[emitted.sources[~is_forced]] = token_numbers[~is_forced]
        requested = layout.sampling.parameters["top_n_tokens"][
            (layout.num_samples.cumsum() - layout.num_samples)[emitted.rows]
        ]
        forced_numbers = token_numbers[is_forced & (requested > 0)]
        parts = [top.chosen(best) for top, best in self._tops]
        owners, ids, logprobs = (np.concatenate(column) for column in zip(*parts, strict=True))
        is_emitted = token_of[owners] >= 0
        owners = np.concatenate([token_of[owners[is_emitted]], forced_numbers])
        ids = np.concatenate([ids[is_emitted], emitted.ids[forced_numbers]])
        logprobs = np.concatenate([logprobs[is_emitted], emitted.logprobs[forced_numbers]])
        order = np.lexsort((ids, -logprobs, owners))
        return np.bincount(owners, minlength=len(token_numbers)), ids[order], logprobs[order]

    def _timings(self) -> Timings:
        forward_ns, end_ns = self._watch.elapsed_ns(1), self._watch.elapsed_ns(2)
        return Timings(
            forward_ns=forward_ns,
            decode_ns=end_ns - forward_ns,
            total_ns=self._watch.since_start_ns(),
            concat_ns=self._watch.concat_ns,
        )


def _yielding(tokens: StepTokens) -> tuple[Ints, Ints]:
    """Slots of the rows that have not failed, and their numbers of tokens."""
    slots, emitted = tokens.layout.yield_slots, tokens.emitted
    if not emitted.some_failed:
        return slots, emitted.counts
    return slots[~emitted.failed], emitted.counts[~emitted.failed]


def _checksum(slots: Ints, counts: Ints, ids: Ints) -> int:
    return zlib.crc32(np.concatenate([slots, counts, ids]).tobytes())
