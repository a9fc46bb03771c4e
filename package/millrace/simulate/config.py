"""The simulator's command line: flags of the router, of the workload and of the simulation."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticUndefined

from millrace.errors import no_server
from millrace.simulate.deployment import Deployment
from millrace.simulate.simulation import Simulation, Sweep
from millrace.simulate.workload import Workload

SERVER_TIMEOUT_SECONDS = 10.0
READ_ONLY = ("cost_model", "step_ratios", "window_groups")
"""Fields without a flag; they are read from a server or a file."""

_BY_ITSELF = "millrace-simulate"
PROGRAM = _BY_ITSELF if Path(sys.argv[0]).name == _BY_ITSELF else "millrace simulate"
"""As it was typed, by itself or through `millrace`."""
EXAMPLE = f"""\
example:
  {PROGRAM} --server http://localhost:3000 --rate 40 --requests 20000 \\
    --prompt-tokens lognormal:400:1:3000 --output-tokens lognormal:150:0.8:1000 \\
    --sweep max-batch-prefill-tokens=512,1024,2048,4096 --plot budgets.svg
"""

M = TypeVar("M", bound=BaseModel)


class ConfigError(Exception):
    """The command line is invalid; the message says what to change."""


class _Parser(argparse.ArgumentParser):
    """Raises an error where argparse would print the usage of all flags and exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


class Scope(BaseModel):
    """The size of the simulation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    replicas: int = Field(
        default=1,
        ge=1,
        description="Identical servers that get the requests in turn: one is simulated with its share of them, and"
        " counts and throughput are scaled up.",
    )
    processes: int = Field(
        default_factory=lambda: os.cpu_count() or 1,
        ge=1,
        description="Processes that simulate the points of a sweep; all cores when absent.",
    )


class Plan(BaseModel):
    """The parsed command line."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    sweeps: tuple[Sweep, ...]
    simulations: tuple[Simulation, ...]
    """One for each point of the sweeps."""
    processes: int
    deployment: Deployment
    """The deployment without the changes of the sweeps."""
    plot: Path | None
    json_file: Path | None
    save_config: Path | None


def plan_from_args(argv: Sequence[str]) -> Plan:
    """Read the command line, and the server or files that it names.

    Raises:
        ConfigError: it is invalid.
        SystemExit: it asks for help.

    """
    given = vars(new_parser().parse_args(argv))
    sweeps = _sweeps(given.pop("sweep"))
    server, cost = given.pop("server"), given.pop("cost")
    if server is None and cost is None:
        raise ConfigError("--server or --cost says what a step costs: give one of them")
    files = {name: given.pop(name) for name in ("plot", "json_file", "save_config")}
    if files["plot"] is not None and not sweeps:
        raise ConfigError("--plot draws figures over a --sweep: give one")
    base: dict[str, Any] = {}
    if server is not None:
        base |= _deployment_of(_server_info(server))
    if cost is not None:
        base |= _deployment_of(_cost_file(Path(cost)))
    base |= given
    points = [
        base | dict(zip((sweep.field for sweep in sweeps), point, strict=True))
        for point in Sweep.points(sweeps)
    ]
    return Plan(
        sweeps=sweeps,
        simulations=tuple(map(_simulation, points)),
        processes=_model(Scope, base).processes,
        deployment=_model(Deployment, points[0] | base),
        **files,
    )


def _simulation(values: Mapping[str, Any]) -> Simulation:
    deployment, workload = _model(Deployment, values), _model(Workload, values)
    if workload.image_share and not deployment.reads_images:
        raise ConfigError("--image-share: the cost model has no `tile`, the cost of a tile")
    return Simulation(
        deployment=deployment,
        workload=workload,
        replicas=_model(Scope, values).replicas,
    )


def _model(model: type[M], values: Mapping[str, Any]) -> M:
    """A model of those `values` that are its fields."""
    try:
        return model(**{name: values[name] for name in model.model_fields if name in values})
    except ValidationError as error:
        problem = error.errors()[0]
        flag = "--" + str(problem["loc"][0]).replace("_", "-") + ": " if problem["loc"] else ""
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "missing":
            message = "is missing"
        raise ConfigError(flag + message) from None


