"""A step whose work is submitted to the device, and its result."""

from __future__ import annotations

import zlib

import numpy as np
from torch import Tensor

from millrace_shard.arrays import Floats, Ints, no_floats, no_ints
from millrace_shard.batch.step import StepResult, Timings
from millrace_shard.batch.step_layout import MultiTokenRows
from millrace_shard.batch.step_tokens import Emitted, StepTokens
from millrace_shard.device.stopwatch import Stopwatch
from millrace_shard.device.transfers import start_download
from millrace_shard.model_runner.pooled_rows import PooledRows
from millrace_shard.model_runner.prompt_logprobs import PromptLogprobs
from millrace_shard.sampling.top_tokens import TopTokens


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
        return result if self._pooled is None else self._pooled.add_to(result)

    def _closed_slots(self) -> tuple[int, ...]:
        """Slots whose last token closes their text."""
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
            places = order[np.searchsorted(slots, layout.yield_slots[rows], sorter=order)]
            # A failed row has no token, and its positions do not count.
            accepted[places] = np.maximum(self._tokens.emitted.counts[rows] - 1, 0)
            drafted[places] = layout.num_samples[rows] - 1
        return self._multi_token.computed + accepted, drafted

    def _top_columns(self, tokens: StepTokens, emitted: Emitted) -> tuple[Ints, Ints, Floats]:
        """Candidates by token, the likeliest first, then by id. The only candidate of a forced token is itself."""
        if not self._tops:
            return no_ints(), no_ints(), no_floats()
        layout, places = tokens.layout, np.arange(len(emitted.ids))
        is_forced = emitted.sources < 0
        token_of = np.full(len(layout.sampled), -1, dtype=np.int64)
        token_of[emitted.sources[~is_forced]] = places[~is_forced]
        requested = layout.sampling.parameters["top_n_tokens"][
            (layout.num_samples.cumsum() - layout.num_samples)[emitted.rows]
        ]
        alone = places[is_forced & (requested > 0)]
        parts = [top.chosen(best) for top, best in self._tops]
        owners, ids, logprobs = (np.concatenate(column) for column in zip(*parts, strict=True))
        kept = token_of[owners] >= 0
        owners = np.concatenate([token_of[owners[kept]], alone])
        ids = np.concatenate([ids[kept], emitted.ids[alone]])
        logprobs = np.concatenate([logprobs[kept], emitted.logprobs[alone]])
        order = np.lexsort((ids, -logprobs, owners))
        return np.bincount(owners, minlength=len(places)), ids[order], logprobs[order]

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
