"""Each kernel by itself at the sizes of the model: bytes and operations a second, for decodes and for a prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from bench.gpu import goals
from bench.gpu.computed import BF16, INT4
from bench.gpu.engine.clock import REPEATS, median_ms
from bench.gpu.engine.kernels import served_kernels
from bench.gpu.engine.scale import Scale
from bench.gpu.figures import Figure
from bench.gpu.setting import Emit, Setting
from bench.harness.checkpoints import Shape
from millrace_shard.kernels.agreement import Random, filled_cache, ragged_batch, rope_table
from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.layer_shape import LayerShape
from millrace_shard.kernels.layer_weights import LinearWeights
from millrace_shard.kernels.quantized import CodeFormat
from millrace_shard.kernels.stored_weight import StoredWeight

DTYPE = torch.bfloat16
MODES = {"fast": "off", "deterministic": "on"}
"""Names of the modes, and the values of --deterministic."""
FOUR_BITS = CodeFormat(values=tuple(range(16)), group_size=128, has_offsets=True)
UNCACHED_BYTES = 512 << 20
"""Weights in turn, so that no cache of the GPU has the next ones."""
AT_ONCE = 10
"""Runs in one graph: the host takes longer to launch a short kernel than the GPU to run it."""
SECONDS = 1.5
"""Time for one more case."""

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel with its arguments, the bytes that it has to move and its operations."""

    name: str
    work: Work
    num_bytes: float
    flops: float = 0.0
    is_decode: bool = True
    """Whether it is part of a captured graph in service."""


@torch.inference_mode()
def run(setting: Setting, emit: Emit) -> None:
    """Emit the time of each case with its bytes and operations; fast mode first."""
    for mode, deterministic in MODES.items():
        kernels = served_kernels(setting.flags, setting.device, setting.scale.model, deterministic)
        for case in cases(kernels, setting):
            if not setting.has_time_for(SECONDS):
                return
            emit(
                Figure(
                    name=f"{case.name}, {mode}",
                    kind=goals.RATE,
                    value=1e3 * milliseconds(case, setting.device),
                    unit="µs",
                    detail={"bytes": case.num_bytes, "flops": case.flops},
                )
            )


def milliseconds(case: Case, device: torch.device) -> float:
    """Median time of one run on the device."""
    if device.type != "cuda":
        return median_ms(case.work, device, repeats=1)
    if not case.is_decode:
        return median_ms(case.work, device, repeats=REPEATS)
    # Compiled, and with the memory of libraries, before the capture.
    for _ in range(AT_ONCE):
        case.work()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(AT_ONCE):
            case.work()
    return median_ms(graph.replay, device, repeats=REPEATS) / AT_ONCE


def cases(kernels: Kernels, setting: Setting) -> Iterator[Case]:
    """Linears of 16 and 4 bits, attention, and the kernels over rows."""
    scale, random = setting.scale, Random(DTYPE, setting.device)
    shape = scale.model
    prompt = scale.prefill[0] * scale.prefill[1]
    outputs, inputs = 2 * shape.intermediate_size, shape.hidden_size
    for stored, name in ((BF16, "linear"), (INT4, "linear over 4 bits")):
        weight_bytes = stored * outputs * inputs
        linears = _linears(kernels, random, (outputs, inputs), stored)
        for rows in (*scale.batches[:3], prompt):
            x = random(rows, inputs)
            yield Case(
                f"{name} {inputs} to {outputs}, {rows} rows",
                _in_turn([partial(linear, x) for linear in linears]),
                weight_bytes + BF16 * rows * (inputs + outputs),
                2.0 * rows * outputs * inputs,
                is_decode=rows != prompt,
            )
    yield from _attention(kernels, scale, random)
    yield from _over_rows(kernels, shape, random, prompt)


def _linears(
    kernels: Kernels, random: Random, sizes: tuple[int, int], stored: float
) -> Sequence[Callable[[Tensor], Tensor]]:
    """So many equal ones that all of them have UNCACHED_BYTES on a GPU."""
    outputs, inputs = sizes
    count = math.ceil(UNCACHED_BYTES / (stored * outputs * inputs))
    if random.device.type != "cuda":
        count = 1
    if stored == BF16:
        return [kernels.linear(random(outputs, inputs) / inputs**0.5) for _ in range(count)]
    weights = (FOUR_BITS.random(outputs, inputs, random.device, seed) for seed in range(count))
    return [
        kernels.linear_from(LinearWeights(StoredWeight((weight,), DTYPE, random.device)))
        for weight in weights
    ]


def _in_turn(works: Sequence[Work]) -> Work:
    turns = cycle(works)

    def work() -> object:
        return next(turns)()

    return work


def _attention(kernels: Kernels, scale: Scale, random: Random) -> Iterator[Case]:
    """Decodes over full contexts, and prompts without a prefix."""
    shape, (_, length) = scale.model, scale.prefill
    layer = LayerShape(
        num_heads=shape.num_heads, num_kv_heads=shape.num_key_value_heads, head_dim=shape.head_size
    )
    width = shape.num_heads * shape.head_size
    kv_bytes = 2 * BF16 * shape.num_key_value_heads * shape.head_size
    for rows, queries, context in (
        *((rows, 1, scale.context) for rows in scale.batches[1:3]),
        (1, length, length),
    ):
        counts, contexts = [queries] * rows, [context] * rows
        cache = filled_cache(kernels, random, layer, contexts)
        batch = ragged_batch(counts, contexts, block_size=kernels.block_size, device=random.device)
        q = random(rows * queries, shape.num_heads, shape.head_size)
        # A query sees the positions up to its own.
        pairs = rows * (context if queries == 1 else queries * (queries + 1) / 2)
        yield Case(
            f"attention, {rows} x {queries} queries at {context}",
            partial(kernels.attend, q, batch, cache, scale=shape.head_size**-0.5),
            rows * (context * kv_bytes + 2 * BF16 * queries * width),
            4.0 * pairs * width,
            is_decode=queries == 1,
        )


def _over_rows(kernels: Kernels, shape: Shape, random: Random, prompt: int) -> Iterator[Case]:
    """The norm after a residual, the activation, and the rotation with its store, for the rows of a prompt."""
    hidden, inter, size = shape.hidden_size, shape.intermediate_size, shape.head_size
    heads, kv_heads = shape.num_heads, shape.num_key_value_heads
    x, residual, weight = random(prompt, hidden), random(prompt, hidden), random(hidden)
    yield Case(
        f"norm after a residual, {prompt} rows",
        partial(kernels.add_rms_norm, x, residual, weight, 1e-5),
        4 * BF16 * prompt * hidden,
        is_decode=False,
    )
    gate_up = random(prompt, 2 * inter)
    yield Case(
        f"activation, {prompt} rows",
        partial(kernels.silu_mul, gate_up),
        3 * BF16 * prompt * inter,
        is_decode=False,
    )
    layer = LayerShape(num_heads=heads, num_kv_heads=kv_heads, head_dim=size)
    cache = filled_cache(kernels, random, layer, [prompt])
    batch = ragged_batch([prompt], [prompt], block_size=kernels.block_size, device=random.device)
    rope = rope_table(size, prompt).to(random.device)
    qkv = random(prompt, (heads + 2 * kv_heads) * size)
    yield Case(
        f"rotation and store, {prompt} rows",
        lambda: kernels.rope_store(qkv, rope, batch, cache, num_heads=heads, num_kv_heads=kv_heads),
        2 * BF16 * qkv.numel(),
        is_decode=False,
    )
