"""One step on the device: change the batch, run the model, sample, bring the tokens to the host."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from millrace_shard.batch import Batch
from millrace_shard.decode_graphs import DecodeGraphs
from millrace_shard.host_copies import start_download
from millrace_shard.kernels.base import Kernels, LayerCache
from millrace_shard.model import CausalModel
from millrace_shard.prepared import PreparedStep
from millrace_shard.prompt_logprobs import PromptLogprobs, prompt_logprobs
from millrace_shard.sampling import Sampled, Sampler
from millrace_shard.step import Floats, Forward, Ints, StepResult, Timings, no_floats, no_ints
from millrace_shard.stopwatch import Stopwatch


class LaunchedStep:
    """A step whose work is submitted. On CUDA its tokens are still on their way; `finish` waits for them."""

    def __init__(
        self,
        prepared: PreparedStep | None,
        watch: Stopwatch,
        *,
        sampled: Sampled | None = None,
        prompts: PromptLogprobs | None = None,
        unfinished_failed: Tensor | None = None,
        invalid_slots: Ints,
    ) -> None:
        """`invalid_slots` were to run, but hold sequences that cannot."""
        self._prepared = prepared
        self._watch = watch
        self._invalid_slots = invalid_slots
        self._prompts = prompts
        tops = sampled.top if sampled else ()
        self._tops = [(top, start_download(top.best)) for top in tops]
        self._tokens = (
            start_download(_pack(sampled)) if sampled else torch.empty(3, 0, dtype=torch.int32)
        )
        self._prompt_values = start_download(prompts.values) if prompts else None
        self._unfinished_failed = (
            torch.empty(0, dtype=torch.bool)
            if unfinished_failed is None
            else start_download(unfinished_failed)
        )
        watch.mark()

    def finish(self) -> StepResult:
        """The tokens. Waits for the device without holding the interpreter."""
        self._watch.wait()
        if self._prepared is None:
            return StepResult(failed_slots=self._invalid_slots, timings=self._timings())
        ids, logprobs, failed = self._tokens.numpy()
        rows = np.flatnonzero(failed == 0)
        slots = self._prepared.sampled
        top_counts, top_ids, top_logprobs = self._top_columns(rows)
        result_ids = ids[rows].astype(np.int64)
        prompts = self._prompts
        return StepResult(
            slots=slots[rows],
            counts=np.ones(len(rows), dtype=np.int64),
            ids=result_ids,
            logprobs=logprobs.view(np.float32)[rows],
            top_counts=top_counts,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            prefill_slots=no_ints() if prompts is None else prompts.slots,
            prefill_counts=no_ints() if prompts is None else prompts.counts,
            prefill_logprobs=no_floats()
            if self._prompt_values is None
            else self._prompt_values.numpy(),
            failed_slots=np.concatenate(
                [
                    slots[failed != 0],
                    self._prepared.unfinished[self._unfinished_failed.numpy()],
                    self._invalid_slots,
                ]
            ),
            checksum=_checksum(slots[rows], result_ids),
            timings=self._timings(),
        )

    def _top_columns(self, rows: Ints) -> tuple[Ints, Ints, Floats]:
        """Candidates of `rows`, by row, then most likely first, then by id."""
        if not self._tops:
            return no_ints(), no_ints(), no_floats()
        parts = [top.chosen(best) for top, best in self._tops]
        owners, ids, logprobs = (np.concatenate(column) for column in zip(*parts, strict=True))
        kept = np.isin(owners, rows)
        owners, ids, logprobs = owners[kept], ids[kept], logprobs[kept]
        order = np.lexsort((ids, -logprobs, owners))
        counts = np.bincount(owners, minlength=int(rows.max(initial=0)) + 1)[rows]
        return counts, ids[order], logprobs[order]

    def _timings(self) -> Timings:
        forward_ns, end_ns = self._watch.elapsed_ns(1), self._watch.elapsed_ns(2)
        return Timings(
            forward_ns=forward_ns,
            decode_ns=end_ns - forward_ns,
            total_ns=self._watch.since_start_ns(),
            concat_ns=self._watch.concat_ns,
        )


class StepRunner:
    """The model with its KV cache and batch."""

    def __init__(
        self,
        model: CausalModel,
        kernels: Kernels,
        cache: Sequence[LayerCache],
        batch: Batch,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """`graphs` over the same cache and batch run the steps of decodes alone that they have room for."""
        self._model = model
        self._kernels = kernels
        self._cache = cache
        self._graphs = graphs
        self._sampler = Sampler(batch.history, model.info.eos_token_ids)
        self.batch = batch

    def launch(self, step: Forward) -> LaunchedStep:
        """Submit a step. Raises StepInvalid, or whatever the device raises; sequences have not advanced then."""
        watch = Stopwatch(self.batch.device)
        self._clear_blocks(self.batch.apply(step.change))
        if step.change.admitted:
            watch.concat_ns = watch.since_start_ns()
        step, invalid_slots = self.batch.without_invalid(step)
        if not len(step.chunk_slots) and not len(step.decode_slots):
            watch.mark()
            return LaunchedStep(None, watch, invalid_slots=invalid_slots)
        prepared = self.batch.prepare(step)
        logits = self._forward(prepared)
        watch.mark()
        prompts = prompt_logprobs(logits, prepared, self.batch)
        sampled = self._sample(logits, prepared) if len(prepared.sampled) else None
        launched = LaunchedStep(
            prepared,
            watch,
            sampled=sampled,
            prompts=prompts,
            unfinished_failed=self._check_unfinished(logits, prepared),
            invalid_slots=invalid_slots,
        )
        self.batch.commit(prepared)
        return launched

    def _forward(self, prepared: PreparedStep) -> Tensor:
        graphs = self._graphs
        if graphs is not None and not prepared.num_chunks and graphs.fits(len(prepared.slots)):
            return graphs.logits(prepared.slots, prepared.positions)
        return self._model.forward(self.batch.ragged(prepared), self._cache)

    def _clear_blocks(self, blocks: Ints) -> None:
        if len(blocks):
            index = self.batch.to_device(blocks)
            for layer in self._cache:
                self._kernels.zero_blocks(layer, index)

    def _check_unfinished(self, logits: Tensor, prepared: PreparedStep) -> Tensor | None:
        """Which unfinished prompts are not finite, [U] bool: the router may share their blocks from now on."""
        if not len(prepared.unfinished):
            return None
        logits = logits[self.batch.to_device(prepared.unfinished_logits)]
        failed = ~logits.amax(dim=-1).isfinite()
        self.batch.fail(prepared.unfinished, failed)
        return failed

    def _sample(self, logits: Tensor, prepared: PreparedStep) -> Sampled:
        if prepared.sampling_logits is not None:
            logits = logits[self.batch.to_device(prepared.sampling_logits)]
        sampled = self._sampler.sample(logits, prepared.sampling)
        failed = self.batch.put(prepared, sampled.ids, sampled.failed)
        return replace(sampled, failed=failed)


def _pack(sampled: Sampled) -> Tensor:
    """[3, R] int32: ids, bits of the logprobs, failed."""
    return torch.stack(
        [
            sampled.ids.to(torch.int32),
            sampled.logprobs.view(torch.int32),
            sampled.failed.to(torch.int32),
        ]
    )


def _checksum(slots: Ints, ids: Ints) -> int:
    return zlib.crc32(np.concatenate([slots, ids]).tobytes())
