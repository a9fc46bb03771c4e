"""`python -m bench.scale validate`: simulated replicas against as many real routers.

The routers are real processes over shards that only wait, for the times of a given cost model. The load is a trace with
prompts and answers so many times shorter. One gateway of the simulator's code, in the client, chooses the router. The
simulator gets the same requests, the same costs, and the routers' own flags and times outside steps. With `kv` the
gateway follows the routers' KV-cache events.

Where a policy looks at loads, milliseconds decide where a request goes, and a load that is shifted by them has other
figures. So `--runs` sends it several times, each request up to `--shift` seconds later, to both sides, and means are
compared.
"""

from __future__ import annotations

import argparse
import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from bench.harness.command_line import command, run_parser, say
from bench.harness.machine import CpuMeter
from bench.harness.paths import DEMO
from bench.harness.record import Record
from bench.harness.server import ServerError
from bench.harness.tables import markdown
from bench.parts.simulation import deployment_of
from bench.router.blank_shard import BLOCK_SIZE, MAX_TOKENS
from bench.router.rig import vocab_size_of
from bench.scale.cache_index import CacheIndex
from bench.scale.cell import Cell
from bench.scale.gateway import HASHED_TOKENS, Gateway, KvAware
from bench.scale.kv_follower import block_names, following
from bench.scale.load import load, num_output_tokens, prompt_ids, shifted
from bench.scale.replay import Figures, Replay, ReplayError, warm_up
from bench.scale.replicas import Replica, replicas
from bench.scale.simulated_replica import POLICIES, CellParts, Routing
from millrace.simulate.deployment import Deployment
from millrace.simulate.simulated_request import Arrival
from millrace.simulate.trace import TraceError
from millrace.simulate.workload import OpenLoop

