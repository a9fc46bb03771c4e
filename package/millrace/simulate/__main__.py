"""`millrace-simulate`: read the command line, simulate, show the figures."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from millrace.simulate.config import ConfigError, Plan, plan_from_args
from millrace.simulate.report import as_json, plot, table
from millrace.simulate.simulation import simulate
from millrace.simulate.trace import TraceError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the simulator; return the exit status, which is 2 for invalid input."""
    try:
        plan = plan_from_args(sys.argv[1:] if argv is None else argv)
        _run(plan)
    except (ConfigError, TraceError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def _run(plan: Plan) -> None:
    if plan.save_config is not None:
        _write(plan.save_config, plan.deployment.model_dump_json(indent=2) + "\n")
    results = list(simulate(plan.simulations, processes=plan.processes))
    sys.stdout.write(table(plan.sweeps, results))
    if plan.json_file is not None:
        _write(plan.json_file, as_json(plan.sweeps, results))
    if plan.plot is not None:
        _write(plan.plot, plot(plan.sweeps, results))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main())
