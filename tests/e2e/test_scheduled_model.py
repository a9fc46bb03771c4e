"""A real decoder under the real batcher: whatever it schedules, a request's tokens and logprobs are the same bits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import pytest
import torch
from bench.peers.in_process import InProcessShard
from transformers import LlamaConfig, LlamaForCausalLM

from millrace_proto.sampling import Sampling
from millrace_router.engine.batch_metrics import BatchMetrics
from millrace_router.engine.batcher import Batcher
from millrace_router.engine.in_flight import InFlight
from millrace_router.engine.predictor import LatencyPredictor
from millrace_router.prediction.cost import CostModel
from millrace_router.prediction.forecast import Forecaster
from millrace_router.prediction.late_planning import LatePlanning
from millrace_router.recovery.epochs import EpochManager
from millrace_router.recovery.launcher_channel import LauncherChannel
from millrace_router.recovery.quarantine import Quarantine
from millrace_router.recovery.recovery_policy import RecoveryPolicy
from millrace_router.recovery.shard_status import ShardStatus
from millrace_router.request.entry import Entry
from millrace_router.request.request import SchedulingParameters, ValidRequest
from millrace_router.request.token_stream import TokenStream
from millrace_router.scheduler.block_manager import BlockManager
from millrace_router.scheduler.planner import Planner
from millrace_router.scheduler.prefix_cache import PrefixCache
from millrace_router.scheduler.queue import WaitingQueue
from millrace_router.scheduler.step_plan import Budgets
from millrace_router.scheduler.tenants import TenantQueue
from millrace_router.shards.step_channel import StepChannel
from millrace_router.start.engine import entries_of
from millrace_router.telemetry.metrics import Metrics
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.engine.engine import Engine
from millrace_shard.engine.loaded_model import LoadedModel
from millrace_shard.engine.warmup import MemoryLimits
from millrace_shard.models.load import load_model
from millrace_testing.engines.kernels import make_kernels
from millrace_testing.router.fake_router import collect, tiny_tokenizer

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


@dataclass
class Model:
    """A warmed-up engine and its page size."""

    engine: Engine
    block_size: int


@pytest.fixture(
    scope="module",
    params=[("plain", "float32"), ("cpu", "float32"), ("cpu", "bfloat16")],
    ids="-".join,
)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=320,
        initializer_range=0.2,
    )
    folder: Path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    name, type_name = request.param
    dtype, device = getattr(torch, type_name), torch.device("cpu")
    kernels = make_kernels(name, deterministic=True, dtype=dtype, block_size=8)
    group = ProcessGroup.single()
    with torch.inference_mode():
        loaded = load_model(folder, dtype=dtype, kernels=kernels, group=group, device=device)
    engine = Engine(limits=MemoryLimits(kv_memory=8 << 20), device=device, cpu_threads=1)
    engine.attach(
        LoadedModel(model=loaded, kernels=kernels, group=group, device=device, dtype=dtype)
    )
    engine.start()
    asyncio.run(
        InProcessShard(engine).warm_up(
            max_batch_prefill_tokens=512,
            max_batch_size=8,
            max_concurrent_requests=8,
            max_total_tokens=320,
        )
    )
    yield Model(engine, kernels.block_size)
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
    cost, metrics = CostModel(), Metrics(max_input_tokens=319, max_total_tokens=320)
    size, num_blocks = model.block_size, schedule.num_blocks
    entries: list[Entry] = []

    new_entry = entries_of(tiny_tokenizer(), frozenset({VOCAB_SIZE - 1}), block_size=size)

    def kept_entry(request: ValidRequest) -> Entry:
        entries.append(new_entry(request))
        return entries[-1]

    def new_planner() -> Planner:
        cache = PrefixCache() if schedule.cached else None
        return Planner(schedule.budgets, BlockManager(num_blocks, size, cache))

    channel = cast("StepChannel", InProcessShard(model.engine))
    in_flight = InFlight(channel, LatePlanning(cost, most=0.0))
    forecaster = Forecaster(
        cost,
        max_batch_size=8,
        max_batch_prefill_tokens=512,
        block_size=size,
        num_blocks=num_blocks,
    )
    launcher, status = LauncherChannel(None), ShardStatus()
    epochs = EpochManager(channel, launcher, status, cost, metrics, oldest=in_flight.oldest)
    recovery = RecoveryPolicy(new_planner, Quarantine())
    waiting = TenantQueue(quantum=16) if schedule.budgets.share_slots else WaitingQueue()
    batcher = Batcher(
        in_flight,
        epochs,
        recovery,
        waiting=waiting,
        predictor=LatencyPredictor(
            cost, forecaster, metrics, in_flight=in_flight, recovery=recovery, waiting=waiting
        ),
        new_entry=kept_entry,
        metrics=BatchMetrics(metrics),
    )
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
