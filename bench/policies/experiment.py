"""An experiment: servers with different policies, and a row of the table for each load on each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from bench.harness.repeats import Sample
from bench.harness.server import LAUNCHER
from bench.parts.client import Answer, Client, Request, open_loop, succeeded
from bench.parts.fixture import Fixture
from bench.parts.part import Figures, Question, Samples, Table, table_of

CONTINUOUS, STATIC, NAIVE, NONE = POLICIES = ("continuous", "static", "static-naive", "none")
"""The policies: at every step, batch by batch, the same with ended rows decoded on, and one request at a time."""
STATIC_SERVER = ("-m", "bench.policies.static_server")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment(Question):
    """A question whose cases share servers."""

    run: Callable[[Fixture], Iterator[tuple[str, Figures]]]
    """Yields each case that was measured, and its figures, once the server of that case has ended."""

    def measure(self, fixture: Fixture, *, repeats: int) -> Table:
        """Every case, `repeats` times. Raises ServerError or RequestsFailed."""
        samples: Samples = {case.name: {} for case in self.cases}
        for fixture.repeat in range(repeats):
            for name, figures in self.run(fixture):
                for title, value in figures.items():
                    sample = Sample(value, fixture.other_cores)
                    samples[name].setdefault(title, []).append(sample)
        return table_of(samples)


@contextmanager
def serving(fixture: Fixture, policy: str, *, batch_size: int) -> Iterator[str]:
    """The URL of a server with this policy, for the length of the block; raises ServerError."""
    fixture.other_cores = 0.0
    # Requests one at a time are batches of 1.
    size = 1 if policy == NONE else batch_size
    launcher = (*STATIC_SERVER, policy) if policy in (STATIC, NAIVE) else LAUNCHER
    with fixture.serving(f"--max-batch-size={size}", launcher=launcher) as server:
        yield server.url


async def send(url: str, asked: Sequence[Request]) -> list[Answer]:
    """Send all requests when they are due; raises RequestsFailed."""
    async with Client(url) as client:
        return list(succeeded(await open_loop(client, asked)))


def requests(
    fixture: Fixture,
    prompts: Sequence[int],
    lengths: Sequence[int],
    *,
    moments: Sequence[float] | None = None,
    seed: str,
) -> list[Request]:
    """Requests of these prompt and output lengths, due at once without `moments`, answered in one piece."""
    due = moments or [0.0] * len(lengths)
    return [
        Request(
            prompt=fixture.texts.prompt(prompt, seed=f"{seed}/{number}"),
            prompt_tokens=prompt,
            output_tokens=length,
            due=moment,
            streams=False,
        )
        for number, (prompt, length, moment) in enumerate(zip(prompts, lengths, due, strict=True))
    ]
