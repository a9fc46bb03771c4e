"""`python -m bench.scale ingress`: what HAProxy and Envoy cost before real routers, and what their hashing brings.

    python -m bench.scale ingress --parts cost upgrade
    python -m bench.scale ingress --parts hits --trace mooncake-conversation.jsonl

`cost`: CPU a token and added time to the first token at 128 streams. `hits`: prompt tokens found in the prefix caches
of four routers over blank shards, by prefix hash and in turn, on Mooncake's conversations with every length divided by
32. `upgrade`: four replicas are replaced one after another under load behind HAProxy.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

from bench.harness.machine import cpu_seconds
from bench.harness.server import RunningServer
from bench.scale.clients import Outcome, ask, closed_loop, replay, session
from bench.scale.load import completion, load, prompt_ids
from bench.scale.proxies import program, proxying
from bench.scale.replicas import Replica, replicas, vocab_size_of
from millrace_router.prediction.cost import COEFFICIENTS

PROXIES = ("haproxy", "envoy")
NUM_REPLICAS = 4
SETTLING_SECONDS = 3.0
PROMPT = range(400, 464)


def body_of(tokens: int) -> bytes:
    """A streamed completion of exactly `tokens` tokens."""
    return completion(PROMPT, tokens)


def costs_of(seconds: float) -> dict[str, float]:
    """The cost model of shards whose steps all take the same time."""
    return {**dict.fromkeys(COEFFICIENTS, 0.0), "step": seconds}


def cost(options: argparse.Namespace, folder: Path) -> None:
    """Print CPU a token of each proxy, and the p99 of the time to the first token with and without it.

    While the streams run through the proxy, single requests go to the router through it and directly, in turn.
    """
    streams, tokens = options.streams, options.tokens
    flags = [f"--max-batch-size={streams + 8}"]
    print(f"{streams} streams of {tokens} tokens, forward {options.forward_ms:g} ms")
    print("| proxy | CPU, µs a token (each run) | TTFT p99, ms: through it | directly |")
    print("|---|---|---|---|", flush=True)
    with replicas(
        1,
        model=options.model,
        costs=costs_of(options.forward_ms / 1e3),
        num_blocks=1 << 15,
        flags=flags,
        out=folder,
    ) as (one,):
        for name in options.proxies:
            if program(name) is None:
                continue
            runs = []
            for _ in range(options.repeats):
                with proxying(name, [one], folder) as proxy:
                    runs.append(asyncio.run(_run_cost(proxy, one.url, options)))
            cpu, through, directly = zip(*runs, strict=True)
            print(f"| {name} | {_each(cpu)} | {_each(through)} | {_each(directly)} |", flush=True)


async def _run_cost(
    proxy: RunningServer, direct: str, options: argparse.Namespace
) -> tuple[float, float, float]:
    """CPU microseconds a token, and p99 of TTFT in milliseconds through the proxy and directly."""
    streams, tokens, rounds = options.streams, options.tokens, options.rounds
    url, before = proxy.url, cpu_seconds(proxy.processes())
    streaming = asyncio.create_task(
        closed_loop(url, body_of(tokens), clients=streams, rounds=rounds)
    )
    seen = {url: Outcome(), direct: Outcome()}
    async with session() as client:
        # After the burst of prompts at the beginning.
        await asyncio.sleep(SETTLING_SECONDS)
        while not streaming.done():
            for place, outcome in seen.items():
                await ask(client, place, body_of(1), outcome)
                # Steps begin at a fixed rate: each request at another time of one.
                await asyncio.sleep(random.random() * options.forward_ms / 1e3)
    used = cpu_seconds(proxy.processes()) - before
    failures = [*streaming.result().failures, *seen[url].failures, *seen[direct].failures]
    if failures:
        raise SystemExit(str(failures[:3]))
    num_tokens = streams * rounds * tokens + seen[url].num_done
    return 1e6 * used / num_tokens, 1e3 * seen[url].p99(), 1e3 * seen[direct].p99()


def hits(options: argparse.Namespace, folder: Path) -> None:
    """Print the hit share and the load of each replica, by prefix hash and in turn."""
    if options.trace is None:
        raise SystemExit("hits needs --trace")
    arrivals = load(
        options.trace,
        skip=0,
        requests=options.requests,
        divisor=options.divisor,
        speedup=options.speed,
    )
    vocab_size = vocab_size_of(options.model)
    requests = [
        (
            arrival.arrived_at,
            completion(prompt_ids(arrival, number, vocab_size), arrival.output_tokens),
        )
        for number, arrival in enumerate(arrivals)
    ]
    print(
        f"\n{len(requests)} requests, {options.num_blocks} blocks each, {options.speed:g} times as fast"
    )
    print("| proxy | routing | hit share | load max/mean | failed |\n|---|---|--:|--:|--:|")
    for name in options.proxies:
        if program(name) is None:
            continue
        shares = []
        for in_turn in (True, False):
            share, balance, failed = hit_share(name, requests, options, folder, in_turn=in_turn)
            shares.append(share)
            routing = "in turn" if in_turn else "prefix hash"
            print(
                f"| {name} | {routing} | {100 * share:.1f} % | {balance:.2f} | {failed} |",
                flush=True,
            )
        print(f"{name}: prefix hash {shares[1] / shares[0]:.2f} times in turn", flush=True)


def hit_share(
    name: str,
    requests: Sequence[tuple[float, bytes]],
    options: argparse.Namespace,
    folder: Path,
    *,
    in_turn: bool,
) -> tuple[float, float, int]:
    """Share of prompt tokens that were cached, load of the busiest replica over the mean, failed requests."""
    with (
        replicas(
            NUM_REPLICAS,
            model=options.model,
            costs=costs_of(options.forward_ms / 1e3),
            num_blocks=options.num_blocks,
            flags=(),
            out=folder,
        ) as found,
        proxying(name, found, folder, prefix_bytes=options.prefix_bytes, in_turn=in_turn) as proxy,
    ):
        before = [one.prompt_tokens() for one in found]
        seen = asyncio.run(replay(proxy.url, requests))
        after = [one.prompt_tokens() for one in found]
    cached = sum(end[0] - start[0] for start, end in zip(before, after, strict=True))
    loads = [sum(end) - sum(start) for start, end in zip(before, after, strict=True)]
    return cached / sum(loads), max(loads) / mean(loads), len(seen.failures)


def upgrade(options: argparse.Namespace, folder: Path) -> None:
    """Print how many requests failed while each replica was replaced, one after another."""
    if program("haproxy") is None:
        raise SystemExit("upgrade needs haproxy")
    flags = ("--drain-delay=8",)
    with (
        replicas(
            NUM_REPLICAS,
            model=options.model,
            costs=costs_of(0.005),
            num_blocks=1 << 13,
            flags=flags,
            out=folder,
        ) as found,
        proxying("haproxy", found, folder) as proxy,
    ):
        seen = asyncio.run(_while_replacing(proxy.url, found))
    print(f"\nrolling upgrade: {len(seen[1])} failed of {seen[0]} requests {seen[1][:3]}")


async def _while_replacing(url: str, found: Sequence[Replica]) -> tuple[int, list[str]]:
    ended = asyncio.Event()
    totals: tuple[list[int], list[str]] = ([], [])

    async def client(number: int) -> None:
        while not ended.is_set():
            seen = await closed_loop(url, body_of(8 + number), clients=1, rounds=10)
            totals[0].append(seen.num_done)
            totals[1].extend(seen.failures)

    clients = [asyncio.create_task(client(number)) for number in range(16)]
    for one in found:
        await asyncio.to_thread(one.stop)
        await asyncio.to_thread(one.start)
        # The next one goes once the proxy has seen that this one is back.
        await asyncio.sleep(6)
    ended.set()
    await asyncio.gather(*clients)
    return sum(totals[0]), totals[1]


def _each(runs: Sequence[float]) -> str:
    return f"**{median(runs):.1f}** ({' '.join(f'{run:.1f}' for run in runs)})"


def main(arguments: Sequence[str]) -> int:
    """Run the chosen parts."""
    parts = {"cost": cost, "hits": hits, "upgrade": upgrade}
    parser = argparse.ArgumentParser(prog="python -m bench.scale ingress", description=__doc__)
    parser.add_argument(
        "--model", type=Path, default=Path("demo/model"), help="its tokenizer is used"
    )
    parser.add_argument("--parts", nargs="+", choices=parts, default=["cost", "upgrade"])
    parser.add_argument("--proxies", nargs="+", choices=PROXIES, default=PROXIES)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--forward-ms", type=float, default=20.0)
    parser.add_argument("--trace", type=Path, help="Mooncake's conversations, as JSON lines")
    parser.add_argument("--requests", type=int, default=12_031)
    parser.add_argument("--divisor", type=int, default=32)
    parser.add_argument("--num-blocks", type=int, default=2500, help="KV blocks of 16 a replica")
    parser.add_argument(
        "--prefix-bytes", type=int, default=384, help="2048 tokens over the divisor"
    )
    parser.add_argument("--speed", type=float, default=20.0)
    options = parser.parse_args(arguments)
    for part in options.parts:
        with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
            parts[part](options, Path(folder))
    return 0