COSTS = {
    "step": 0.02,
    "decode_row": 0.001,
    "decode_context_token": 0.0,
    "prefill_step": 0.0,
    "prefill_token": 0.0012,
    "prefill_pair": 0.0,
}
LEARNED = ("entry_seconds", "turn_seconds", "late_planning_share")
TOLERANCE = 0.2
"""The allowed relative error of a simulated figure."""
TITLES = {
    "hit_share": "hit share",
    "tokens_per_second": "tokens/s",
    "ttft_p50": "TTFT p50, s",
    "ttft_p90": "TTFT p90, s",
}
Compared = dict[str, dict[str, list[float]]]
"""Figures by name, one for each run: those "measured" and those "simulated"."""
FLAGS = ("--max-batch-size=64", "--max-batch-prefill-tokens=512")


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a load on real routers."""

    figures: Figures
    sent: Sequence[Arrival]
    """The requests, each at the time at which it was sent; the simulator gets these."""
    settings: Deployment
    """The routers' settings and learned times, read after the run; the simulator gets these."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; argparse ends the program on a bad one."""
    parser = run_parser("scale validate", __doc__)
    parser.add_argument("--trace", type=Path, required=True, help="a trace, such as Mooncake's")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--skip", type=int, default=0, help="requests at the trace's beginning")
    parser.add_argument("--requests", type=int, default=300, help="those after them that are sent")
    parser.add_argument("--divisor", type=int, default=32, help="how many times shorter they are")
    parser.add_argument(
        "--speedup", type=float, default=1.4, help="how many times faster they come"
    )
    parser.add_argument("--num-blocks", type=int, default=2501, help=f"of {BLOCK_SIZE} tokens")
    parser.add_argument("--routing", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--balance-factor", type=float, default=1.25)
    parser.add_argument("--runs", type=int, default=1, help="of each routing")
    parser.add_argument("--shift", type=float, default=0.1, help="of all runs but the first")
    parser.add_argument("--model", type=Path, default=DEMO, help="its tokenizer is used")
    return parser.parse_args(arguments)


def _parts(options: argparse.Namespace, deployment: Deployment, routing: Routing) -> CellParts:
    return CellParts(
        deployment,
        num_replicas=options.replicas,
        num_gateways=1,
        routing=routing,
        balance_factor=options.balance_factor,
        hashed_tokens=max(1, HASHED_TOKENS // options.divisor),
    )


def simulated(parts: CellParts, arrivals: Sequence[Arrival]) -> Figures:
    """Simulate a load."""
    metrics = Cell(parts, OpenLoop(iter(arrivals))).run()
    return Figures(
        metrics.cached_tokens / (metrics.cached_tokens + metrics.prefill_tokens),
        num_output_tokens(arrivals) / (metrics.ended_at - metrics.started_at),
        metrics.first_token.percentile(50),
        metrics.first_token.percentile(90),
    )


async def measured(
    options: argparse.Namespace, found: Sequence[Replica], loads: Sequence[Sequence[Arrival]]
) -> dict[Routing, list[Run]]:
    """Measure each load with each routing, on warm routers.

    Each run has its own prompts, so blocks that earlier runs left in the caches are never found again.

    Raises:
        ReplayError: a router refused a request or broke its answer.

    """
    vocab_size, index = vocab_size_of(options.model), CacheIndex()
    real: dict[Routing, list[Run]] = {}
    async with AsyncExitStack() as stack:
        if "kv" in options.routing:
            addresses = [replica.kv_events for replica in found]
            await stack.enter_async_context(following(addresses, index, BLOCK_SIZE))
        await warm_up(found, vocab_size)
        for routing in options.routing:
            for number, arrivals in enumerate(loads):
                run = f"{routing} {number}"
                say(f"{run}: {len(arrivals)} requests in {arrivals[-1].arrived_at:.0f} s")
                prompts = [prompt_ids(*each, vocab_size, run) for each in numbered(arrivals)]
                gateway = _gateway(options, routing, index, prompts)
                replay = Replay(found, gateway, prompts)
                figures = await replay.run(arrivals)
                settings = await asyncio.to_thread(learned, found)
                real.setdefault(routing, []).append(Run(figures, replay.sent, settings))
    return real


def numbered(arrivals: Sequence[Arrival]) -> Iterator[tuple[Arrival, int]]:
    """Each request with its number."""
    return ((arrival, number) for number, arrival in enumerate(arrivals))


def _gateway(
    options: argparse.Namespace,
    routing: Routing,
    index: CacheIndex,
    prompts: Sequence[Sequence[int]],
) -> Gateway:
    """One of the simulator's; with `kv` it reads in `index` what the routers have cached."""
    if routing == "kv":
        names = [block_names(prompt, BLOCK_SIZE) for prompt in prompts]
        return KvAware(
            options.replicas,
            index=index,
            keys_of=lambda ticket: names[ticket.number],
            block_size=BLOCK_SIZE,
            balance_factor=options.balance_factor,
        )
    known = Deployment(
        cost_model=COSTS,
        num_blocks=options.num_blocks,
        block_size=BLOCK_SIZE,
        max_total_tokens=MAX_TOKENS,
    )
    (gateway,) = _parts(options, known, routing).gateways()
    return gateway


def learned(found: Sequence[Replica]) -> Deployment:
    """The routers' flags, and the means of what they have learned about their times; costs are the given ones."""
    each = [deployment_of(replica.url) for replica in found]
    means = {name: fmean(getattr(one, name) for one in each) for name in LEARNED}
    return each[0].model_copy(update={"cost_model": COSTS, "step_ratios": (), **means})


def main(arguments: Sequence[str]) -> int:
    """Exit code 1 if a figure is farther off than `TOLERANCE`, or a router failed."""
    options = parse_arguments(arguments)
    try:
        arrivals = load(
            options.trace,
            skip=options.skip,
            requests=options.requests,
            divisor=options.divisor,
            speedup=options.speedup,
        )
        loads = [shifted(arrivals, options.shift, seed) for seed in range(options.runs)]
        with replicas(
            options.replicas,
            model=options.model,
            costs=COSTS,
            num_blocks=options.num_blocks,
            flags=FLAGS,
            out=options.out,
            kv_events="kv" in options.routing,
        ) as found:
            meter = CpuMeter(lambda: [each for replica in found for each in replica.processes()])
            real = asyncio.run(measured(options, found, loads))
            others = meter.stop().other_cores
    except (ServerError, ReplayError, TraceError, ValueError) as error:
        say(f"error: {error}")
        return 1
    figures = {routing: _compared(options, routing, runs) for routing, runs in real.items()}
    record = Record(
        bench="scale",
        title=f"simulated against {options.replicas} real routers",
        command=command("scale", ["validate", *arguments]),
        figures=figures,
        other_cores=others,
    )
    print(record.text(text(figures)))
    if options.record:
        record.write()
    return 0 if max(errors(figures)) <= TOLERANCE else 1


def _compared(options: argparse.Namespace, routing: Routing, runs: Sequence[Run]) -> Compared:
    """The figures of both sides, by run."""
    real = [asdict(run.figures) for run in runs]
    said = [asdict(simulated(_parts(options, run.settings, routing), run.sent)) for run in runs]
    return {
        side: {name: [run[name] for run in each] for name in TITLES}
        for side, each in (("measured", real), ("simulated", said))
    }


def ratio(pair: Compared, name: str) -> float:
    """The mean of a simulated figure over the measured one's."""
    real, said = fmean(pair["measured"][name]), fmean(pair["simulated"][name])
    if real:
        return said / real
    return math.inf if said else 1.0


def errors(figures: Mapping[Routing, Compared]) -> list[float]:
    """The relative error of every simulated figure."""
    return [abs(ratio(pair, name) - 1) for pair in figures.values() for name in TITLES]


def text(figures: Mapping[Routing, Compared]) -> str:
    """A row for each policy and figure."""
    rows = []
    for routing, pair in figures.items():
        for name, title in TITLES.items():
            real, said = _with_range(pair["measured"][name]), _with_range(pair["simulated"][name])
            rows.append([routing, title, real, said, f"{ratio(pair, name):.2f}"])
    return markdown(["routing", "figure", "measured", "simulated", "ratio"], rows)


def _with_range(values: Sequence[float]) -> str:
    """The mean; of several runs, the least and the largest value, too."""
    mean = f"{fmean(values):.3g}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.3g} to {max(values):.3g})"
