"""Times the sampler that this process imports; prints JSON: milliseconds of each call, by case.

It is a process of its own, so that the same code can measure another checkout's sampler: see `--against`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from bench.kernels import Model, Shape
from bench.sampling.cases import CASES, Case
from millrace_proto.sampling import Sampling
from millrace_shard.batch.sequence import PARAMETERS, Sequence
from millrace_shard.kernels.build import load_operators
from millrace_shard.kernels.cpu.operators import CpuKernels
from millrace_shard.kernels.scores import RowMasks
from millrace_shard.sampling.sampler import Sampler, SamplingRows

NUM_PROMPT = 512
NUM_GENERATED = 64
STEP = "step"
MODEL = Shape(hidden=2048, inter=8192, layers=16, heads=32, kv_heads=8, vocab=128256)
"""A Llama of 1B with the vocabulary of Llama 3."""


def scores(num_rows: int, vocab: int, *, is_flat: bool) -> Tensor:
    """Logits rounded to bfloat16; peaked ones fall with the logarithm of the rank, as in language models."""
    generator = torch.Generator().manual_seed(vocab)
    noise = torch.randn(num_rows, vocab, generator=generator)
    if not is_flat:
        ranks = torch.randperm(vocab, generator=generator) + 1
        noise.mul_(0.7).sub_(2.0 * ranks.log())
    return noise.bfloat16().float()


def rows_of(kinds: list[Sampling], vocab: int) -> tuple[Tensor, SamplingRows]:
    """The token table, and the rows."""
    length = NUM_PROMPT + NUM_GENERATED
    history = np.random.default_rng(1).integers(0, vocab, (len(kinds), length + 8))
    columns = np.zeros(len(kinds), dtype=PARAMETERS)
    for i, kind in enumerate(kinds):
        columns[i] = Sequence(
            slot=i,
            request_id=i,
            input_ids=history[i, :length],
            generated_tokens=NUM_GENERATED,
            parameters=kind,
        ).columns()
    rows = SamplingRows(
        parameters=columns,
        positions=np.full(len(kinds), length),
        table_rows=np.arange(len(kinds)),
    )
    return torch.from_numpy(history.astype(np.int32)), rows


def sampling_of(case: Case, num_rows: int, vocab: int) -> Callable[[Tensor], object]:
    """A call that samples from logits, which it overwrites."""
    kinds = case.kinds(num_rows)
    history, rows = rows_of(kinds, vocab)
    sampler = Sampler(history, (2,))
    for slot, kind in enumerate(kinds):
        sampler.biases.put(slot, kind.bias)
    if not case.masked_share:
        return lambda logits: sampler.sample(logits, rows)
    masked = np.arange(0, num_rows, round(1 / case.masked_share))
    words = np.random.default_rng(2).integers(-(2**31), 2**31, (len(masked), -(-vocab // 32)))
    masks = RowMasks(rows=masked, bits=torch.from_numpy(words.astype(np.int32)))
    return lambda logits: sampler.sample(logits, rows, masks)


def times(call: Callable[[], object], prepare: Callable[[], object], rounds: int) -> list[float]:
    """Milliseconds of each round but the first: this thread's CPU time, or wall time with more than one thread."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    found = []
    for _ in range(rounds + 1):
        prepare()
        begin = clock()
        call()
        found.append((clock() - begin) * 1e3)
    return found[1:]


def time_cases(names: list[str], num_rows: int, vocab: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each call, by case."""
    found = {}
    bases = {is_flat: scores(num_rows, vocab, is_flat=is_flat) for is_flat in (False, True)}
    logits = torch.empty(num_rows, vocab)
    for case in CASES:
        if case.name in names:
            sample, base = sampling_of(case, num_rows, vocab), bases[case.is_flat]
            found[case.name] = times(
                lambda sample=sample: sample(logits),  # type: ignore[misc]
                lambda base=base: logits.copy_(base),  # type: ignore[misc]
                rounds,
            )
    return found


def time_step(num_rows: int, rounds: int) -> list[float]:
    """A whole decode step of a 1B model with `num_rows` rows and 64 cached tokens each."""
    model = Model(MODEL, CpuKernels(deterministic=True), 2 * num_rows + 8)
    step = model.step([65] * num_rows, [1] * num_rows)
    return times(step, lambda: None, rounds)


def main() -> None:
    """Read the command line, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", type=json.loads, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--vocab", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    load_operators()
    with torch.inference_mode():
        found = time_cases(options.names, options.rows, options.vocab, options.rounds)
        if STEP in options.names:
            found[STEP] = time_step(options.rows, max(1, options.rounds // 2))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
