"""`python -m bench.accuracy`: the effect of dtypes of weights and KV, on the demo model's held-back questions.

The answers are given; the figures are the probabilities that the model gives to their tokens. The reference is float32
by the plain kernels. The demo model is small and confident; a larger model may lose less or more.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace

import torch
from demo import corpus
from demo.measure import MODEL, SEED, sample
from demo.train import Sample, encode
from tokenizers import Tokenizer
from torch import Tensor

from bench.harness.tables import markdown
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.kernels.agreement import ragged_batch
from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.choose import choose_kernels
from millrace_shard.kernels.cpu.int8_linear import is_fast, with_int8
from millrace_shard.kernels.kv_cache import CACHE_DTYPES
from millrace_shard.kernels.layer_shape import LayerShape
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.models.load import load_model

QUESTIONS = 400
CPU = torch.device("cpu")


def main() -> int:
    """Print the table."""
    argparse.ArgumentParser(prog="python -m bench.accuracy", description=__doc__).parse_args()
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    samples = encode(tokenizer, sample(corpus.generate(SEED, size=0).held_back, QUESTIONS))
    fast = choose_kernels(CPU, torch.bfloat16, deterministic=True, shapes=[LayerShape.small(64)])
    plain, half = PlainKernels(deterministic=True), torch.bfloat16
    ways: dict[str, Way] = {
        "float32, plain torch": Way(plain, torch.float32),
        "bfloat16, plain torch": Way(plain, half),
        f"bfloat16, {fast.name} kernels": Way(fast, half),
        **{
            f"bfloat16, {fast.name} kernels, KV in {name}": Way(fast, half, dtype)
            for name, dtype in CACHE_DTYPES.items()
        },
        f"int8, {'cpu' if is_fast() else 'plain'} kernels": Way(with_int8(fast), half),
    }
    truth: Tensor | None = None
    rows = []
    for name, way in ways.items():
        logprobs, targets = answers(way, samples)
        truth = logprobs if truth is None else truth
        rows.append([name, *figures(logprobs, targets, truth)])
    heads = ["way", "nats a token", "KL", "same best token", "mean gap of it", "largest gap of it"]
    tokens = 0 if truth is None else len(truth)
    print(f"{tokens} tokens of {len(samples)} answers\n\n{markdown(heads, rows)}")
    return 0


def figures(logprobs: Tensor, targets: Tensor, truth: Tensor) -> list[str]:
    """Loss, mean KL from the truth, agreement on the best token, and the error of its log probability."""
    loss = -logprobs.gather(1, targets[:, None]).mean()
    best = truth.argmax(-1)
    same = (logprobs.argmax(-1) == best).double().mean()
    gaps = (logprobs - truth).gather(1, best[:, None]).abs()
    kl = (truth.exp() * (truth - logprobs)).sum(-1).mean()
    return [f"{loss:.5f}", f"{kl:.2e}", f"{same:.3%}", f"{gaps.mean():.5f}", f"{gaps.max():.3f}"]


@dataclass(frozen=True)
class Way:
    """How the model is computed."""

    kernels: Kernels
    dtype: torch.dtype
    cache_dtype: torch.dtype | None = None
    """None: `dtype`."""


def answers(way: Way, samples: list[Sample]) -> tuple[Tensor, Tensor]:
    """Log probabilities [N, vocab] before every token of an answer, and those tokens [N]."""
    kernels, dtype = way.kernels, way.dtype
    model = load_model(MODEL, dtype=dtype, kernels=kernels, group=ProcessGroup.single(), device=CPU)
    logprobs, targets = [], []
    for each in samples:
        ids = torch.tensor(each.ids, dtype=torch.int64)
        learned = torch.tensor(each.learned, dtype=torch.bool)
        batch = ragged_batch([len(ids)], [len(ids)], block_size=kernels.block_size)
        cache = [
            kernels.new_cache(
                num_blocks=int(batch.block_tables.max()) + 1,
                num_kv_heads=layer.num_kv_heads,
                head_dim=layer.head_dim,
                dtype=way.cache_dtype or dtype,
                device=CPU,
            )
            for layer in model.geometry.layers
        ]
        for layer in cache:
            kernels.zero_blocks(layer, torch.arange(len(layer.keys)))
        before = learned[1:].nonzero().flatten()
        step = replace(batch, ids=ids, logit_rows=before)
        logprobs.append(model.forward(step, cache).log_softmax(-1))
        targets.append(ids[1:][before])
    return torch.cat(logprobs), torch.cat(targets)


if __name__ == "__main__":
    sys.exit(main())
