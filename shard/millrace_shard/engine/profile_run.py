"""The profile run: the largest possible steps, run once over dummy sequences."""

from __future__ import annotations

import numpy as np

from millrace_shard.batch.sequence import SamplingParameters, Sequence
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
                _sequence(slot, length, prefill_logprobs=scores)
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


def _sequence(slot: int, length: int, *, prefill_logprobs: bool) -> Sequence:
    return Sequence(
        slot=slot,
        request_id=0,
        input_ids=np.zeros(length, dtype=np.int64),
        parameters=SamplingParameters(
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
