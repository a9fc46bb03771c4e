"""Real routers over blank shards, each on a port of its own that it keeps over restarts."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from tokenizers import Tokenizer

from bench.harness.server import free_port

START_SECONDS = 60.0
STOP_SECONDS = 60.0


@dataclass
class Replica:
    """One router and its shard."""

    command: list[str]
    port: int
    log: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The base of its routes."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the router, and wait until it is ready; raises TimeoutError."""
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(self.command, stdout=output, stderr=output)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.url}/readyz"):
                    return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.05)
        raise TimeoutError(f"{self.url} does not start; see {self.log}")

    def stop(self) -> None:
        """End the router as a rolling upgrade does, and wait for its end."""
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(STOP_SECONDS)
            self.process = None

    def metrics(self) -> Mapping[str, float]:
        """The series without labels."""
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.split() for line in lines if line and line[0] != "#" and "{" not in line)
        return {name: float(value) for name, value in pairs}


@contextmanager
def replicas(
    count: int,
    folder: Path,
    *,
    model: Path,
    num_blocks: int,
    forward_ms: float,
    flags: Sequence[str] = (),
) -> Iterator[list[Replica]]:
    """Run `count` routers with the tokenizer of `model`, each over a blank shard with `num_blocks` KV blocks."""
    vocab_size = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab_size()
    with ExitStack() as stack:
        found = []
        for number in range(count):
            address, port = f"unix:{folder}/shard-{number}", free_port()
            command = [sys.executable, "-m", "bench.router.blank_shard", address]
            command += [f"--vocab-size={vocab_size}", f"--forward-ms={forward_ms}"]
            command.append(f"--num-blocks={num_blocks}")
            shard = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
            )
            # The end of its standard input ends it.
            assert shard.stdin is not None
            router = [sys.executable, "-m", "millrace_router", f"--model-folder={model}"]
            router += [f"--shard-addresses={address}", f"--port={port}", "--hostname=127.0.0.1"]
            router += ["--max-concurrent-requests=4096", *flags]
            replica = Replica(router, port, folder / f"router-{number}.log")
            replica.start()
            stack.callback(replica.stop)
            found.append(replica)
        yield found


def cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    """CPU time that a program and its children have used."""
    family = [psutil.Process(process.pid)]
    family += family[0].children(recursive=True)
    return sum(sum(one.cpu_times()[:2]) for one in family)
