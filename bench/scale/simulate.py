"""`python -m bench.scale simulate`: a fleet behind gateways, under any workload of `millrace simulate`.

Takes the flags of `millrace simulate` and its own; `--trace` also reads the forms in which Mooncake, Azure and
Qwen-Bailian publish traces. A column of the table is a routing at a point of the sweeps.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from bench.harness.command_line import say
from bench.harness.tables import markdown
from bench.scale.cell import Failure
from bench.scale.fleet import Fleet, simulate
from bench.scale.fleet_metrics import FLEET_FIGURES
from bench.scale.simulated_replica import POLICIES, Routing
from bench.scale.traces import TraceWorkload
from millrace.charts.svg import short
from millrace.simulate.config import ConfigError, new_parser, plan_from_args
from millrace.simulate.simulation import Simulation
from millrace.simulate.trace import TraceError


def parse_arguments(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The fleet's part of the command line, and the rest, which is for `millrace simulate`."""
    parser = argparse.ArgumentParser(
        "python -m bench.scale simulate",
        description=__doc__,
        epilog=new_parser().format_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_flags(parser)
    parser.set_defaults(routing=["round-robin"])
    parser.add_argument("--fail", type=Failure.parse, help="AT:COUNT:FOR, in seconds")
    parser.add_argument("--copies", type=int, default=1, help="of the trace, side by side")
    return parser.parse_known_args(arguments)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of every simulated fleet."""
    parser.add_argument("--routing", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--sample", type=int, help="replicas to simulate in place of all")
    parser.add_argument("--gateways", type=int, default=1, help="of a cell; they share nothing")
    parser.add_argument("--cell-size", type=int, default=256, help="most replicas of a cell")
    parser.add_argument(
        "--balance-factor", type=float, default=1.25, help="most load, as a multiple of the mean"
    )


def fleet(options: argparse.Namespace, simulation: Simulation, routing: Routing) -> Fleet:
    """The fleet of one point; raises ValueError."""
    replicas = simulation.replicas
    if options.fail is not None and options.fail.count > replicas:
        raise ValueError(f"--fail: there are only {replicas} replicas")
    workload = dict(simulation.workload) | {"copies": options.copies}
    return Fleet(
        deployment=simulation.deployment,
        workload=TraceWorkload.model_construct(**workload),
        replicas=replicas,
        sample=min(options.sample or replicas, replicas),
        routing=routing,
        cell_size=options.cell_size,
        gateways=options.gateways,
        balance_factor=options.balance_factor,
        failures=() if options.fail is None else (options.fail,),
    )


def main(arguments: Sequence[str]) -> int:
    """Exit code 1 for a wrong command line or trace."""
    options, rest = parse_arguments(arguments)
    try:
        plan = plan_from_args(rest)
        chosen = [(each, routing) for each in plan.simulations for routing in options.routing]
        fleets = [fleet(options, simulation, routing) for simulation, routing in chosen]
        results = simulate(fleets, processes=plan.processes)
    except (ConfigError, TraceError, ValueError) as error:
        say(f"error: {error}")
        return 1
    titles = ["", *(f"{each.replicas} replicas, {routing}" for each, routing in chosen)]
    rows = [[figure.title, *(short(figure.of(m)) for m in results)] for figure in FLEET_FIGURES]
    print(markdown(titles, rows))
    return 0
