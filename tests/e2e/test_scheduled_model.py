"""A real decoder under the real batcher: whatever it schedules, a request's tokens and logprobs are the same bits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from bench.peers.in_process import InProcessShard
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from millrace_proto.sampling import Sampling
from millrace_router.engine.batcher import Batcher
from millrace_router.request.entry import Entry
from millrace_router.request.request import SchedulingParameters, ValidRequest
from millrace_router.request.token_stream import TokenStream
from millrace_router.scheduler.step_plan import Budgets
from millrace_router.scheduler.tenants import TenantQueue
from millrace_router.scheduler.window_blocks import WindowGroup
from millrace_router.shards.step_channel import StepChannel
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.engine.engine import Engine
from millrace_shard.engine.loaded_model import LoadedModel
from millrace_shard.engine.warmup import MemoryLimits
from millrace_testing.adapters.fake_adapters import FakeAdapters
from millrace_testing.engines.kernels import make_kernels
from millrace_testing.models.models import read_model, save_tiny
from millrace_testing.router.fake_router import collect, new_batcher
from millrace_testing.shards.fake_images import FakeImages
from millrace_testing.shards.fake_shard import FakeShard

VOCAB_SIZE = 97
NUM_NEW, FEW_NEW = 40, 12
SAMPLING = (
    Sampling(),
    Sampling(do_sample=True, seed=5, temperature=1.2, top_p=0.9),
    Sampling(repetition_penalty=1.3, frequency_penalty=0.4, openai_frequency_penalty=0.5),
    Sampling(do_sample=True, seed=2**63 + 1, top_k=20, presence_penalty=0.7),
)
Found = tuple[tuple[tuple[int, float], ...], tuple[float, ...]]
"""(token, logprob) of each, and the prompt's logprobs where they were asked for."""


def random_ids(count: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(VOCAB_SIZE - 1, (count,), generator=generator).tolist())


SYSTEM = random_ids(140, 0)
"""The common prefix of most prompts."""
REQUESTS = tuple(
    ValidRequest(
        input_ids=SYSTEM[:shared] + random_ids(own, seed),
        max_new_tokens=NUM_NEW + 7 * (seed % 3),
        sampling=SAMPLING[seed % 4],
        prefill_logprobs=seed == 3,
        top_n_tokens=2 * (seed == 4),
        min_new_tokens=5,
        ignore_eos=True,
    )
    for seed, (shared, own) in enumerate(
        [(140, 9), (140, 60), (129, 1), (140, 20), (0, 30), (100, 3), (140, 60), (0, 128)], start=1
    )
)
FEW = tuple(
    replace(request, max_new_tokens=request.max_new_tokens - NUM_NEW + FEW_NEW)
    for request in REQUESTS
)
"""The same with shorter answers, which are enough where no row has to grow."""


SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 320,
    "initializer_range": 0.2,
}
OF_STATES = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}


@dataclass
class Model:
    """A warmed-up engine and its page size."""

    engine: Engine
    block_size: int
    state_pages: int = 0
    windows: tuple[WindowGroup, ...] = ()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("plain", "float32", "llama"), marks=pytest.mark.long),
        pytest.param(("cpu", "float32", "llama"), marks=pytest.mark.long),
        ("cpu", "bfloat16", "llama"),
        ("cpu", "bfloat16", "qwen3_5"),
        ("cpu", "bfloat16", "deepseek_v3"),
    ],
    ids="-".join,
)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    name, type_name, model_type = request.param
    folder: Path = tmp_path_factory.mktemp(model_type)
    if model_type == "qwen3_5":
        torch.manual_seed(1)
        config = Qwen3_5TextConfig(num_hidden_layers=5, **SIZES, **OF_STATES)
        Qwen3_5ForCausalLM(config).save_pretrained(folder)
    else:
        sizes: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 320}
        if model_type == "deepseek_v3":
            sizes |= {"kv_lora_rank": 64, "qk_rope_head_dim": 32}
        save_tiny(folder, model_type, **sizes)
    dtype, device = getattr(torch, type_name), torch.device("cpu")
    kernels = make_kernels(name, deterministic=True, block_size=8)
    group = ProcessGroup.single()
    with torch.inference_mode():
        loaded = read_model(folder, kernels, dtype=dtype, group=group, device=device)
    engine = Engine(limits=MemoryLimits(kv_memory=8 << 20), device=device, cpu_threads=1)
    engine.attach(
        LoadedModel(model=loaded, kernels=kernels, group=group, device=device, dtype=dtype)
    )
    engine.start()
    capacity = asyncio.run(
        InProcessShard(engine).warm_up(
            max_batch_prefill_tokens=512,
            max_batch_size=8,
            max_concurrent_requests=8,
            max_total_tokens=320,
        )
    )
    yield Model(engine, kernels.block_size, capacity.state_pages)
    engine.close()


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How the requests are served."""

    budgets: Budgets
    num_blocks: int = 300
    cached: bool = True
    rounds: int = 1
    """The same requests again; the last round counts."""
    num_late: int = 0
    """The number of requests that arrive after the first request has a token."""


@dataclass
class Served:
    """Generated outputs, and counts of the scheduler's actions."""

    found: list[Found]
    num_preemptions: int
    num_cached: int