def _sweeps(texts: Sequence[str]) -> tuple[Sweep, ...]:
    try:
        sweeps = tuple(map(Sweep.parse, texts))
    except ValueError as error:
        raise ConfigError(f"--sweep: {error}") from None
    if len(sweeps) > 2:
        raise ConfigError("--sweep: two flags at most can be swept")
    known = {*Deployment.model_fields, *Workload.model_fields, *Scope.model_fields}
    for sweep in sweeps:
        if sweep.field not in known - {*READ_ONLY, "processes"}:
            raise ConfigError(f"--sweep: there is no flag --{sweep.flag} to sweep")
    return sweeps


def _server_info(server: str) -> Mapping[str, Any]:
    if not server.startswith(("http://", "https://")):
        raise ConfigError(f"--server: {server!r} is not an http:// or https:// address")
    url = server.rstrip("/") + "/info?costs=true"
    try:
        with urlopen(url, timeout=SERVER_TIMEOUT_SECONDS) as answer:  # noqa: S310
            info = json.load(answer)
    except HTTPError as error:
        raise ConfigError(f"--server: {url} answers with status {error.code}") from error
    except URLError as error:
        reason = error.reason
        if not isinstance(reason, OSError):
            raise ConfigError(f"--server: cannot read {url}: {reason}") from error
        raise ConfigError(f"--server: {no_server(server.rstrip('/'), reason)}") from error
    except (OSError, HTTPException, ValueError) as error:
        raise ConfigError(f"--server: cannot read {url}: {error}") from error
    if not isinstance(info, dict) or "cost_model" not in info:
        raise ConfigError(f"--server: {url} shows no cost_model; is it a Millrace server?")
    return info


def _cost_file(path: Path) -> Mapping[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--cost: cannot read {path}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"--cost: {path} is not a JSON object")
    return data if "cost_model" in data else {"cost_model": data}


def _deployment_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those `values` that are fields of a deployment; None counts as absent."""
    return {name: values[name] for name in Deployment.model_fields if values.get(name) is not None}


def new_parser() -> argparse.ArgumentParser:
    """The parser of the command line; it raises ConfigError."""
    parser = _Parser(
        prog=PROGRAM,
        description="Run the router's scheduler under a virtual clock: what would this load see?",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    source = parser.add_argument_group("the deployment, and where it is read from")
    source.add_argument("--server", metavar="URL", help="A running server, asked for its /info.")
    source.add_argument(
        "--cost",
        metavar="FILE",
        help="JSON: coefficients of the cost model, or what --save-config wrote.",
    )
    source.add_argument(
        "--save-config", metavar="FILE", type=Path, help="Write the deployment as JSON, for --cost."
    )
    _add_fields(source, Deployment)
    _add_fields(parser.add_argument_group("the workload"), Workload)
    scope = parser.add_argument_group("the simulation")
    _add_fields(scope, Scope)
    scope.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="FLAG=V,V",
        help="Simulate each of these values; a second one gives lines of the plot.",
    )
    scope.add_argument("--plot", metavar="FILE", type=Path, help="Write the sweep as SVG.")
    scope.add_argument(
        "--json", metavar="FILE", type=Path, dest="json_file", help="Write the results as JSON."
    )
    return parser


def _add_fields(group: argparse._ArgumentGroup, model: type[BaseModel]) -> None:
    """Add a flag for each field; a flag that is not given is absent from the result."""
    for name, field in model.model_fields.items():
        if name in READ_ONLY:
            continue
        choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else None
        known = field.default not in (None, (), PydanticUndefined)
        shown = f" [{field.default}]" if known else ""
        group.add_argument(
            "--" + name.replace("_", "-"),
            default=argparse.SUPPRESS,
            metavar="|".join(choices) if choices else name.split("_")[-1].upper(),
            help=((field.description or "") + shown).replace("%", "%%"),
        )
