"""`python -m bench.latent`: a step of attention over latents (MLA), against the time to read its bytes.

Random weights in the shape of DeepSeek-V2-Lite, cut to four layers, the first of them dense; one row decodes after
`--context` tokens. In each round the step and a sum over a gibibyte are timed in turn. The floor is the time to read
the weights that a row uses, its latents and the head, at the median rate of the sums. It takes 5 GB of memory.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bench.comparison.roofline_probe import READ_VALUES
from millrace_shard.kernels.agreement import ragged_batch
from millrace_shard.kernels.base import Kernels, Layer, MlpBlock
from millrace_shard.kernels.build import load_operators
from millrace_shard.kernels.cpu.operators import CpuKernels
from millrace_shard.kernels.expert_weights import (
    ExpertsWeights,
    ExpertWeights,
    MixtureWeights,
    RouterWeights,
    RoutingRule,
    Scoring,
    SharedExpertWeights,
)
from millrace_shard.kernels.layer_weights import (
    Activation,
    LatentWeights,
    LinearWeights,
    MlpWeights,
    NormWeights,
    Rotation,
)
from millrace_shard.kernels.stored_weight import StoredWeight

DTYPE = torch.bfloat16
LAYERS = 4
HIDDEN, VOCAB, DENSE = 2048, 102_400, 10_944
HEADS, LATENT, ROPE, KEY, VALUE = 16, 512, 64, 128, 128
EXPERTS, CHOSEN, SHARED, INTER = 64, 6, 2, 1408
EPS = 1e-6


def weight(*shape: int) -> Tensor:
    """A random weight of a realistic scale."""
    return torch.randn(*shape, dtype=DTYPE) * 0.02


def linear(outputs: int, inputs: int) -> LinearWeights:
    """A random linear."""
    return LinearWeights(StoredWeight.of(weight(outputs, inputs)))


def norm(size: int) -> NormWeights:
    """A norm that multiplies by 1."""
    return NormWeights(weight=torch.ones(size, dtype=DTYPE), eps=EPS)


def attention() -> LatentWeights:
    """The first half of a layer, whose queries are made of the hidden state."""
    return LatentWeights(
        norm=norm(HIDDEN),
        first=linear(HEADS * (KEY + ROPE) + LATENT + ROPE, HIDDEN),
        queries_norm=None,
        queries=None,
        latent_norm=norm(LATENT),
        keys=weight(HEADS, LATENT, KEY),
        values=weight(HEADS, VALUE, LATENT),
        out=linear(HIDDEN, HEADS * VALUE),
        rope_dim=ROPE,
        scale=(KEY + ROPE) ** -0.5,
        rotation=Rotation(table=torch.randn(1 << 15, ROPE), interleaved=True),
    )


def feed_forward(kernels: Kernels, *, dense: bool) -> MlpBlock:
    """The second half of a layer."""
    if dense:
        gate_up, down = linear(2 * DENSE, HIDDEN), linear(HIDDEN, DENSE)
        return kernels.mlp(MlpWeights(norm=norm(HIDDEN), gate_up=gate_up, down=down))

    def experts() -> Iterator[ExpertWeights]:
        for _ in range(EXPERTS):
            yield ExpertWeights(gate_up=linear(2 * INTER, HIDDEN), down=linear(HIDDEN, INTER))

    rule = RoutingRule(top_k=CHOSEN, scoring=Scoring.SOFTMAX)
    router = RouterWeights(
        weight=torch.randn(EXPERTS, HIDDEN), bias=None, correction=None, rule=rule
    )
    shared = SharedExpertWeights(
        gate_up=linear(2 * SHARED * INTER, HIDDEN),
        down=linear(HIDDEN, SHARED * INTER),
        activation=Activation.SILU,
        gate=None,
    )
    own = ExpertsWeights(
        router=router, experts=experts(), activation=Activation.SILU, inter=INTER, dtype=DTYPE
    )
    return kernels.mixture(MixtureWeights(norm=norm(HIDDEN), experts=own, shared=shared))


def bytes_read(context: int) -> int:
    """The bytes that a step of one row reads: weights of the layers that it uses, its latents, and the head."""
    queries = HEADS * (KEY + ROPE) + LATENT + ROPE
    of_heads = HEADS * (KEY + VALUE) * LATENT
    attended = HIDDEN * (queries + HEADS * VALUE) + of_heads + context * (LATENT + ROPE)
    sparse = 3 * HIDDEN * INTER * (CHOSEN + SHARED) + 2 * HIDDEN * EXPERTS
    layers = LAYERS * attended + 3 * HIDDEN * DENSE + (LAYERS - 1) * sparse
    return 2 * (layers + VOCAB * HIDDEN)


def step(kernels: Kernels, context: int) -> Callable[[], Tensor]:
    """One decoding step after `context` - 1 tokens, ready to call."""
    layers = kernels.layers(
        [
            Layer(kernels.latent_attention(attention()), feed_forward(kernels, dense=index == 0))
            for index in range(LAYERS)
        ],
        None,
    )
    batch = ragged_batch([1], [context], block_size=kernels.block_size)
    num_blocks = int(batch.block_tables.max()) + 1
    caches = []
    for _ in range(LAYERS):
        cache = kernels.new_cache(
            num_blocks=num_blocks,
            num_kv_heads=1,
            head_dim=LATENT + ROPE,
            dtype=DTYPE,
            device=torch.device("cpu"),
            latent_dim=LATENT,
        )
        cache.keys.normal_()
        caches.append(cache)
    head, last = kernels.head(weight(VOCAB, HIDDEN)), torch.ones(HIDDEN, dtype=DTYPE)
    embedded = torch.randn(1, HIDDEN, dtype=DTYPE)

    def forward() -> Tensor:
        residual = embedded.clone()
        x = layers(residual, batch, caches)
        return head(kernels.add_rms_norm(x, residual, last, EPS))

    return forward


def seconds(call: Callable[[], object]) -> float:
    """The time of a call: of this thread's CPU with one thread."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    begin = clock()
    call()
    return clock() - begin


def main() -> None:
    """Print medians."""
    parser = argparse.ArgumentParser(prog="python -m bench.latent", description=__doc__)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    load_operators()
    forward = step(CpuKernels(deterministic=True), arguments.context)
    probe = torch.ones(READ_VALUES)
    forward(), probe.sum()
    times, reads = list[float](), list[float]()
    for _ in range(arguments.rounds):
        times.append(seconds(forward))
        reads.append(seconds(probe.sum))
    rate = 4.0 * READ_VALUES / statistics.median(reads)
    size = bytes_read(arguments.context)
    median, floor = statistics.median(times), size / rate
    print("| context | threads | MB read | GB/s | floor, ms | step, ms | step / floor |")
    print("|--:|--:|--:|--:|--:|--:|--:|")
    print(
        f"| {arguments.context} | {arguments.threads} | {size / 1e6:.0f} | {rate / 1e9:.1f}"
        f" | {1e3 * floor:.1f} | {1e3 * median:.1f} | {median / floor:.2f} |"
    )


if __name__ == "__main__":
    main()
