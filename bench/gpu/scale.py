"""Sizes of models and loads: real ones for a GPU, or tiny ones that run the same code on any machine."""

from __future__ import annotations

from dataclasses import dataclass

from bench.harness.checkpoints import SHAPES, Shape

GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)


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
    num_steps: int
    """Decodes measured for each batch."""
    num_warm_ups: int
    repeats: int
    matrix_size: int
    buffer_bytes: int
    """Bytes of the buffer for the memory's rate."""

    @property
    def max_prefill_tokens(self) -> int:
        """Most prompt tokens of one step."""
        return self.prefill[0] * self.prefill[1]

    @property
    def room(self) -> int:
        """Tokens by which the first sequence grows over all batches."""
        return len(self.batches) * (self.num_steps + self.num_warm_ups)

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
        repeats=5,
        matrix_size=8192,
        buffer_bytes=8 << 30,
    ),
    "tiny": Scale(
        model=TINY,
        small=TINY,
        batches=(1, 2, 4),
        context=24,
        small_batch=2,
        small_contexts=(8,),
        prefill=(2, 48),
        load=Load(4, 16, 8),
        max_tokens=128,
        num_steps=4,
        num_warm_ups=1,
        repeats=2,
        matrix_size=128,
        buffer_bytes=1 << 20,
    ),
}
