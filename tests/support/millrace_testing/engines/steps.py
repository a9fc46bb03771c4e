"""A runner over a real model, stepped without an engine: the device's work of a step and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from millrace_proto.sampling import Dry, Sampling, SequenceRules
from millrace_shard.arrays import Ints
from millrace_shard.batch.batch import Batch
from millrace_shard.batch.device_tables import BatchLimits
from millrace_shard.batch.sequence import Sequence
from millrace_shard.batch.sequence_images import FeatureRows
from millrace_shard.batch.step import BatchChange, Forward, StepResult
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.kernels.base import Kernels, LayerCache
from millrace_shard.kernels.lora.adapter_table import AdapterTable
from millrace_shard.kernels.states import LayerState
from millrace_shard.model_runner.decode_graphs import DecodeGraphs
from millrace_shard.model_runner.draft_graphs import capture_drafts
from millrace_shard.model_runner.graph_capture import GraphSettings
from millrace_shard.model_runner.piecewise_layers import with_pieces
from millrace_shard.model_runner.runner import DecodingFeatures, StepRunner
from millrace_shard.model_runner.step_planner import StepPlanner
from millrace_shard.models.interface import CausalModel, KVLayer
from millrace_shard.speculation.loading import Speculation
from millrace_shard.speculation.proposer import Proposer
from millrace_shard.structured_output.manager import GrammarManager
from millrace_testing.models.models import poison, read_model, save_tiny

NUM_BLOCKS = 48
MAX_TOKENS = 96
MAX_BATCH_SIZE = 8

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8, "do_sample": True, "seed": 3},
    "filters": {"do_sample": True, "top_k": 9, "top_p": 0.8, "typical_p": 0.9, "seed": 4},
    "penalised": {
        "repetition_penalty": 1.4,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.2,
        "openai_frequency_penalty": 0.1,
    },
    "marked": {
        "watermark": True,
        "bias": ((5, 2.0), (9, -1.0)),
        "min_p": 0.02,
        "do_sample": True,
        "seed": 5,
    },
    "ruled": {
        "rules": SequenceRules(
            allowed_ids=tuple(range(3, 90)),
            bad_words=((7,), (5, 6), (8, 9, 10)),
            dry=Dry(multiplier=0.8, base=1.75, allowed_length=1, window=0, breakers=(4,)),
        ),
        "top_n_sigma": 2.0,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.02,
        "do_sample": True,
        "seed": 6,
    },
}


def ints(values: Iterable[int]) -> Ints:
    return np.array(list(values), dtype=np.int64)


def tiny_llama(
    folder: Path, kernels: Kernels, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> CausalModel:
    """Random, without gradients."""
    save_tiny(folder, "llama")
    with torch.inference_mode():
        return read_model(folder, kernels, dtype=dtype, device=torch.device(device))


def _limits(
    kernels: Kernels, vocab_size: int, max_batch_size: int, max_draft_tokens: int, row_tile: int
) -> BatchLimits:
    num_blocks = NUM_BLOCKS * max_batch_size // MAX_BATCH_SIZE
    return BatchLimits(
        max_batch_size=max_batch_size,
        max_tokens=MAX_TOKENS,
        num_blocks=num_blocks,
        block_size=kernels.block_size,
        vocab_size=vocab_size,
        padding_block=num_blocks,
        max_draft_tokens=max_draft_tokens,
        row_tile=row_tile,
        second_pages=max_batch_size if max_draft_tokens else 0,
    )


def _poisoned_cache(
    kernels: Kernels, layer: KVLayer, dtype: torch.dtype, device: torch.device, num_blocks: int
) -> LayerCache:
    """A layer's cache full of NaN, but for the reserved blocks."""
    cache = layer.new_cache(kernels, num_blocks + 1, dtype, device)
    poison(cache)
    kernels.zero_blocks(cache, torch.tensor([0, num_blocks], device=device))
    return cache


def _states(model: CausalModel, limits: BatchLimits, dtype: torch.dtype) -> tuple[LayerState, ...]:
    """Pages full of NaN, for each slot of a model on the CPU, and the second ones."""
    size, device = 1 + limits.max_batch_size + limits.second_pages, torch.device("cpu")
    states = tuple(layer.new(size, dtype, device) for layer in model.geometry.states)
    for tensor in itertools.chain.from_iterable(each.tensors for each in states):
        tensor.fill_(torch.nan)
    return states


