"""`python -m bench.router`: the router's CPU time a token, its hidden share of a step, and its memory.

The real router process, from its sockets to its gRPC client, over a shard that computes nothing
(`bench.router.blank_shard`) and a load generator that only counts (`bench.router.event_counter`). The
figures are CPU time of the router's process, which other load hardly changes.

    python -m bench.router                      # every part
    python -m bench.router --parts cost --routes generate_stream --streams 128 --tokens 256
    python -m bench.router --parts profile      # bench/out/router-128.svg; needs py-spy
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tokenizers import Tokenizer

from bench.harness.machine import cpu_seconds
from bench.harness.paths import OUT
from bench.harness.server import RunningServer, free_port, running
from bench.profile.py_spy import record_profile, thread_seconds
from bench.router.blank_shard import Counts
from bench.router.event_counter import Counted, count_streams, http_request

ROUTES = {
    "generate_stream": "/generate_stream",
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
}
OTHER_EVENTS = {"generate_stream": 0, "chat": 2, "completions": 1}
"""Events of a stream without a token: a chat's role, and the end."""
PARTS = ("cost", "hidden", "memory", "profile", "journal")
JOURNALS: dict[str, tuple[str, ...]] = {
    "none": (),
    "schedule": ("--journal=",),
    "with token ids": ("--journal=", "--journal-tokens"),
}
FORWARD_MS = (5.0, 17.0)
HIDDEN_STREAMS = 32
HIDDEN_SECONDS = 3.0
QUEUED = 1000
QUEUED_PROMPT_TOKENS = 256
PROMPT = "Streams run downhill to the mill and turn its wheel."
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Rig:
    """A running router and its shard."""

    server: RunningServer
    port: int
    shard: subprocess.Popen[str]

    def counts(self) -> Counts:
        """The shard's counts since the last call."""
        assert self.shard.stdin is not None
        assert self.shard.stdout is not None
        self.shard.stdin.write("\n")
        self.shard.stdin.flush()
        return Counts(**json.loads(self.shard.stdout.readline()))

    def cpu_seconds(self) -> float:
        """CPU time that the router has used so far."""
        return cpu_seconds([self.server.process])

    def memory(self) -> int:
        """Resident bytes of the router."""
        resident: int = self.server.process.memory_info().rss
        return resident


@contextmanager
def rig(
    options: argparse.Namespace, *, forward_ms: float = 0.0, flags: Sequence[str] = ()
) -> Iterator[Rig]:
    """Run both for the length of the block; raises ServerError."""
    model: Path = options.model
    vocab_size = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab_size()
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as scratch:
        address, port = f"unix:{scratch}/shard", free_port()
        shard_command = [sys.executable, "-m", "bench.router.blank_shard", address]
        shard_command += [f"--vocab-size={vocab_size}", f"--forward-ms={forward_ms}"]
        router_command = [*options.router_prefix.split(), sys.executable, "-m", "millrace_router"]
        router_command += [f"--model-folder={model}"]
        router_command += [f"--shard-addresses={address}", f"--port={port}", "--hostname=127.0.0.1"]
        router_command += ["--max-concurrent-requests=4096", *flags]
        with (
            subprocess.Popen(
                shard_command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as shard,
            running(router_command, port=port, log=options.log, environment={}) as server,
        ):
            yield Rig(server, port, shard)


def request(route: str, tokens: int, *, prompt: str = PROMPT) -> bytes:
    """The HTTP request for one stream of exactly `tokens` tokens."""
    if route == "generate_stream":
        body: dict[str, Any] = {
            "inputs": prompt,
            "parameters": {"max_new_tokens": tokens, "ignore_eos": True},
        }
    else:
        body = {"model": "tgi", "stream": True, "max_tokens": tokens, "ignore_eos": True}
        if route == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
    return http_request(ROUTES[route], json.dumps(body).encode())


def stream(at: Rig, route: str, *, streams: int, tokens: int, rounds: int = 1) -> Counted:
    """Run a load to its end and check that every token came."""
    asked = [request(route, tokens)] * streams
    counted = asyncio.run(count_streams(at.port, asked, rounds=rounds))
    others = OTHER_EVENTS[route]
    expected = streams * rounds * (tokens + others)
    if counted.events != expected:
        raise SystemExit(f"{route}: {counted.events} events, expected {expected}")
    return counted


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


def measured(at: Rig, route: str, options: argparse.Namespace) -> float:
    """CPU microseconds a token of one run."""
    before = at.cpu_seconds()
    stream(at, route, streams=options.streams, tokens=options.tokens, rounds=options.rounds)
    tokens: int = options.streams * options.rounds * options.tokens
    return 1e6 * (at.cpu_seconds() - before) / tokens


def journal(options: argparse.Namespace) -> None:
    """Print CPU microseconds a token with and without a journal, in turn, and bytes a token on disk."""
    runs: dict[str, list[float]] = {name: [] for name in JOURNALS}
    sizes: dict[str, float] = {}
    for _ in range(options.repeats):
        for name, flags in JOURNALS.items():
            with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
                given = [f"{flag}{folder}" if flag.endswith("=") else flag for flag in flags]
                with rig(options, flags=[f"--max-batch-size={options.streams}", *given]) as at:
                    stream(at, "generate_stream", streams=options.streams, tokens=32)
                    runs[name].append(measured(at, "generate_stream", options))
                size = sum(path.stat().st_size for path in Path(folder).iterdir())
                sizes[name] = size / options.streams / (options.rounds * options.tokens + 32)
    print("\n| journal | µs a token (each run) | bytes a token |\n|---|---|--:|")
    for name, each in runs.items():
        shown = " ".join(f"{run:.1f}" for run in each)
        print(f"| {name} | **{median(each):.1f}** ({shown}) | {sizes[name]:.1f} |", flush=True)


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
        for line in answer.read().decode().splitlines():
            if line.startswith("millrace_requests_waiting "):
                return int(float(line.split()[1]))
    return 0


def profile(options: argparse.Namespace) -> None:
    """Write the flame graph of all routes, in microseconds a token.

    The CPU time of the threads is measured first, because the sampler stops them repeatedly.
    """

    def load(at: Rig) -> int:
        for route in options.routes:
            stream(at, route, streams=options.streams, tokens=options.tokens, rounds=options.rounds)
        tokens: int = options.streams * options.tokens * options.rounds
        return tokens * len(options.routes)

    flags = [f"--max-batch-size={options.streams}"]
    with rig(options, flags=flags) as at:
        process = at.server.process
        load(at)
        before = thread_seconds(process)
        tokens = load(at)
        main, others = (
            1e6 * (after - earlier) / tokens
            for earlier, after in zip(before, thread_seconds(process), strict=True)
        )
        with record_profile(process, options.py_spy) as recorded:
            load(at)
    recorded.write(options.svg, main=main, others=others, routes=options.routes)


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
    parser.add_argument("--svg", type=Path, default=OUT / "router-128.svg")
    parser.add_argument("--router-prefix", default="", help="such as `chrt -f 10`")
    parser.add_argument("--py-spy", default="py-spy", help="where that program is")
    options = parser.parse_args()
    parts = {
        "cost": cost,
        "hidden": hidden,
        "memory": memory,
        "profile": profile,
        "journal": journal,
    }
    for part in options.parts:
        parts[part](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
