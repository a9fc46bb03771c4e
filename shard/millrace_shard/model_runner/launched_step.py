"""A step whose work is submitted, and the answer that becomes of it."""

from __future__ import annotations

import zlib
from typing import TypedDict

import numpy as np
from torch import Tensor

from millrace_shard.arrays import Floats, Ints, no_floats, no_ints
from millrace_shard.batch.step import StepResult, Timings
from millrace_shard.batch.step_layout import StepLayout, WideRows
from millrace_shard.batch.step_tokens import Emitted, StepTokens
from millrace_shard.device.stopwatch import Stopwatch
from millrace_shard.device.transfers import start_download
from millrace_shard.model_runner.prompt_logprobs import PromptLogprobs
from millrace_shard.sampling.top_tokens import TopTokens


class _Columns(TypedDict, total=False):
    """Those of a StepResult."""

    slots: Ints
    counts: Ints
    ids: Ints
    logprobs: Floats
    top_counts: Ints
    top_ids: Ints
    top_logprobs: Floats
    computed_slots: Ints
    computed_positions: Ints
    drafted_tokens: Ints
    checksum: int


class LaunchedStep:
    """On CUDA its tokens are still on their way; `finish` waits for them."""

    def __init__(
        self,
        watch: Stopwatch,
        *,
        wide: WideRows,
        invalid_slots: Ints,
        tokens: StepTokens | None = None,
        tops: tuple[TopTokens, ...] = (),
        prompts: PromptLogprobs | None = None,
        unfinished: tuple[Ints, Tensor] | None = None,
    ) -> None:
        """`unfinished` are slots with more to compute, and which of them failed, [U] bool on the device.

        `watch` has its last mark to come. `invalid_slots` were to run, but hold sequences that cannot.
        """
        self._wide = wide
        self._watch = watch
        self._tokens = tokens
        self._invalid_slots = invalid_slots
        self._prompts = prompts
        self._tops = [(top, start_download(top.best)) for top in tops]
        self._prompt_scores = start_download(prompts.scores) if prompts else None
        self._unfinished = unfinished and (unfinished[0], start_download(unfinished[1]))
        watch.mark()

    def finish(self) -> StepResult:
        """The tokens. Waits for the device without holding the interpreter."""
        self._watch.wait()
        failed, columns = self._invalid_slots, _Columns()
        if self._unfinished is not None:
            slots, has_failed = self._unfinished
            failed = np.concatenate([slots[has_failed.numpy()], failed])
        if self._tokens is not None:
            columns |= self._token_columns(self._tokens)
            if self._tokens.emitted.some_failed:
                failed = np.concatenate([_failed_slots(self._tokens), failed])
        if len(self._wide.slots):
            columns |= self._computed_columns(self._wide)
        # Of all columns at once: a result takes longer to be replaced than to be made.
        result = StepResult(
            failed_slots=failed,
            failure_reasons=self._tokens.failure_reasons if self._tokens else {},
            timings=self._timings(),
            **columns,
        )
        if self._prompts is not None and self._prompt_scores is not None:
            result = self._prompts.add_to(result, self._prompt_scores)
        return result

    def _token_columns(self, tokens: StepTokens) -> _Columns:
        emitted, slots = tokens.emitted, tokens.prepared.yield_slots
        counts = emitted.counts
        if emitted.some_failed:
            yielding = ~emitted.failed
            slots, counts = slots[yielding], counts[yielding]
        top_counts, top_ids, top_logprobs = self._top_columns(tokens.prepared, emitted)
        return _Columns(
            slots=slots,
            counts=counts,
            ids=emitted.ids,
            logprobs=emitted.logprobs,
            top_counts=top_counts,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            checksum=_checksum(slots, counts, emitted.ids),
        )

    def _computed_columns(self, wide: WideRows) -> _Columns:
        """What decodes that were allowed several positions have filled; guesses count as far as they were right."""
        right, drafted = np.zeros((2, len(wide.slots)), dtype=np.int64)
        if self._tokens is not None and len(self._tokens.awaited):
            tokens, emitted = self._tokens, self._tokens.emitted
            slots = tokens.prepared.yield_slots[tokens.awaited]
            # A row that failed has no token; what it has computed is of no use to anyone.
            found = np.maximum(emitted.counts[tokens.awaited] - 1, 0)
            order = np.argsort(wide.slots)
            places = order[np.searchsorted(wide.slots, slots, sorter=order)]
            right[places] = found
            drafted[places] = tokens.prepared.num_samples[tokens.awaited] - 1
        return _Columns(
            computed_slots=wide.slots,
            computed_positions=wide.computed + right,
            drafted_tokens=drafted,
        )

    def _top_columns(self, prepared: StepLayout, emitted: Emitted) -> tuple[Ints, Ints, Floats]:
        """Candidates by token, then most likely first, then by id; what was forced is its own only one."""
        if not self._tops:
            return no_ints(), no_ints(), no_floats()
        tokens = np.arange(len(emitted.ids))
        is_forced = emitted.sources < 0
        token_of = np.full(len(prepared.sampled), -1, dtype=np.int64)
        token_of[emitted.sources[~is_forced]] = tokens[~is_forced]
        wanted = prepared.sampling.parameters["top_n_tokens"][
            (prepared.num_samples.cumsum() - prepared.num_samples)[emitted.rows]
        ]
        alone = tokens[is_forced & (wanted > 0)]
        parts = [top.chosen(best) for top, best in self._tops]
        owners, ids, logprobs = (np.concatenate(column) for column in zip(*parts, strict=True))
        kept = token_of[owners] >= 0
        owners = np.concatenate([token_of[owners[kept]], alone])
        ids = np.concatenate([ids[kept], emitted.ids[alone]])
        logprobs = np.concatenate([logprobs[kept], emitted.logprobs[alone]])
        order = np.lexsort((ids, -logprobs, owners))
        return np.bincount(owners, minlength=len(tokens)), ids[order], logprobs[order]

    def _timings(self) -> Timings:
        forward_ns, end_ns = self._watch.elapsed_ns(1), self._watch.elapsed_ns(2)
        return Timings(
            forward_ns=forward_ns,
            decode_ns=end_ns - forward_ns,
            total_ns=self._watch.since_start_ns(),
            concat_ns=self._watch.concat_ns,
        )


def _failed_slots(tokens: StepTokens) -> Ints:
    failed: Ints = tokens.prepared.yield_slots[tokens.emitted.failed]
    return failed


def _checksum(slots: Ints, counts: Ints, ids: Ints) -> int:
    return zlib.crc32(np.concatenate([slots, counts, ids]).tobytes())
