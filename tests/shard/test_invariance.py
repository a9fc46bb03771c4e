"""A real decoder behind the engine: a sequence's tokens and logprobs, bit for bit, in any company and cut."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from millrace_shard.capacity import WarmupRequest
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.load import load_model
from millrace_shard.parallel import ProcessGroup
from millrace_shard.runner import StepRunner
from millrace_shard.sequence import SamplingParameters, Sequence
from millrace_shard.step import BatchChange, Forward, Ints
from millrace_shard.warmup import LoadedModel, MemoryLimits, warm_up

BLOCK_SIZE = 8
NUM_TOKENS = 6
SAMPLING = (
    SamplingParameters(do_sample=True, seed=5, temperature=1.2, top_p=0.9),
    SamplingParameters(),
    SamplingParameters(do_sample=True, seed=5, top_k=20, repetition_penalty=1.3),
    SamplingParameters(do_sample=True, seed=9, typical_p=0.8, frequency_penalty=0.4),
)
PROMPTS = tuple(
    torch.randint(300, (length,), generator=torch.Generator().manual_seed(length)).numpy()
    for length in (19, 40, 3, 27)
)
Found = list[tuple[int, int]]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> StepRunner:
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
    dtype, device = getattr(torch, request.param), torch.device("cpu")
    kernels = PlainKernels(deterministic=True, block_size=BLOCK_SIZE)
    group = ProcessGroup.single()
    with torch.inference_mode():
        model = load_model(folder, dtype=dtype, kernels=kernels, group=group, device=device)
        loaded = LoadedModel(model=model, kernels=kernels, group=group, device=device, dtype=dtype)
        plan = WarmupRequest(
            max_batch_prefill_tokens=64, max_batch_size=4, max_concurrent_requests=4
        )
        return warm_up(loaded, plan, MemoryLimits(kv_memory=1 << 20)).runner


def ints(values: Iterable[int]) -> Ints:
    return np.array(list(values), dtype=np.int64)


def generate(runner: StepRunner, chosen: list[int], chunk: int) -> dict[int, Found]:
    """(token, bits of its logprob) of the sequences `chosen`, whose prompts are cut into chunks of at most `chunk`."""
    blocks = count(1)
    admitted, grown = [], []
    left = {}
    for slot, which in enumerate(chosen):
        prompt = PROMPTS[which]
        admitted.append(
            Sequence(slot=slot, request_id=which, input_ids=prompt, parameters=SAMPLING[which])
        )
        needed = -(-(len(prompt) + NUM_TOKENS) // BLOCK_SIZE)
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
        with torch.inference_mode():
            result = runner.launch(step).finish()
        change = BatchChange()
        for slot, tokens in chunks.items():
            left[slot] -= tokens
        bits = result.logprobs.view(np.int32)
        for slot, id_, logprob in zip(result.slots, result.ids, bits, strict=True):
            found[chosen[slot]].append((int(id_), int(logprob)))
    runner.batch.clear()
    return found


@pytest.mark.parametrize("chunk", [64, 7, 1])
def test_company_and_chunks_change_no_bit(runner: StepRunner, chunk: int) -> None:
    together = generate(runner, [2, 0, 3, 1], chunk)
    pair = generate(runner, [1, 0], 64)
    for which in range(len(PROMPTS)):
        alone = generate(runner, [which], 64)
        assert together[which] == alone[which]
    assert pair == {which: together[which] for which in (1, 0)}


def test_sequences_differ_at_all(runner: StepRunner) -> None:
    found = generate(runner, [0, 1, 2, 3], 64)
    assert len({tuple(tokens) for tokens in found.values()}) == len(PROMPTS)
