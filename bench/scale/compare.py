"""`python -m bench.scale compare`: the routings on a trace, simulated over numbers of replicas.

A copy of the trace runs for each `--replicas-per-copy` replicas, with its own prompts, so every replica has the same
load however many there are. Of more than `--sample` replicas some whole cells are simulated. The replica is an 8B model
on a GPU with 80 GB: its costs are estimates from the GPU's data sheet, not measurements.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.harness.command_line import command, run_parser, say
from bench.harness.paths import IMAGES_FOLDER
from bench.harness.record import Record
from bench.harness.tables import markdown
from bench.scale.fleet import Fleet, simulate
from bench.scale.fleet_metrics import FLEET_FIGURES, FleetMetrics
from bench.scale.simulate import add_flags
from bench.scale.simulated_replica import Routing
from bench.scale.traces import TraceWorkload
from millrace.charts.lines import Panel, curves
from millrace.charts.svg import short
from millrace.simulate.deployment import Deployment
from millrace.simulate.trace import TraceError
from millrace_proto.cores import usable_cores

COSTS = {
    "step": 0.006,
    "decode_row": 0.00003,
    "decode_context_token": 4e-8,
    "prefill_step": 0.002,
    "prefill_token": 0.000044,
    "prefill_pair": 1.3e-9,
}
CACHES = {"0.32 M": 5_001, "1.28 M": 20_001, "5.12 M": 80_001}
"""KV blocks by the tokens that they hold: what one GPU has, what its host's memory would, and its disk."""
BLOCK_SIZE = 64
SHOWN = (
    "cache_hit_share",
    "ttft_p50",
    "ttft_p90",
    "requests_per_second",
    "recomputed_tokens",
    "load_max_mean",
)
"""Figures on the plot."""


@dataclass(frozen=True, slots=True)
class Point:
    """One simulation."""

    routing: Routing
    replicas: int
    metrics: FleetMetrics


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; argparse ends the program on a bad one."""
    parser = run_parser("scale compare", __doc__)
    parser.add_argument("--trace", type=Path, required=True, help="a trace, such as Mooncake's")
    parser.add_argument("--replicas", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--replicas-per-copy", type=int, default=4)
    parser.add_argument("--requests", type=int, help="only so many of the trace's, in each copy")
    parser.add_argument("--speedup", type=float, default=1.0)
    add_flags(parser)
    parser.set_defaults(sample=250)
    parser.add_argument("--cache", choices=CACHES, default="0.32 M", help="tokens a replica keeps")
    parser.add_argument("--processes", type=int, default=usable_cores())
    parser.add_argument("--name", help="write the plot to docs/images/scale-NAME.svg")
    return parser.parse_args(arguments)


def fleet(options: argparse.Namespace, routing: Routing, replicas: int) -> Fleet:
    """The replicas and the load of one point; raises ValueError."""
    if replicas % options.replicas_per_copy:
        raise ValueError(f"{replicas} replicas have no whole number of copies")
    return Fleet(
        deployment=Deployment(
            cost_model=COSTS,
            num_blocks=CACHES[options.cache],
            block_size=BLOCK_SIZE,
            max_total_tokens=200_000,
            max_concurrent_requests=4096,
        ),
        workload=TraceWorkload(
            trace=options.trace,
            trace_requests=options.requests,
            copies=replicas // options.replicas_per_copy,
            speedup=options.speedup,
        ),
        replicas=replicas,
        sample=min(replicas, options.sample),
        routing=routing,
        cell_size=options.cell_size,
        gateways=options.gateways,
        balance_factor=options.balance_factor,
    )


def main(arguments: Sequence[str]) -> int:
    """Exit code 1 if the trace is invalid."""
    options = parse_arguments(arguments)
    chosen = [(routing, count) for count in options.replicas for routing in options.routing]
    try:
        fleets = [fleet(options, routing, count) for routing, count in chosen]
        results = simulate(fleets, processes=options.processes)
    except (TraceError, ValueError) as error:
        say(f"error: {error}")
        return 1
    points = [
        Point(routing, count, metrics)
        for (routing, count), metrics in zip(chosen, results, strict=True)
    ]
    record = Record(
        bench="scale",
        title=f"routings on {options.trace.stem}, {options.cache} tokens a cache",
        command=command("scale", ["compare", *arguments]),
        figures=[_figures(point) for point in points],
    )
    print(record.text(table(points)))
    if options.name:
        path = IMAGES_FOLDER / f"scale-{options.name}.svg"
        path.write_text(plot(points, record.title), encoding="utf-8")
    if options.record:
        record.write()
    return 0


def _figures(point: Point) -> Mapping[str, object]:
    named = {figure.name: figure.of(point.metrics) for figure in FLEET_FIGURES}
    return {"routing": point.routing, "replicas": point.replicas, **named}


def table(points: Sequence[Point]) -> str:
    """A row for each point."""
    shown = [figure for figure in FLEET_FIGURES if figure.name in (*SHOWN, "finished", "rejected")]
    rows = [
        [
            str(point.replicas),
            point.routing,
            *(short(figure.of(point.metrics)) for figure in shown),
        ]
        for point in points
    ]
    return markdown(["replicas", "routing", *(figure.title for figure in shown)], rows)


def plot(points: Sequence[Point], title: str) -> str:
    """An SVG document: replicas along the axis, and a line for each routing."""
    labels = list(dict.fromkeys(str(point.replicas) for point in points))
    panels = [
        Panel(
            title=figure.title,
            points={
                routing: list(
                    enumerate(
                        figure.of(point.metrics) for point in points if point.routing == routing
                    )
                )
                for routing in dict.fromkeys(point.routing for point in points)
            },
            x_title="replicas",
            labels=labels,
        )
        for figure in FLEET_FIGURES
        if figure.name in SHOWN
    ]
    return curves(title, panels, num_columns=2)
