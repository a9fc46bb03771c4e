"""Real routers over shards that take given times, each on a port that it keeps over restarts."""

from __future__ import annotations

import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.harness.scrape import parse
from bench.harness.server import RunningServer, free_port, running
from bench.router.rig import router_command, shards_command

HITS = "millrace_prefix_cache_hit_tokens_total"
COMPUTED = "millrace_prefill_tokens_total"


@dataclass
class Replica:
    """A router with its own shard."""

    command: Sequence[str]
    port: int
    log: Path
    kv_events: str
    """Where it publishes what it has cached, if it was asked to."""
    _server: RunningServer | None = None
    _running: ExitStack = field(default_factory=ExitStack)

    @property
    def url(self) -> str:
        """The base of its routes."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the router, and wait until it is healthy; raises ServerError."""
        router = running(self.command, port=self.port, log=self.log, environment={})
        self._server = self._running.enter_context(router)

    def stop(self) -> None:
        """End the router as a rolling upgrade does, and wait for its end."""
        self._running.close()
        self._server = None

    def processes(self) -> list[psutil.Process]:
        """The router's, as they are now."""
        return [] if self._server is None else self._server.processes()

    def prompt_tokens(self) -> tuple[float, float]:
        """Prompt tokens so far that were found in the cache, and that were computed."""
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            samples = parse(answer.read().decode())
        return samples.get(HITS, 0.0), samples.get(COMPUTED, 0.0)


@contextmanager
def replicas(
    count: int,
    *,
    model: Path,
    costs: Mapping[str, float],
    num_blocks: int,
    flags: Sequence[str],
    out: Path,
    kv_events: bool = False,
) -> Iterator[list[Replica]]:
    """Run `count` routers for the length of the block; raises ServerError.

    They have the tokenizer of `model`, and write logs to `out`. The steps of each shard take what the cost model's
    coefficients `costs` say. With `kv_events` they publish what they have cached.
    """
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as scratch, ExitStack() as stack:
        addresses = [f"unix:{scratch}/{number}" for number in range(count)]
        shards = shards_command(model, addresses, costs, f"--num-blocks={num_blocks}")
        # The end of its standard input ends the process of the shards.
        stack.enter_context(subprocess.Popen(shards, stdin=subprocess.PIPE))
        started = []
        for number, address in enumerate(addresses):
            port = free_port()
            command = [*router_command(model, address, port), *flags]
            events = f"ipc://{scratch}/events-{number}"
            if kv_events:
                command.append(f"--kv-events={events}")
            replica = Replica(command, port, out / f"scale-router-{number}.log", events)
            stack.callback(replica.stop)
            replica.start()
            started.append(replica)
        yield started
