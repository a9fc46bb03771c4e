"""`transformers`' `generate` on padded batches, compared with the server's policies."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.harness.command_line import say
from bench.harness.machine import CpuMeter
from bench.harness.quiet import wait_until_quiet
from bench.parts.fixture import Fixture
from bench.peers.engines import Offline, as_it_is
from bench.peers.worker import Limits, Request
from millrace.load.measurement import Timeline
from millrace_launcher.host.threads import usable_cores

NAME = "transformers"
LEAST_ID, MOST_ID = 300, 1000
"""Token ids of prompts, which any checkpoint of ours has."""
PADDED = Offline(
    name=NAME,
    module="bench.peers.transformers_generate",
    python=Path(sys.executable),
    environment=dict,
    convert=as_it_is,
)


def rates(
    fixture: Fixture, lengths: Mapping[int, Sequence[int]], *, prompt_tokens: int, batch_size: int
) -> dict[int, float]:
    """Output tokens per second of the first batch, for each cap with these output lengths. Raises EngineError."""
    longest = prompt_tokens + max(max(drawn) for drawn in lengths.values())
    engine = PADDED.start(log=fixture.out / "transformers-padded.log")
    try:
        engine.load(
            fixture.model.absolute(),
            Limits(
                max_streams=batch_size,
                max_tokens=longest,
                kv_tokens=batch_size * longest,
                threads=usable_cores(),
            ),
        )
        engine.run(requests([4] * batch_size, prompt_tokens), batch_size)
        wait_until_quiet(fixture.quiet)
        meter, found = CpuMeter(engine.processes), {}
        for cap, drawn in lengths.items():
            say(f"{NAME}: at most {cap}")
            asked = requests(drawn[:batch_size], prompt_tokens)
            found[cap] = tokens_per_second(engine.run(asked, batch_size))
        fixture.other_cores = meter.stop().other_cores
    finally:
        engine.end()
    return found


def requests(lengths: Sequence[int], prompt_tokens: int) -> list[Request]:
    """Requests of random token ids; the same each time."""
    generator = random.Random("prompts")
    return [
        Request([generator.randint(LEAST_ID, MOST_ID) for _ in range(prompt_tokens)], length)
        for length in lengths
    ]


def tokens_per_second(timelines: Sequence[Timeline]) -> float:
    """Tokens that the requests asked for, from the first due time to the end of the last batch."""
    seconds = max(t.arrivals[-1] for t in timelines) - min(t.due for t in timelines)
    return sum(len(t.arrivals) for t in timelines) / seconds
