"""Sizes of models and loads: real ones for a GPU, or tiny ones that run the same code on any machine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.harness.checkpoints import SHAPES, Shape


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that all arrive at once: their number, prompt tokens and new tokens."""

    streams: int
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Models, batches and repetitions."""

    model: Shape
    small: Shape
    """A model whose steps are shorter than the CPU work around them."""
    batches: tuple[int, ...]
    """Batch sizes of decodes at `context` tokens each, ascending."""
    context: int
    small_batch: int
    small_contexts: tuple[int, ...]
    prefill: tuple[int, int]
    """Number of prompts in one step, and the tokens of each."""
    load: Load
    max_tokens: int
    """Most tokens of one sequence."""
    memory_tokens: int | None
    """Tokens of a full KV cache; None: as many as the memory has room for."""
    memory_rows: int
    """Most sequences of a full KV cache."""
    num_steps: int
    """Decodes measured for each batch."""
    num_warm_ups: int
    num_profiled: int
    """Decodes under the profiler for each batch."""
    repeats: int
    matrix_size: int
    buffer_bytes: int
    """Bytes of the buffer for the memory's rate."""
    checked_dtypes: tuple[torch.dtype, ...]
    checked_head_dims: tuple[int, ...]
    checked_groups: tuple[int, ...]
    """Query heads of a key-value head."""
    company: int
    """Sequences in the batch besides the one whose bits are compared."""
    contexts: tuple[int, ...]
    """Lengths of the sequence whose bits are compared."""
    random_steps: int
    """Random steps that are compared with a shard on CPU."""
    verified: Shape | None
    """The model that `millrace-verify` checks; None: the demo model."""
    verify_flags: tuple[str, ...]
    """Flags of `millrace-verify`."""
    tests: tuple[str, ...]
    """Patterns of the test files."""

    @property
    def max_prefill_tokens(self) -> int:
        """Most prompt tokens of one step."""
        return self.prefill[0] * self.prefill[1]

    @property
    def room(self) -> int:
        """Tokens by which the first sequence grows over all batches."""
        return len(self.batches) * (self.num_steps + self.num_warm_ups + self.num_profiled)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence of a full batch."""
        return max(self.context + self.room, self.load.prompt_tokens + self.load.new_tokens)


LLAMA_8B = Shape(
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_key_value_heads=8,
    intermediate_size=14336,
    vocab_size=128256,
)
"""A step reads the tied head like an untied one."""
TINY = Shape(
    hidden_size=128,
    num_layers=2,
    num_heads=4,
    num_key_value_heads=2,
    intermediate_size=256,
    vocab_size=18560,
)
ONE_LAYER = Shape(
    hidden_size=64,
    num_layers=1,
    num_heads=2,
    num_key_value_heads=1,
    intermediate_size=128,
    vocab_size=1024,
)
"""The interpreter takes long for each layer and head of a row, and for each tile of outputs of a linear."""

SCALES = {
    "8b": Scale(
        model=LLAMA_8B,
        small=SHAPES["135m"],
        batches=(1, 32, 128, 256),
        context=1024,
        small_batch=32,
        small_contexts=(128, 1024),
        prefill=(8, 2048),
        load=Load(128, 128, 256),
        max_tokens=4096,
        num_steps=48,
        num_warm_ups=8,
        num_profiled=20,
        repeats=5,
        matrix_size=8192,
        buffer_bytes=8 << 30,
        memory_tokens=None,
        memory_rows=256,
        checked_dtypes=(torch.bfloat16, torch.float16),
        checked_head_dims=(128, 64, 96, 80, 256),
        checked_groups=(4, 1, 8, 7, 5, 2, 16),
        company=40,
        contexts=(70, 600),
        random_steps=1000,
        verified=None,
        verify_flags=("--cases=batched",),
        tests=(
            "tests/shard/kernels/cuda/test_cuda_*.py",
            "tests/shard/model_runner/test_decode_graphs.py",
            "tests/shard/model_runner/test_draft_graphs.py",
            "tests/shard/model_runner/test_no_waiting.py",
            "tests/shard/device/test_transfers.py",
        ),
    ),
    "tiny": Scale(
        model=TINY,
        small=ONE_LAYER,
        batches=(1, 2, 4),
        context=24,
        small_batch=2,
        small_contexts=(8,),
        prefill=(2, 48),
        load=Load(4, 16, 8),
        max_tokens=128,
        num_steps=4,
        num_warm_ups=1,
        num_profiled=2,
        repeats=2,
        matrix_size=128,
        buffer_bytes=1 << 20,
        memory_tokens=400,
        memory_rows=3,
        checked_dtypes=(torch.bfloat16,),
        checked_head_dims=(64,),
        checked_groups=(2,),
        company=3,
        contexts=(70,),
        random_steps=60,
        verified=ONE_LAYER,
        verify_flags=("--cases=batched", "--requests=5", "--max-new-tokens=16"),
        tests=("tests/shard/kernels/cuda/test_cuda_decoder.py",),
    ),
}
