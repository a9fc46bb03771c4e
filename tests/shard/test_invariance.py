"""A real decoder behind the engine: a sequence's tokens and logprobs, bit for bit, in any company and cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from millrace_fakes_kernels import make_kernels
from millrace_shard.capacity import WarmupRequest
from millrace_shard.engine import Engine
from millrace_shard.load import load_model
from millrace_shard.parallel import ProcessGroup
from millrace_shard.sequence import SamplingParameters, Sequence
from millrace_shard.step import BatchChange, Forward, Ints, Open, Step, StepResult, Work
from millrace_shard.warmup import LoadedModel, MemoryLimits

NUM_TOKENS = 6
SAMPLING = (
    SamplingParameters(do_sample=True, seed=5, temperature=1.2, top_p=0.9),
    SamplingParameters(),
    SamplingParameters(do_sample=True, seed=5, top_k=20, repetition_penalty=1.3),
    SamplingParameters(do_sample=True, seed=9, typical_p=0.8, frequency_penalty=0.4),
)
PROMPTS = tuple(
    torch.randint(300, (length,), generator=torch.Generator().manual_seed(length)).numpy()
    for length in (19, 90, 3, 27)
)
Found = list[tuple[int, int]]


class Shard:
    """An engine, and the number of its next step."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.block_size = loaded.kernels.block_size
        self.engine = Engine(
            limits=MemoryLimits(kv_memory=4 << 20), device=loaded.device, cpu_threads=1
        )
        self.engine.attach(loaded)
        self.engine.start()
        plan = WarmupRequest(
            max_batch_prefill_tokens=64, max_batch_size=4, max_concurrent_requests=4
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
                layer.keys[1:] = value
                layer.values[1:] = value

        self.engine.submit(fill).result(60)


@pytest.fixture(
    scope="module",
    params=[(name, dtype) for name in ("plain", "cpu") for dtype in ("float32", "bfloat16")],
    ids="-".join,
)
def shard(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shard]:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    folder: Path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    name, type_name = request.param
    dtype, device = getattr(torch, type_name), torch.device("cpu")
    kernels = make_kernels(name, deterministic=True, dtype=dtype, block_size=8)
    group = ProcessGroup.single()
    with torch.inference_mode():
        model = load_model(folder, dtype=dtype, kernels=kernels, group=group, device=device)
    shard = Shard(
        LoadedModel(model=model, kernels=kernels, group=group, device=device, dtype=dtype)
    )
    yield shard
    shard.engine.close()


def ints(values: Iterable[int]) -> Ints:
    return np.array(list(values), dtype=np.int64)


def generate(shard: Shard, chosen: list[int], chunk: int) -> dict[int, Found]:
    """(token, bits of its logprob) of the sequences `chosen`, whose prompts are cut into chunks of at most `chunk`."""
    shard.open()
    blocks = count(1)
    admitted, grown = [], []
    left = {}
    for slot, which in enumerate(chosen):
        prompt = PROMPTS[which]
        admitted.append(
            Sequence(slot=slot, request_id=which, input_ids=prompt, parameters=SAMPLING[which])
        )
        needed = -(-(len(prompt) + NUM_TOKENS) // shard.block_size)
        grown += [(slot, next(blocks)) for _ in range(needed)]
        left[slot] = len(prompt)
    change = BatchChange(
        admitted=tuple(admitted),
        grown_slots=ints(slot for slot, _ in grown),
        grown_blocks=ints(block for _, block in grown),
    )
    found: dict[int, Found] = {which: [] for which in chosen}
    while running := [s for s, which in enumerate(chosen) if len(found[which]) < NUM_TOKENS]:
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
            found[chosen[slot]].append((int(id_), int(logprob)))
    return found


@pytest.mark.parametrize("chunk", [64, 7, 1])
def test_company_and_chunks_change_no_bit(shard: Shard, chunk: int) -> None:
    together = generate(shard, [2, 0, 3, 1], chunk)
    pair = generate(shard, [1, 0], 64)
    for which in range(len(PROMPTS)):
        alone = generate(shard, [which], 64)
        assert together[which] == alone[which]
    assert pair == {which: together[which] for which in (1, 0)}


def test_sequences_differ_at_all(shard: Shard) -> None:
    found = generate(shard, [0, 1, 2, 3], 64)
    assert len({tuple(tokens) for tokens in found.values()}) == len(PROMPTS)


@pytest.mark.parametrize("chunk", [64, 7])
def test_what_a_freed_page_holds_changes_no_bit(shard: Shard, chunk: int) -> None:
    shard.fill_pages(0.0)
    clean = generate(shard, [3, 1, 0, 2], chunk)
    shard.fill_pages(float("nan"))
    assert generate(shard, [3, 1, 0, 2], chunk) == clean