BUDGETS = Budgets(max_batch_prefill_tokens=512, max_batch_size=8)


async def _serve(model: Model, schedule: Schedule, requests: tuple[ValidRequest, ...]) -> Served:
    shard = SimpleNamespace(
        num_blocks=schedule.num_blocks,
        block_size=model.block_size,
        state_pages=model.state_pages,
        max_batch_size=8,
        adapters=FakeAdapters(),
        lives=None,
        windows=model.windows,
        images=FakeImages(),
    )
    batcher = new_batcher(
        cast("StepChannel", InProcessShard(model.engine)),
        cast("FakeShard", shard),
        budgets=schedule.budgets,
        prefix_caching=schedule.cached,
        waiting=TenantQueue(quantum=16) if schedule.budgets.share_slots else None,
    )
    entries: list[Entry] = []
    new_entry = batcher._new_entry

    def kept_entry(request: ValidRequest) -> Entry:
        entries.append(new_entry(request))
        return entries[-1]

    batcher._new_entry = kept_entry
    task = asyncio.create_task(batcher.run())
    found: list[Found] = []
    for _ in range(schedule.rounds):
        entries.clear()
        found = await _submit(batcher, requests, schedule.num_late, entries)
    await _end(batcher, task)
    return Served(
        found,
        sum(entry.num_preemptions for entry in entries),
        sum(entry.stream.cached_tokens or 0 for entry in entries),
    )


async def _submit(
    batcher: Batcher, requests: tuple[ValidRequest, ...], num_late: int, entries: list[Entry]
) -> list[Found]:
    """Submit the requests, the late ones after the first token, and read their answers."""
    num_first = len(requests) - num_late
    streams = [batcher.submit(request) for request in requests[:num_first]]
    while num_late and not entries[0].generated_ids:
        await asyncio.sleep(0)
    streams += [batcher.submit(request) for request in requests[num_first:]]
    return [await _read(stream) for stream in streams]


async def _end(batcher: Batcher, task: asyncio.Task[None]) -> None:
    """Wait until every block is free or cached, and stop the batcher."""
    blocks = batcher._planner.blocks
    while blocks.num_owned:
        await asyncio.sleep(0)
    assert blocks.num_free + blocks.num_cached == blocks.num_blocks
    for window in blocks.windows:
        assert window.num_owned == 0
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def _read(stream: TokenStream) -> Found:
    events = await collect(stream)
    assert [event.index for event in events] == list(range(1, len(events) + 1))
    prompt = stream.prompt_logprobs
    return (
        tuple((event.token.id, event.token.logprob) for event in events),
        () if prompt is None else prompt.logprobs[1:],
    )


def serve(
    model: Model, schedule: Schedule, requests: tuple[ValidRequest, ...] = REQUESTS
) -> Served:
    return asyncio.run(asyncio.wait_for(_serve(model, schedule, requests), 600))


@pytest.fixture(scope="module")
def alone(model: Model) -> list[Found]:
    """Each request by itself, nothing cached, its prompt in one piece."""
    schedule = Schedule(budgets=BUDGETS, cached=False)
    found = [serve(model, schedule, (request,)).found[0] for request in REQUESTS]
    assert len(set(found)) == len(found)
    assert all(len(one[0]) == r.max_new_tokens for one, r in zip(found, REQUESTS, strict=True))
    return found


@pytest.fixture(scope="module")
def few_alone(alone: list[Found]) -> list[Found]:
    """The beginnings of the answers, as a limit changes nothing else."""
    return [
        (tokens[: request.max_new_tokens], prompt)
        for (tokens, prompt), request in zip(alone, FEW, strict=True)
    ]


