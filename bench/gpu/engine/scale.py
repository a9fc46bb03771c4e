"""Sizes of models and loads: real ones for a GPU, or tiny ones that run the same code on any machine."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from bench.gpu.engine.parts import FORMATS, Parts
from bench.gpu.engine.pictures import Encoder
from bench.gpu.engine.recurrent_layers import RecurrentLayer, Rule
from bench.harness.checkpoints import SHAPES, Shape
from millrace_shard.vision.spec import EncoderSpec


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
    parts: Parts
    """What served models have in addition to the attention of Llama."""
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

SIGLIP = EncoderSpec(
    hidden_size=1152,
    intermediate_size=4304,
    num_layers=1,
    num_heads=16,
    patch_size=14,
    positions_per_side=16,
    eps=1e-6,
)
"""A layer of the encoder of Gemma 3."""
SERVED_PARTS = Parts(
    dtype=torch.bfloat16,
    head_dim=128,
    latents=(16, 512, 64),
    recurrent={
        "convolution of LFM2": RecurrentLayer(rule=Rule.CONVOLUTION, width=2048),
        "delta rule of Qwen3-Next": RecurrentLayer(
            rule=Rule.DELTA, width=128, inner=128, heads=32, groups=16
        ),
        "delta rule of Kimi Linear": RecurrentLayer(
            rule=Rule.DELTA_BY_CHANNEL, width=128, inner=128, heads=32, groups=32
        ),
        "Mamba-2 of Granite 4": RecurrentLayer(rule=Rule.MAMBA_2, width=64, inner=128, heads=128),
        "Mamba of Falcon": RecurrentLayer(rule=Rule.MAMBA_1, width=8192, inner=16),
    },
    encoder=Encoder(spec=SIGLIP, patches=256),
    formats=FORMATS,
    hidden=512,
    num_rows=(1, 40, 300),
)
TINY_PARTS = Parts(
    dtype=torch.float32,
    head_dim=64,
    latents=(2, 32, 16),
    recurrent={
        "delta rule": RecurrentLayer(rule=Rule.DELTA, width=16, inner=16, heads=2),
        "Mamba-2": RecurrentLayer(rule=Rule.MAMBA_2, width=16, inner=16, heads=2),
    },
    encoder=Encoder(
        spec=replace(SIGLIP, hidden_size=64, intermediate_size=64, num_heads=2), patches=64
    ),
    formats={name: FORMATS[name] for name in ("int4 with zeros", "e4m3")},
    hidden=64,
    num_rows=(1, 3),
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
        parts=SERVED_PARTS,
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
        parts=TINY_PARTS,
        tests=("tests/shard/kernels/cuda/test_cuda_decoder.py",),
    ),
}
