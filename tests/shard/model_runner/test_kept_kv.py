"""Epochs that begin with kept KV: runs that are cut at any step yield the bytes of undisturbed ones.

A cut leaves NaN wherever an answered step has not written: behind the positions that count in a half-filled block, and
in every other block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from millrace_proto.sampling import Sampling
from millrace_shard.batch.sequence import Sequence as Admitted
from millrace_shard.batch.step import BatchChange, Forward, StepResult
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.kernels.base import Kernels, LayerCache
from millrace_shard.kernels.cpu.operators import CpuKernels
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.speculation.loading import SpeculationLoader
from millrace_testing.engines.kernels import make_kernels
from millrace_testing.engines.steps import SAMPLING, Stepper, ints
from millrace_testing.models.models import poison, prompt_of, read_model, save_tiny
from millrace_testing.shards.ranks import run_ranks

NUM_TOKENS = 20
CHUNK = 23
LENGTHS = (5, 31, 64, 50)
MOST_DRAFTS = 3


@dataclass
class Run:
    """A request as its router knows it."""

    prompt: list[int]
    fields: dict[str, Any]
    ids: list[int] = field(default_factory=list)
    bits: list[int] = field(default_factory=list)
    """The bits of log probabilities."""
    num_computed: int = 0
    """KV positions of answered steps."""
    blocks: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.ids


class Cutter:
    """Generates the tokens of some requests, with cuts after some steps."""

    def __init__(self, stepper: Stepper, kernels: Kernels, dtype: torch.dtype) -> None:
        self._stepper = stepper
        self._kernels = kernels
        self._dtype = dtype
        self._caches = [*stepper.cache, *stepper.draft_cache]
        self._drafts = 0 if stepper.draft_cache == [] else MOST_DRAFTS

    def generate(self, cuts: Sequence[int]) -> list[tuple[list[int], list[int]]]:
        """Ids and the bits of log probabilities; after each step in `cuts` another one runs unanswered, and is cut."""
        sampled = [{}, SAMPLING["temperature"], SAMPLING["filters"], SAMPLING["penalised"]]
        prompts = [prompt_of(length, seed=length) for length in LENGTHS]
        self.runs = [Run(*each) for each in zip(prompts, sampled, strict=True)]
        change, number = self._admission(), 0
        while going := [slot for slot, run in enumerate(self.runs) if len(run.ids) < NUM_TOKENS]:
            self._take(self._stepper.run(self._step(going, change)))
            change, number = BatchChange(), number + 1
            if number in cuts:
                self._stepper.run(self._step(going, change))
                change = self._cut()
        self._stepper.runner.clear()
        return [(run.ids[:NUM_TOKENS], run.bits[:NUM_TOKENS]) for run in self.runs]

    def _admission(self) -> BatchChange:
        """Admit all requests with the KV that they have."""
        size = self._stepper.block_size
        held = {block for run in self.runs for block in run.blocks}
        free = (block for block in self._stepper.free if block not in held)
        for run in self.runs:
            num_blocks = -(-(len(run.prompt) + NUM_TOKENS + 2 * MOST_DRAFTS) // size)
            run.blocks += [next(free) for _ in range(num_blocks - len(run.blocks))]
        grown = [(slot, block) for slot, run in enumerate(self.runs) for block in run.blocks]
        return BatchChange(
            admitted=tuple(
                Admitted(
                    slot=slot,
                    request_id=slot,
                    input_ids=ints(run.tokens),
                    generated_tokens=len(run.ids),
                    cached_tokens=run.num_computed,
                    parameters=Sampling(**run.fields),
                )
                for slot, run in enumerate(self.runs)
            ),
            grown_slots=ints(slot for slot, _ in grown),
            grown_blocks=ints(block for _, block in grown),
        )

    def _step(self, going: Iterable[int], change: BatchChange) -> Forward:
        if len(change.admitted):
            self._num_inputs = [len(run.tokens) for run in self.runs]
        left = {slot: self._num_inputs[slot] - self.runs[slot].num_computed for slot in going}
        self._chunks = {slot: min(count, CHUNK) for slot, count in left.items() if count > 0}
        decodes = [slot for slot in going if left[slot] <= 0]
        return Forward(
            change=change,
            chunk_slots=ints(self._chunks),
            chunk_tokens=ints(self._chunks.values()),
            decode_slots=ints(decodes),
            decode_tokens=ints([1 + self._drafts] * len(decodes)),
            draft_tokens=ints([self._drafts] * len(decodes)),
        )

    def _take(self, result: StepResult) -> None:
        assert not len(result.failed_slots)
        for slot, count in self._chunks.items():
            self.runs[slot].num_computed += count
        place, bits = 0, result.logprobs.view(np.int32)
        for slot, count in zip(result.slots.tolist(), result.counts.tolist(), strict=True):
            run = self.runs[slot]
            run.ids += result.ids[place : place + count].tolist()
            run.bits += bits[place : place + count].tolist()
            place += count
            run.num_computed = len(run.tokens) - 1
        assert place == len(result.ids)

    def _cut(self) -> BatchChange:
        size = self._stepper.block_size
        self._stepper.runner.clear()
        kept, torn = {0}, list[int]()
        for run in self.runs:
            run.blocks = run.blocks[: -(-run.num_computed // size)]
            kept |= set(run.blocks)
            last = run.blocks[-1] * size
            torn += range(last + (run.num_computed - 1) % size + 1, last + size)
        lost = [block for block in self._stepper.free if block not in kept]
        for cache in self._caches:
            self._tear(cache, lost, torn)
        return self._admission()

    def _tear(self, cache: LayerCache, blocks: list[int], rows: list[int]) -> None:
        """Leave NaN in all of `blocks`, and at cache rows."""
        for each in cache.by_block:
            for block in blocks:
                poison(LayerCache(each[block], each[block]))
        heads, dim = cache.keys.shape[-2:]
        if isinstance(self._kernels, CpuKernels):
            heads = cache.keys.shape[1]
        nans = torch.full((len(rows), heads, dim), torch.nan, dtype=self._dtype)
        batch = cast("RaggedBatch", SimpleNamespace(cache_rows=torch.tensor(rows)))
        self._kernels.store(nans, nans, batch, cache)


def cutter_of(
    folder: Path,
    kernels: str,
    dtype: torch.dtype,
    *,
    cache_dtype: torch.dtype | None = None,
    draft: Path | None = None,
    group: ProcessGroup | None = None,
) -> Cutter:
    own, group = (
        make_kernels(kernels, deterministic=True),
        group or ProcessGroup.single(),
    )
    with torch.inference_mode():
        model, speculation = read_model(folder, own, dtype=dtype, group=group), None
        if draft is not None:
            loader = SpeculationLoader(
                folder=folder, dtype=dtype, kernels=own, group=group, device=torch.device("cpu")
            )
            model, speculation = loader.load(
                model, draft_folder=draft, max_draft_tokens=MOST_DRAFTS
            )
    stepper = Stepper(model, own, dtype=dtype, speculation=speculation, cache_dtype=cache_dtype)
    return Cutter(stepper, own, dtype)


CUTS = [[1], [2, 3, 4], [7, 8, 15], list(range(1, 60))]
BF16, F32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("model", "kernels", "dtype", "cache_dtype"),
    [
        ("llama", "plain", F32, None),
        ("llama", "plain", F32, torch.int8),
        ("llama", "cpu", F32, None),
        ("llama", "cpu", F32, torch.int8),
        ("llama", "cpu", BF16, None),
        ("gemma2", "cpu", BF16, None),
        ("gpt_oss", "cpu", BF16, None),
        ("gemma2", "cpu", BF16, torch.int8),
        ("llama", "cpu", BF16, torch.float8_e4m3fn),
        ("gpt2", "cpu", F32, torch.float8_e5m2),
    ],
)
def test_a_run_that_is_cut_and_goes_on_in_its_kv_yields_the_same_bytes(
    model: str, kernels: str, dtype: torch.dtype, cache_dtype: torch.dtype | None, tmp_path: Path
) -> None:
    save_tiny(tmp_path, model)
    cutter = cutter_of(tmp_path, kernels, dtype, cache_dtype=cache_dtype)
    undisturbed = cutter.generate([])
    for cuts in CUTS:
        assert cutter.generate(cuts) == undisturbed


@pytest.mark.parametrize("kernels", ["plain", "cpu"])
def test_drafts_in_kept_kv_change_no_byte(kernels: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama")
    save_tiny(tmp_path / "draft", "llama", num_hidden_layers=1)
    undisturbed = cutter_of(tmp_path / "model", kernels, F32).generate([])
    cutter = cutter_of(tmp_path / "model", kernels, F32, draft=tmp_path / "draft")
    for cuts in CUTS:
        assert cutter.generate(cuts) == undisturbed


@pytest.mark.parametrize("cache_dtype", [None, torch.int8, torch.float8_e4m3fn])
def test_without_zeros_behind_kept_positions_the_bytes_differ(
    cache_dtype: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path, "llama")
    cutter = cutter_of(tmp_path, "cpu", F32, cache_dtype=cache_dtype)
    undisturbed = cutter.generate([])
    monkeypatch.setattr(CpuKernels, "zero_rows", lambda *_: None)
    with pytest.raises(AssertionError):
        assert cutter.generate([3]) == undisturbed


def generate_on_a_rank(group: ProcessGroup, folder: Path) -> list[Any]:
    group.add_in_rank_order()
    cutter = cutter_of(folder, "plain", F32, group=group)
    return [cutter.generate(cuts) for cuts in ([], [2, 3, 9])]


def test_ranks_go_on_in_their_kv_together(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama")
    first, second = run_ranks(tmp_path, 2, generate_on_a_rank, tmp_path / "model")
    assert first == second
    assert all(each == first[0] for each in first)