class Stepper:
    """Sequences by slot, with blocks of their own; free pages hold NaN."""

    def __init__(
        self,
        model: CausalModel,
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        graphs: GraphSettings | None = None,
        pieces: GraphSettings | None = None,
        device: torch.device | str = "cpu",
        speculation: Speculation | None = None,
        grammars: GrammarManager | None = None,
        max_draft_tokens: int = 0,
        row_tile: int = 1,
        max_batch_size: int = MAX_BATCH_SIZE,
        adapters: AdapterTable | None = None,
        cache_dtype: torch.dtype | None = None,
        images: FeatureRows | None = None,
    ) -> None:
        """`max_draft_tokens` for a proposer that `use` sets; `pieces` for steps that are no plain decodes."""
        self.device = torch.device(device)
        self.block_size = kernels.block_size
        layers = model.geometry.layers
        if speculation is not None:
            layers = (*layers, *speculation.layers)
            max_draft_tokens = speculation.max_draft_tokens
        limits = _limits(kernels, model.info.vocab_size, max_batch_size, max_draft_tokens, row_tile)
        self.cache = [
            _poisoned_cache(kernels, layer, cache_dtype or dtype, self.device, limits.num_blocks)
            for layer in layers
        ]
        self.batch = Batch(limits, self.device, adapters, _states(model, limits, dtype), images)
        own = len(model.geometry.layers)
        self.cache, self.draft_cache = self.cache[:own], self.cache[own:]
        single, proposer = ProcessGroup.single(), None
        self.graphs = None
        with torch.inference_mode():
            if graphs is not None:
                self.graphs = DecodeGraphs(model, kernels, self.cache, self.batch)
                self.graphs.capture(graphs, single)
            if pieces is not None:
                model = with_pieces(model, kernels, self.cache, self.batch, pieces, single)
            if speculation is not None:
                proposer = speculation.proposer(model, kernels, self.draft_cache, self.batch, dtype)
            if graphs is not None:
                capture_drafts(proposer, model, kernels, self.cache, self.batch, graphs, single)
            features = DecodingFeatures(grammars=grammars, proposer=proposer)
            self.runner = StepRunner(
                model, kernels, self.cache, self.batch, self.graphs, features, dtype=dtype
            )
        self.free = list(range(1, limits.num_blocks))

    def use(self, proposer: Proposer) -> None:
        """Draft with `proposer` from now on."""
        self.runner._proposer = proposer
        self.runner._planner = StepPlanner(self.batch, proposer)

    def admission(self, slot: int, ids: Iterable[int], **fields: object) -> Forward:
        """The step that admits a sequence, with room for 16 tokens more, and computes all of its prompt."""
        top = fields.pop("top_n_tokens", 0)
        prefill_logprobs = fields.pop("prefill_logprobs", False)
        prefill_top = fields.pop("prefill_top_n_tokens", 0)
        grammar = fields.pop("grammar", None)
        adapter_slot = fields.pop("adapter_slot", 0)
        pooling = fields.pop("pooling", None)
        sequence = Sequence(
            slot=slot,
            request_id=slot,
            state_page=1 + slot,
            input_ids=ints(ids),
            parameters=Sampling(**fields),  # type: ignore[arg-type]
            top_n_tokens=top,  # type: ignore[arg-type]
            prefill_logprobs=prefill_logprobs,  # type: ignore[arg-type]
            prefill_top_n_tokens=prefill_top,  # type: ignore[arg-type]
            grammar=grammar,  # type: ignore[arg-type]
            adapter_slot=adapter_slot,  # type: ignore[arg-type]
            pooling=pooling,  # type: ignore[arg-type]
        )
        count = -(-(sequence.num_inputs + 16) // self.block_size)
        blocks = [self.free.pop(0) for _ in range(count)]
        return Forward(
            change=BatchChange(
                admitted=(sequence,), grown_slots=ints([slot] * count), grown_blocks=ints(blocks)
            ),
            chunk_slots=ints([slot]),
            chunk_tokens=ints([sequence.num_inputs]),
        )

    def run(self, step: Forward) -> StepResult:
        with torch.inference_mode():
            return self.runner.launch(step).finish()

    def decode(self, slots: Iterable[int]) -> StepResult:
        return self.run(Forward(decode_slots=ints(slots)))


def after_prompt(step: Forward, other: Forward, *, dropped: Iterable[int] = ()) -> Forward:
    """`step` after the chunk of `other`, which admits its sequence; the slots `dropped` are given up first."""
    change = replace(
        step.change,
        dropped_slots=ints(dropped),
        admitted=(*other.change.admitted, *step.change.admitted),
        grown_slots=np.concatenate([other.change.grown_slots, step.change.grown_slots]),
        grown_blocks=np.concatenate([other.change.grown_blocks, step.change.grown_blocks]),
    )
    return replace(
        step,
        change=change,
        chunk_slots=np.concatenate([other.chunk_slots, step.chunk_slots]),
        chunk_tokens=np.concatenate([other.chunk_tokens, step.chunk_tokens]),
    )


def beside(step: Forward, decodes: Iterable[int]) -> Forward:
    """The same step with decodes in it."""
    return replace(step, decode_slots=ints(decodes))
