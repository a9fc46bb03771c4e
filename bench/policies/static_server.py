"""A server with static batching: `python -m bench.policies.static_server PLANNER [flag of the launcher ...]`.

The launcher starts this program again in place of `millrace-router`, with `router` as the first argument.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from bench.policies.static_planner import NaivePlanner, StaticPlanner
from millrace_launcher.__main__ import main as launcher
from millrace_launcher.settings.commands import Programs
from millrace_router.__main__ import main as router
from millrace_router.scheduler import factory
from millrace_router.scheduler.planner import Planner
from millrace_router.start import running

PLANNERS: Mapping[str, type[Planner]] = {"static": StaticPlanner, "static-naive": NaivePlanner}


def run_router(planner: type[Planner], arguments: list[str]) -> int:
    """The router, which plans its own measurement of steps as always and everything after that with `planner`."""
    measure = running.measure_steps

    async def measure_steps(*parts: Any, **options: Any) -> None:  # noqa: ANN401
        await measure(*parts, **options)
        stack.enter_context(patch.object(factory, "Planner", planner))

    with ExitStack() as stack:
        stack.enter_context(patch.object(running, "measure_steps", measure_steps))
        return router(arguments)


def main() -> int:
    """Exit code of the launcher, or of the router."""
    module, arguments = "bench.policies.static_server", sys.argv[1:]
    if arguments[0] == "router":
        return run_router(PLANNERS[arguments[1]], arguments[2:])
    name, *flags = arguments
    programs = Programs(router=(sys.executable, "-m", module, "router", name))
    return launcher(flags, programs)


if __name__ == "__main__":
    sys.exit(main())
