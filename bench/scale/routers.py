"""Real routers, each over a shard that takes given times."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tokenizers import Tokenizer

from bench.harness.server import RunningServer, free_port, running


def vocab_size_of(model: Path) -> int:
    """The number of ids of the model's tokenizer."""
    size: int = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab_size()
    return size


@contextmanager
def routers(
    count: int,
    *,
    model: Path,
    costs: Mapping[str, float],
    num_blocks: int,
    flags: Sequence[str],
    out: Path,
) -> Iterator[list[RunningServer]]:
    """Run `count` routers for the length of the block; raises ServerError."""
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as scratch, ExitStack() as stack:
        addresses = [f"unix:{scratch}/{number}" for number in range(count)]
        shards = [sys.executable, "-m", "bench.scale.timed_shards", *addresses]
        shards += [f"--vocab-size={vocab_size_of(model)}", f"--num-blocks={num_blocks}"]
        shards += [f"--costs={json.dumps(dict(costs))}"]
        stack.enter_context(subprocess.Popen(shards, stdin=subprocess.PIPE))
        started = []
        for number, address in enumerate(addresses):
            port = free_port()
            command = [sys.executable, "-m", "millrace_router", f"--model-folder={model}"]
            command += [f"--shard-addresses={address}", f"--port={port}", "--hostname=127.0.0.1"]
            log = out / f"scale-router-{number}.log"
            started.append(
                stack.enter_context(running([*command, *flags], port=port, log=log, environment={}))
            )
        yield started
