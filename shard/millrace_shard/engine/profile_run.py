"""The profile run: the largest possible steps, run once over dummy sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from millrace_proto.sampling import Sampling
from millrace_shard.batch.sequence import Ids, Sequence
from millrace_shard.batch.step import BatchChange, Forward
from millrace_shard.engine.kv_capacity import CapacityError
from millrace_shard.model_runner.runner import StepRunner


def run_largest(runner: StepRunner, lengths: list[int], *, decode: bool = False) -> None:
    """Run a step over prompts of these lengths that uses every part of sampling, then drop the sequences.

    With `decode` and speculative decoding, a step with all draft tokens follows. Raises any error of the device.
    """
    # Scores of prompts need little memory. They are slow on CPU; on CUDA they are fast, and their memory counts.
    scores = runner.batch.device.type == "cuda"
    size, max_drafts = runner.batch.limits.block_size, runner.batch.limits.max_draft_tokens
    decode = decode and max_drafts > 0
    room = 1 + max_drafts if decode else 0
    num_blocks = [-(-(length + room) // size) for length in lengths]
    slots = np.arange(len(lengths))
    prompts = Forward(
        change=BatchChange(
            admitted=tuple(
                _sequence(slot, np.zeros(length, dtype=np.int64), prefill_logprobs=scores)
                for slot, length in enumerate(lengths)
            ),
            grown_slots=np.repeat(slots, num_blocks),
            grown_blocks=np.arange(1, 1 + sum(num_blocks)),
        ),
        chunk_slots=slots,
        chunk_tokens=np.array(lengths, dtype=np.int64),
    )
    runner.launch(prompts).finish()
    if decode:
        drafting = Forward(
            decode_slots=slots,
            decode_tokens=np.full(len(slots), room),
            draft_tokens=np.full(len(slots), max_drafts),
        )
        runner.launch(drafting).finish()
    runner.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestDecode:
    """A decode in which every sequence of the batch has its greatest length, up to a part of a block.

    All positions but the last few lie in block 1, which the sequences share as they share a cached prefix: memory
    follows from the lengths and not from the values, so that no prompt is computed.
    """

    num_rows: int
    max_tokens: int
    block_size: int
    max_drafts: int

    @property
    def num_cached(self) -> int:
        """Tokens of each sequence in the shared block; one more token of the prompt is computed before the decode."""
        return max(0, self.max_tokens - 2 - self.max_drafts) // self.block_size * self.block_size

    @property
    def num_own_blocks(self) -> int:
        """Blocks of each sequence behind the shared ones."""
        return -(-(2 + self.max_drafts) // self.block_size)

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache that the decode needs, with block 0."""
        return 2 + self.num_rows * self.num_own_blocks

    def run(self, runner: StepRunner) -> None:
        """Run a step with the last token of each prompt, then the decode; then drop the sequences.

        Both use every part of sampling. Raises any error of the device.
        """
        ids = np.zeros(self.num_cached + 1, dtype=np.int64)
        slots = np.arange(self.num_rows)
        for slot in slots.tolist():
            # One at a time, because the router never grows all tables by their whole length in one step.
            runner.launch(Forward(change=self._admission(slot, ids)))
        ones = np.ones(self.num_rows, dtype=np.int64)
        runner.launch(Forward(chunk_slots=slots, chunk_tokens=ones)).finish()
        decode = Forward(
            decode_slots=slots,
            decode_tokens=ones + self.max_drafts,
            draft_tokens=ones * self.max_drafts,
        )
        runner.launch(decode).finish()
        runner.clear()

    def _admission(self, slot: int, ids: Ids) -> BatchChange:
        shared = np.ones(self.num_cached // self.block_size, dtype=np.int64)
        own = 2 + slot * self.num_own_blocks + np.arange(self.num_own_blocks)
        blocks = np.concatenate([shared, own])
        return BatchChange(
            admitted=(_sequence(slot, ids, num_cached=self.num_cached),),
            grown_slots=np.full(len(blocks), slot),
            grown_blocks=blocks,
        )


def _sequence(
    slot: int, ids: Ids, *, num_cached: int = 0, prefill_logprobs: bool = False
) -> Sequence:
    return Sequence(
        slot=slot,
        request_id=0,
        input_ids=ids,
        cached_tokens=num_cached,
        parameters=Sampling(
            temperature=0.9,
            top_k=10,
            top_p=0.9,
            typical_p=0.9,
            do_sample=True,
            repetition_penalty=1.2,
            frequency_penalty=0.1,
            # A repetition of the prompt, so that n-grams propose as many draft tokens as allowed.
            bias=((0, 1e9),),
        ),
        top_n_tokens=5,
        prefill_logprobs=prefill_logprobs,
        prefill_top_n_tokens=5,
    )


def cache_too_large(num_tokens: int) -> CapacityError:
    """The error for a cache that does not fit although it was planned."""
    return CapacityError(f"Not enough memory for a KV cache of {num_tokens} tokens")


def prefill_too_large(num_tokens: int) -> CapacityError:
    """The error for a largest prefill that does not fit."""
    return CapacityError(
        f"Not enough memory to handle {num_tokens} prefill tokens. "
        "You need to decrease `--max-batch-prefill-tokens`"
    )


def batch_too_large(num_rows: int) -> CapacityError:
    """The error for a largest batch that does not fit."""
    return CapacityError(
        f"Not enough memory to choose the tokens of {num_rows} sequences at once. "
        "You need to decrease `--max-batch-size`"
    )


def contexts_too_long(num_rows: int, max_tokens: int) -> CapacityError:
    """The error for a decode of the longest sequences that does not fit."""
    return CapacityError(
        f"Not enough memory to decode {num_rows} sequences of {max_tokens} tokens at once. "
        "You need to decrease `--max-batch-size` or `--max-total-tokens`"
    )
