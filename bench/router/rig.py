"""The router's process over a shard that computes nothing, and loads for it."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench.harness.machine import cpu_seconds
from bench.harness.server import RunningServer, free_port, running
from bench.router.blank_shard import Counts
from bench.router.event_counter import Counted, count_streams, http_request

ROUTES = {
    "generate_stream": "/generate_stream",
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
}
OTHER_EVENTS = {"generate_stream": 0, "chat": 2, "completions": 1}
"""Events of a stream without a token: a chat's role, and the end."""
PROMPT = "Streams run downhill to the mill and turn its wheel."


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


def vocab_size_of(model: Path) -> int:
    """The number of ids of the model's tokenizer."""
    size: int = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab_size()
    return size


def shards_command(
    model: Path, addresses: Sequence[str], costs: Mapping[str, float], *flags: str
) -> list[str]:
    """The command of blank shards at `addresses`, with the vocabulary of `model` and the coefficients `costs`."""
    return [
        *(sys.executable, "-m", "bench.router.blank_shard", *addresses, *flags),
        *(f"--vocab-size={vocab_size_of(model)}", f"--costs={json.dumps(dict(costs))}"),
    ]


def router_command(model: Path, address: str, port: int) -> list[str]:
    """The command of a router with the tokenizer of `model` and the shard at `address`."""
    return [
        *(sys.executable, "-m", "millrace_router", f"--model-folder={model}"),
        *(f"--shard-addresses={address}", f"--port={port}", "--hostname=127.0.0.1"),
        "--max-concurrent-requests=4096",
    ]


@contextmanager
def rig(
    options: argparse.Namespace, *, forward_ms: float = 0.0, flags: Sequence[str] = ()
) -> Iterator[Rig]:
    """Run both for the length of the block; raises ServerError."""
    model: Path = options.model
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as scratch:
        address, port = f"unix:{scratch}/shard", free_port()
        router = router_command(model, address, port)
        with (
            subprocess.Popen(
                shards_command(model, [address], {"step": forward_ms / 1e3}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            ) as shard,
            running(
                [*options.router_prefix.split(), *router, *flags],
                port=port,
                log=options.log,
                environment={},
            ) as server,
        ):
            yield Rig(server, port, shard)


def request(
    route: str, tokens: int, *, prompt: str = PROMPT, fields: Mapping[str, Any] | None = None
) -> bytes:
    """The HTTP request for one stream of exactly `tokens` tokens; `fields` are added to its body."""
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
    return http_request(ROUTES[route], json.dumps({**body, **(fields or {})}).encode())


def stream(
    at: Rig,
    route: str,
    *,
    streams: int,
    tokens: int,
    rounds: int = 1,
    fields: Mapping[str, Any] | None = None,
) -> Counted:
    """Run a load to its end and check that every token came."""
    asked = [request(route, tokens, fields=fields)] * streams
    counted = asyncio.run(count_streams(at.port, asked, rounds=rounds))
    others = OTHER_EVENTS[route]
    expected = streams * rounds * (tokens + others)
    if counted.events != expected:
        raise SystemExit(f"{route}: {counted.events} events, expected {expected}")
    return counted


def measured(
    at: Rig, route: str, options: argparse.Namespace, *, fields: Mapping[str, Any] | None = None
) -> float:
    """CPU microseconds a token of one run."""
    streams: int = options.streams
    tokens, rounds = options.tokens, options.rounds
    before = at.cpu_seconds()
    stream(at, route, streams=streams, tokens=tokens, rounds=rounds, fields=fields)
    spent = at.cpu_seconds() - before
    return 1e6 * spent / (streams * int(tokens) * int(rounds))
