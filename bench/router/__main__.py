"""`python -m bench.router`: the router's CPU time a token, its hidden share of a step, and its memory.

The real router process, from its sockets to its gRPC client, over a shard that computes nothing
(`bench.router.blank_shard`) and a load generator that only counts (`bench.router.event_counter`). The
figures are CPU time of the router's process, which other load hardly changes.

    python -m bench.router                      # every part
    python -m bench.router --parts cost --routes generate_stream --streams 128 --tokens 256
    python -m bench.router --parts parsers traces journal kv-events     # with and without a feature, in turn
    python -m bench.router --parts schemas bodies texts                 # beside a hostile client
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import urllib.request
from pathlib import Path
from statistics import median

from bench.harness.paths import OUT
from bench.harness.scrape import parse
from bench.router.event_counter import count_streams
from bench.router.hostile import bodies, schemas, texts
from bench.router.kv_events import kv_events
from bench.router.rig import ROUTES, Rig, measured, request, rig, stream
from bench.router.variants import journal, parsers, traces

PARTS = (
    *("cost", "hidden", "memory", "journal", "parsers", "traces", "kv-events"),
    *("schemas", "bodies", "texts"),
)
FORWARD_MS = (5.0, 17.0)
HIDDEN_STREAMS = 32
HIDDEN_SECONDS = 3.0
QUEUED = 1000
QUEUED_PROMPT_TOKENS = 256
MIB = 2**20


def cost(options: argparse.Namespace) -> None:
    """Print CPU microseconds a token by route, the median of some repetitions."""
    print(f"router CPU, {options.streams} streams of {options.tokens} tokens")
    print("| route | µs a token (each run) | tokens a CPU second |\n|---|---|--:|")
    flags = [f"--max-batch-size={options.streams}"]
    with rig(options, flags=flags) as at:
        for route in options.routes:
            stream(at, route, streams=options.streams, tokens=32)
            runs = [measured(at, route, options) for _ in range(options.repeats)]
            middle = median(runs)
            each = " ".join(f"{run:.1f}" for run in runs)
            print(f"| {route} | **{middle:.1f}** ({each}) | {1e6 / middle:,.0f} |", flush=True)


def hidden(options: argparse.Namespace) -> None:
    """Print how long the shard waits for a step at depth 1 and 2, and the share that depth 2 hides."""
    print(f"\nshard without a step, {HIDDEN_STREAMS} streams, µs a step")
    print("| forward ms | depth 1 | depth 2 | hidden | gap p99/p50 |\n|--:|--:|--:|--:|--:|")
    for forward_ms in FORWARD_MS:
        tokens = int(1e3 * HIDDEN_SECONDS / forward_ms)
        idle: dict[int, float] = {}
        ratio = 0.0
        for depth in (1, 2):
            flags = [f"--steps-in-flight={depth}", f"--max-batch-size={HIDDEN_STREAMS}"]
            with rig(options, forward_ms=forward_ms, flags=flags) as at:
                stream(at, "generate_stream", streams=HIDDEN_STREAMS, tokens=32)
                at.counts()
                counted = stream(at, "generate_stream", streams=HIDDEN_STREAMS, tokens=tokens)
                counts = at.counts()
                idle[depth] = 1e6 * counts.idle / counts.steps
                gaps = counted.gaps()
                ratio = gaps[int(0.99 * len(gaps))] / median(gaps)
        share = 100 * (1 - idle[2] / idle[1])
        print(
            f"| {forward_ms:g} | {idle[1]:.0f} | {idle[2]:.0f} | {share:.1f} % | {ratio:.3f} |",
            flush=True,
        )


def memory(options: argparse.Namespace) -> None:
    """Print the router's resident memory idle and with a full queue."""

    async def queue_up(at: Rig) -> tuple[int, int]:
        prompts = [f"{n} " + "water " * QUEUED_PROMPT_TOKENS for n in range(QUEUED + 1)]
        asked = [request("generate_stream", 64, prompt=prompt) for prompt in prompts]
        load = asyncio.create_task(count_streams(at.port, asked, rounds=1))
        while await asyncio.to_thread(_waiting, at) < QUEUED:
            if load.done():
                load.result()
            await asyncio.sleep(0.2)
        full = at.memory()
        load.cancel()
        await asyncio.wait({load})
        return full, len(prompts)

    flags = ["--max-batch-size=1"]
    with rig(options, forward_ms=1000.0, flags=flags) as at:
        idle = at.memory()
        full, _ = asyncio.run(queue_up(at))
    print(
        f"\nresident memory: idle {idle / MIB:.0f} MiB, with {QUEUED} queued {full / MIB:.0f} MiB"
    )


def _waiting(at: Rig) -> int:
    with urllib.request.urlopen(f"{at.server.url}/metrics") as answer:
        return int(parse(answer.read().decode()).get("millrace_requests_waiting", 0))


def main() -> int:
    """Run the chosen parts."""
    parser = argparse.ArgumentParser(prog="python -m bench.router", description=__doc__)
    parser.add_argument(
        "--model", type=Path, default=Path("demo/model"), help="its tokenizer is used"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:3])
    parser.add_argument("--routes", nargs="+", choices=ROUTES, default=list(ROUTES))
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--log", type=Path, default=OUT / "router.log")
    parser.add_argument("--router-prefix", default="", help="such as `chrt -f 10`")
    options = parser.parse_args()
    parts = {
        "cost": cost,
        "hidden": hidden,
        "memory": memory,
        "journal": journal,
        "parsers": parsers,
        "traces": traces,
        "kv-events": kv_events,
        "schemas": schemas,
        "bodies": bodies,
        "texts": texts,
    }
    for part in options.parts:
        parts[part](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
