"""`python -m bench.scale validate`: simulated replicas against as many real routers.

The routers are real processes over shards that only wait, for the times of a given cost model. The load is a trace with
prompts and answers so many times shorter. One gateway of the simulator's code, in the client, chooses the router. The
simulator gets the same requests, the same costs, and the routers' own flags and times outside steps.
Policy `kv` is left out: a gateway learns what real routers have cached from their events, which the client here does
not read.
"""

from __future__ import annotations

import argparse
import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from bench.harness.command_line import command, run_parser, say
from bench.harness.machine import CpuMeter
from bench.harness.paths import DEMO
from bench.harness.record import Record
from bench.harness.server import ServerError
from bench.harness.tables import markdown
from bench.parts.simulation import deployment_of
from bench.router.blank_shard import BLOCK_SIZE
from bench.scale.load import load, num_output_tokens
from bench.scale.replay import Figures, Replay, ReplayError
from bench.scale.replicas import replicas, vocab_size_of
from bench.scale.timed_shards import MAX_TOKENS
from millrace_router.simulator.cells.cell import Cell
from millrace_router.simulator.cells.sources import OpenLoop
from millrace_router.simulator.cells.wiring import CellParts, Routing
from millrace_router.simulator.deployment import Deployment
from millrace_router.simulator.simulated_request import Arrival
from millrace_router.simulator.traces.lines import TraceError

COSTS = {
    "step": 0.02,
    "decode_row": 0.001,
    "decode_context_token": 0.0,
    "prefill_step": 0.0,
    "prefill_token": 0.0012,
    "prefill_pair": 0.0,
}
POLICIES: tuple[Routing, ...] = ("round-robin", "least-loaded", "prefix")
TOLERANCE = 0.2
"""The allowed relative error of a simulated figure."""
TITLES = {
    "hit_share": "hit share",
    "tokens_per_second": "tokens/s",
    "ttft_p50": "TTFT p50, s",
    "ttft_p90": "TTFT p90, s",
}
FLAGS = ("--max-batch-size=64", "--max-batch-prefill-tokens=512")


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
    parser.add_argument("--model", type=Path, default=DEMO, help="its tokenizer is used")
    return parser.parse_args(arguments)


def _parts(options: argparse.Namespace, deployment: Deployment, routing: Routing) -> CellParts:
    return CellParts(
        deployment,
        num_replicas=options.replicas,
        num_gateways=1,
        routing=routing,
        balance_factor=options.balance_factor,
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


def measured(
    options: argparse.Namespace, routing: Routing, arrivals: Sequence[Arrival]
) -> tuple[Figures, Deployment, float]:
    """Measure a load on real routers.

    Returns the figures, the routers' settings for the simulator, and the cores that other processes used.
    """
    with replicas(
        options.replicas,
        model=options.model,
        costs=COSTS,
        num_blocks=options.num_blocks,
        flags=FLAGS,
        out=options.out,
    ) as found:
        meter = CpuMeter(lambda: [each for replica in found for each in replica.processes()])
        # The gateway is the simulator's; a deployment matters to policies of what is cached alone.
        known = Deployment(
            cost_model=COSTS,
            num_blocks=options.num_blocks,
            block_size=BLOCK_SIZE,
            max_total_tokens=MAX_TOKENS,
        )
        (gateway,) = _parts(options, known, routing).gateways()
        replay = Replay(found, gateway, vocab_size_of(options.model))
        outcome = asyncio.run(replay.run(arrivals))
        others = meter.stop().other_cores
        learned = deployment_of(found[0].url)
    return outcome, learned.model_copy(update={"cost_model": COSTS, "step_ratios": ()}), others


def main(arguments: Sequence[str]) -> int:
    """Exit code 1 if a figure is farther off than `TOLERANCE`, or a router failed."""
    options = parse_arguments(arguments)
    figures: dict[str, dict[str, dict[str, float]]] = {}
    worst = 0.0
    try:
        arrivals = load(
            options.trace,
            skip=options.skip,
            requests=options.requests,
            divisor=options.divisor,
            speedup=options.speedup,
        )
        for routing in options.routing:
            say(f"{routing}: {len(arrivals)} requests in {arrivals[-1].arrived_at:.0f} s")
            real, deployment, others = measured(options, routing, arrivals)
            worst = max(worst, others)
            said = simulated(_parts(options, deployment, routing), arrivals)
            figures[routing] = {"measured": asdict(real), "simulated": asdict(said)}
    except (ServerError, ReplayError, TraceError, ValueError) as error:
        say(f"error: {error}")
        return 1
    record = Record(
        bench="scale",
        title=f"simulated against {options.replicas} real routers",
        command=command("scale", ["validate", *arguments]),
        figures=figures,
        other_cores=worst,
    )
    print(record.text(text(figures)))
    if options.record:
        record.write()
    return 0 if max(errors(figures)) <= TOLERANCE else 1


def ratio(pair: Mapping[str, Mapping[str, float]], name: str) -> float:
    """A simulated figure over the measured one."""
    real, said = pair["measured"][name], pair["simulated"][name]
    if real:
        return said / real
    return math.inf if said else 1.0


def errors(figures: dict[str, dict[str, dict[str, float]]]) -> list[float]:
    """The relative error of every simulated figure."""
    return [abs(ratio(pair, name) - 1) for pair in figures.values() for name in TITLES]


def text(figures: dict[str, dict[str, dict[str, float]]]) -> str:
    """A row for each policy and figure."""
    rows = []
    for routing, pair in figures.items():
        for name, title in TITLES.items():
            real, said = pair["measured"][name], pair["simulated"][name]
            rows.append([routing, title, f"{real:.3g}", f"{said:.3g}", f"{ratio(pair, name):.2f}"])
    return markdown(["routing", "figure", "measured", "simulated", "ratio"], rows)
