"""Our own engine without HTTP and without gRPC: the shard's engine under the router's batcher.

It needs the environment of `launch_environment`, as a shard does.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import cast

import torch

from bench.peers.engines import SHARD_FLAGS
from bench.peers.in_process import InProcessShard
from bench.peers.worker import Limits, Moments, Request, check_lengths, main
from millrace_router.config import RouterConfig
from millrace_router.engine.batcher import Batcher
from millrace_router.recovery.launcher_channel import LauncherChannel
from millrace_router.request.request import ValidRequest
from millrace_router.request.token_stream import TokenEvent, read_tokens
from millrace_router.serving import EVENT_LOOP_MODULE
from millrace_router.shards.step_channel import StepChannel
from millrace_router.start.engine import new_engine
from millrace_router.start.learned import Learned
from millrace_router.start.running import metrics_of
from millrace_router.start.shards import RouterDeployment, num_slots, prefill_tokens
from millrace_router.text.tokenizer import Tokenizer
from millrace_shard.commands.composition import load as load_model
from millrace_shard.config import ShardConfig
from millrace_shard.engine.engine import Engine
from millrace_shard.engine.warmup import MemoryLimits


class MillraceEngine:
    """One event loop that lives as long as the process; the batcher in it waits between runs."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        batcher: Batcher,
        engine: Engine,
        tokenizer: Tokenizer,
    ) -> None:
        self._loop = loop
        self._batcher = batcher
        self._engine = engine
        self._tokenizer = tokenizer
        self._task = loop.create_task(batcher.run())

    def run(self, requests: Sequence[Request], concurrency: int) -> list[Moments]:
        """See `Engine.run` of `bench.peers.worker`."""
        moments = [Moments(0.0) for _ in requests]
        self._loop.run_until_complete(self._run(requests, concurrency, moments, None))
        check_lengths(requests, moments)
        return moments

    def generate(self, requests: Sequence[Request], concurrency: int) -> list[list[int]]:
        """The generated tokens, for tests."""
        moments = [Moments(0.0) for _ in requests]
        tokens: list[list[int]] = [[] for _ in requests]
        self._loop.run_until_complete(self._run(requests, concurrency, moments, tokens))
        return tokens

    def close(self) -> None:
        """End the batcher and the engine's thread."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        self._loop.close()
        self._engine.close()
        self._tokenizer.close()

    async def _run(
        self,
        requests: Sequence[Request],
        concurrency: int,
        moments: Sequence[Moments],
        tokens: list[list[int]] | None,
    ) -> None:
        waiting = iter(enumerate(requests))

        def take(number: int, event: TokenEvent) -> None:
            moments[number].arrivals.append(time.perf_counter())
            if tokens is not None:
                tokens[number].append(event.token.id)

        async def client() -> None:
            for number, request in waiting:
                moments[number].due = time.perf_counter()
                stream = self._batcher.submit(
                    ValidRequest(
                        input_ids=tuple(request.ids),
                        max_new_tokens=request.new_tokens,
                        ignore_eos=True,
                    )
                )
                await read_tokens(stream, partial(take, number))

        async with asyncio.TaskGroup() as clients:
            for _ in range(min(concurrency, len(requests))):
                clients.create_task(client())


def load(model: Path, limits: Limits) -> MillraceEngine:
    """Load and warm up as `millrace-shard serve` and the router do, with the same defaults.

    Only the prefix cache is off, because each repetition sends the same prompts.
    """
    flags = os.environ.get(SHARD_FLAGS, "").split()
    shard_config = ShardConfig.from_args([f"--cpu-threads={limits.threads}", *flags, str(model)])
    router_config = RouterConfig.from_args([f"--model-folder={model}", "--prefix-caching=off"])
    device = torch.device("cpu")
    engine = Engine(
        limits=MemoryLimits(kv_memory=shard_config.kv_memory),
        device=device,
        cpu_threads=limits.threads,
    )
    engine.start()
    engine.attach(engine.submit(lambda: load_model(shard_config, device)).result())
    loop: asyncio.AbstractEventLoop = import_module(EVENT_LOOP_MODULE).new_event_loop()
    tokenizer = Tokenizer.load(model, validation_workers=1)
    shard = InProcessShard(engine)
    batcher = loop.run_until_complete(_assemble(shard, router_config, tokenizer))
    return MillraceEngine(loop, batcher, engine, tokenizer)


async def _assemble(shard: InProcessShard, config: RouterConfig, tokenizer: Tokenizer) -> Batcher:
    """The batcher that the router assembles at its start, over a shard in this process."""
    info = shard.info()
    capacity = await shard.warm_up(
        max_batch_prefill_tokens=prefill_tokens(config, info),
        max_batch_size=num_slots(config),
        max_concurrent_requests=config.max_concurrent_requests,
    )
    deployment = RouterDeployment(config=config, info=info, capacity=capacity)
    engine = new_engine(
        deployment,
        cast("StepChannel", shard),
        tokenizer,
        metrics_of(deployment),
        learned=Learned(),
        launcher=LauncherChannel(None),
    )
    return engine.batcher


if __name__ == "__main__":
    main(load)
