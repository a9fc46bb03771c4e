"""A real decoder behind the engine: a sequence's tokens and logprobs, bit for bit, in any batch and any chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from millrace_proto.sampling import Sampling
from millrace_shard.arrays import Ints
from millrace_shard.batch.sequence import Sequence
from millrace_shard.batch.step import BatchChange, Forward, Open, Step, StepResult, Work
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.engine.engine import Engine
from millrace_shard.engine.kv_capacity import WarmupRequest
from millrace_shard.engine.loaded_model import LoadedModel
from millrace_shard.engine.warmup import MemoryLimits
from millrace_shard.kernels.cpu.operators import CpuKernels
from millrace_testing.engines.kernels import TILE_UNITS, make_kernels, tiles_by
from millrace_testing.models.models import read_model

NUM_TOKENS = 6
SAMPLING = (
    Sampling(do_sample=True, seed=5, temperature=1.2, top_p=0.9),
    Sampling(),
    Sampling(do_sample=True, seed=5, top_k=20, repetition_penalty=1.3),
    Sampling(do_sample=True, seed=9, typical_p=0.8, frequency_penalty=0.4),
)
PROMPTS = tuple(
    torch.randint(300, (length,), generator=torch.Generator().manual_seed(length)).numpy()
    for length in (19, 90, 3, 27)
)
WINDOW = 20
MOST_ROWS = 128
Found = list[tuple[int, int]]


class Shard:
    """An engine, and the number of its next step."""

    def __init__(self, loaded: LoadedModel, threads: int) -> None:
        self.block_size = loaded.kernels.block_size
        self.engine = Engine(
            limits=MemoryLimits(kv_memory=16 << 20), device=loaded.device, cpu_threads=threads
        )
        self.engine.attach(loaded)
        self.engine.start()
        plan = WarmupRequest(
            max_batch_prefill_tokens=64,
            max_batch_size=MOST_ROWS,
            max_concurrent_requests=MOST_ROWS,
        )
        self.engine.warm_up(plan).result(60)
        self.epoch = self.number = 0

    def open(self) -> None:
        """An empty batch."""
        self.epoch, self.number = self.epoch + 1, -1
        self.run(Open())

    def run(self, work: Work) -> StepResult:
        self.number += 1
        outcome = self.engine.step(Step(self.epoch, self.number, work)).result(60).outcome
        assert isinstance(outcome, StepResult), outcome
        return outcome

    def fill_pages(self, value: float) -> None:
        """Every page but the reserved one."""

        def fill() -> None:
            assert self.engine._warmed_up is not None
            for layer in self.engine._warmed_up.runner._cache:
                for each in layer.by_block:
                    fitting = 127.0 if each.dtype == torch.int8 else value
                    each[1:].copy_(torch.tensor(fitting).to(each.dtype))

        self.engine.submit(fill).result(60)


SHARDS = {
    "plain-fp32": ("plain", torch.float32, None, None, 1),
    "plain-bf16-window": ("plain", torch.bfloat16, None, WINDOW, 1),
    "plain-fp32-int8": ("plain", torch.float32, torch.int8, WINDOW, 1),
    "plain-bf16-e4m3": ("plain", torch.bfloat16, torch.float8_e4m3fn, None, 1),
    "cpu-fp32-window": ("cpu", torch.float32, None, WINDOW, 1),
    "cpu-fp32": ("cpu", torch.float32, None, None, 2),
    "cpu-fp32-e5m2": ("cpu", torch.float32, torch.float8_e5m2, None, 2),
    "cpu-bf16": ("cpu", torch.bfloat16, None, None, 1),
    "cpu-bf16-window": ("cpu", torch.bfloat16, None, WINDOW, 2),
    "cpu-bf16-avx512": ("cpu-avx512", torch.bfloat16, None, WINDOW, 2),
    "cpu-bf16-avx2": ("cpu-avx2", torch.bfloat16, None, WINDOW, 2),
    "cpu-bf16-without-tiles": ("cpu-without-tiles", torch.bfloat16, None, None, 2),
    "cpu-bf16-without-tiles-window": ("cpu-without-tiles", torch.bfloat16, None, WINDOW, 1),
    "cpu-bf16-int8": ("cpu", torch.bfloat16, torch.int8, None, 2),
    "cpu-bf16-avx512-e4m3": ("cpu-avx512", torch.bfloat16, torch.float8_e4m3fn, WINDOW, 2),
    "cpu-bf16-avx2-int8": ("cpu-avx2", torch.bfloat16, torch.int8, WINDOW, 2),
    "cpu-bf16-without-tiles-int8": ("cpu-without-tiles", torch.bfloat16, torch.int8, None, 2),
}
"""Kernels, dtype, dtype of the KV cache, attention window, threads."""


@pytest.fixture(scope="module", params=SHARDS)
def shard(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shard]:
    name, dtype, cache_dtype, window, threads = SHARDS[request.param]
    torch.manual_seed(1)
    config = MistralConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        initializer_range=0.2,
        sliding_window=window,
    )
    folder: Path = tmp_path_factory.mktemp("model")
    MistralForCausalLM(config).save_pretrained(folder)
    device = torch.device("cpu")
    kernels = make_kernels(name.split("-")[0], deterministic=True, block_size=8)
    if name == "cpu-without-tiles":
        kernels = CpuKernels(deterministic=True, tiles=False)
    group = ProcessGroup.single()
    with torch.inference_mode():
        model = read_model(folder, kernels, dtype=dtype, group=group, device=device)
    loaded = LoadedModel(
        model=model,
        kernels=kernels,
        group=group,
        device=device,
        dtype=dtype,
        cache_dtype=cache_dtype,
    )
    unit = name.removeprefix("cpu-")
    with tiles_by(unit) if unit in TILE_UNITS else nullcontext():
        shard = Shard(loaded, threads)
        yield shard
        shard.engine.close()


def ints(values: Iterable[int]) -> Ints:
    return np.array(list(values), dtype=np.int64)


def generate(shard: Shard, chosen: list[int], chunk: int) -> list[Found]:
    """(token, bits of its logprob) of each of `chosen`, whose prompts are cut into chunks of at most `chunk`."""
    shard.open()
    blocks = count(1)
    admitted, grown = [], []
    left = {}
    for slot, which in enumerate(chosen):
        prompt = PROMPTS[which]
        admitted.append(
            Sequence(slot=slot, request_id=slot, input_ids=prompt, parameters=SAMPLING[which])
        )
        needed = -(-(len(prompt) + NUM_TOKENS) // shard.block_size)
        grown += [(slot, next(blocks)) for _ in range(needed)]
        left[slot] = len(prompt)
    change = BatchChange(
        admitted=tuple(admitted),
        grown_slots=ints(slot for slot, _ in grown),
        grown_blocks=ints(block for _, block in grown),
    )
    found: list[Found] = [[] for _ in chosen]
    while running := [slot for slot in range(len(chosen)) if len(found[slot]) < NUM_TOKENS]:
        chunks = {slot: min(chunk, left[slot]) for slot in running if left[slot]}
        step = Forward(
            change=change,
            chunk_slots=ints(chunks),
            chunk_tokens=ints(chunks.values()),
            decode_slots=ints(slot for slot in running if not left[slot]),
        )
        result = shard.run(step)
        assert not len(result.failed_slots)
        change = BatchChange()
        for slot, tokens in chunks.items():
            left[slot] -= tokens
        bits = result.logprobs.view(np.int32)
        for slot, id_, logprob in zip(result.slots, result.ids, bits, strict=True):
            found[slot].append((int(id_), int(logprob)))
    return found


@pytest.fixture(scope="module")
def alone(shard: Shard) -> list[Found]:
    """The output of each sequence alone."""
    return [generate(shard, [which], 64)[0] for which in range(len(PROMPTS))]


@pytest.mark.parametrize("chunk", [64, 7, 1])
def test_batch_composition_and_chunks_change_no_bit(
    shard: Shard, alone: list[Found], chunk: int
) -> None:
    assert generate(shard, [2, 0, 3, 1], chunk) == [alone[which] for which in (2, 0, 3, 1)]
    assert generate(shard, [1, 0], 64) == [alone[1], alone[0]]


@pytest.mark.parametrize("num_rows", [31, 32, 33, 64, 65, MOST_ROWS])
def test_no_number_of_rows_changes_a_bit(shard: Shard, alone: list[Found], num_rows: int) -> None:
    chosen = [slot % len(PROMPTS) for slot in range(num_rows)]
    assert generate(shard, chosen, 33) == [alone[which] for which in chosen]


def test_sequences_differ_at_all(alone: list[Found]) -> None:
    assert len({tuple(tokens) for tokens in alone}) == len(PROMPTS)


@pytest.mark.parametrize("chunk", [64, 7])
def test_the_content_of_freed_pages_changes_no_bit(shard: Shard, chunk: int) -> None:
    shard.fill_pages(0.0)
    clean = generate(shard, [3, 1, 0, 2], chunk)
    shard.fill_pages(float("nan"))
    assert generate(shard, [3, 1, 0, 2], chunk) == clean