@pytest.mark.parametrize("chunk", [16, 64, 512])
@pytest.mark.parametrize("cache", ["off", "cold", "warm"])
def test_batch_composition_chunks_and_cache_change_no_bit(
    model: Model, few_alone: list[Found], cache: str, chunk: int
) -> None:
    schedule = Schedule(
        budgets=replace(BUDGETS, max_batch_prefill_tokens=chunk),
        cached=cache != "off",
        rounds=2 if cache == "warm" else 1,
    )
    served = serve(model, schedule, FEW)
    assert served.found == few_alone
    prompts = sum(len(request.input_ids) for request in REQUESTS)
    assert (served.num_cached > 0) == (cache != "off")
    assert (served.num_cached > prompts // 2) == (cache == "warm")


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("chunk", [16, 512])
def test_preemption_all_the_time_changes_no_bit(
    model: Model, alone: list[Found], chunk: int, cached: bool
) -> None:
    longest = -(-max(len(r.input_ids) + r.max_new_tokens for r in REQUESTS) // model.block_size)
    schedule = Schedule(
        budgets=replace(BUDGETS, max_batch_prefill_tokens=chunk, max_preemptions=6),
        # The longest request fits, and little beside it.
        num_blocks=1 + longest + longest // 5,
        cached=cached,
    )
    served = serve(model, schedule)
    assert served.found == alone
    assert served.num_preemptions > 0


def test_yielding_to_another_tenant_changes_no_bit(model: Model, alone: list[Found]) -> None:
    schedule = Schedule(budgets=replace(BUDGETS, max_batch_size=3, share_slots=True), num_late=3)
    tenants = ("large",) * 5 + ("small",) * 3
    requests = tuple(
        replace(request, scheduling=SchedulingParameters(tenant=tenant))
        for request, tenant in zip(REQUESTS, tenants, strict=True)
    )
    served = serve(model, schedule, requests)
    assert served.found == alone
    assert served.num_preemptions > 0


def test_full_reservation_changes_no_bit(model: Model, few_alone: list[Found]) -> None:
    budgets = replace(BUDGETS, reserve_all=True)
    assert serve(model, Schedule(budgets=budgets, num_blocks=100), FEW).found == few_alone


LAYERS: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 20,
}
WINDOWED: dict[str, dict[str, Any]] = {
    "gemma3_text": LAYERS,
    "gemma2": {"sliding_window": 20},
    "cohere2": LAYERS,
    "olmo3": LAYERS,
    "exaone4": LAYERS,
    "gpt_oss": {"num_hidden_layers": 2, "sliding_window": 20},
    "mistral": {"sliding_window": 20},
}
"""Models with layers that give blocks back; all layers of the last one do."""
IN_SHORT = ("gpt_oss", "mistral")
"""Of them, those that are part of the short tests."""
NUM_FULL = 900
"""Positions of the layers without a window: one long request fits, and little beside it."""
LONG = tuple(
    ValidRequest(
        input_ids=random_ids(shared, 77) + random_ids(own, seed),
        max_new_tokens=24 + seed,
        sampling=SAMPLING[seed % 4],
        prefill_logprobs=seed == 3,
        ignore_eos=True,
    )
    for seed, (shared, own) in enumerate([(400, 30), (400, 9), (260, 40), (0, 470)], start=1)
)


def _windowed_engine(folder: Path, name: str, *, groups: bool) -> Model:
    """A model with blocks for few sequences; with `groups`, its windows have what two of them need."""
    device, group = torch.device("cpu"), ProcessGroup.single()
    kernels = make_kernels(name, deterministic=True, block_size=8)
    with torch.inference_mode():
        loaded = read_model(folder, kernels, group=group, device=device)
    engine = Engine(limits=MemoryLimits(kv_memory=16 << 20), device=device, cpu_threads=1)
    model = LoadedModel(
        model=loaded, kernels=kernels, group=group, device=device, dtype=torch.float32
    )
    engine.attach(model)
    engine.start()
    size = kernels.block_size
    spans = [-(-shape.reach // size) + 2 for shape in model.cache_shape().windows]
    capacity = asyncio.run(
        InProcessShard(engine).warm_up(
            max_batch_prefill_tokens=512,
            max_batch_size=8,
            max_concurrent_requests=8,
            max_total_tokens=640,
            num_blocks=1 + NUM_FULL // size,
            window_blocks=[1 + 2 * span + 1 for span in spans] if groups else [],
        )
    )
    assert bool(capacity.window_groups) == groups
    return Model(engine, size, windows=capacity.window_groups)


@pytest.mark.parametrize(
    ("model_type", "kernels"),
    [
        pytest.param(model_type, kernels, marks=[pytest.mark.long] * (model_type not in IN_SHORT))
        for model_type in WINDOWED
        for kernels in ("cpu", *["plain"] * (model_type == "gemma3_text"))
    ],
)
def test_blocks_that_windows_give_back_change_no_bit(
    model_type: str, kernels: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path, model_type, max_position_embeddings=1024, **WINDOWED[model_type])
    whole = _windowed_engine(tmp_path, kernels, groups=False)
    alone_whole = Schedule(
        budgets=BUDGETS, cached=False, num_blocks=1 + NUM_FULL // whole.block_size
    )
    alone = [serve(whole, alone_whole, (request,)).found[0] for request in LONG]
    whole.engine.close()
    model = _windowed_engine(tmp_path, kernels, groups=True)
    held = max(group.num_blocks for group in model.windows) * model.block_size
    assert held < sum(len(request.input_ids) for request in LONG)
    for chunk, cached in ((16, True), (512, True), (100, False)):
        schedule = Schedule(
            budgets=replace(BUDGETS, max_batch_prefill_tokens=chunk, max_preemptions=6),
            num_blocks=alone_whole.num_blocks,
            cached=cached,
            rounds=2,
            num_late=2,
        )
        served = serve(model, schedule, LONG)
        assert served.found == alone
        assert (served.num_cached > 300) == cached
    model.engine.close()
