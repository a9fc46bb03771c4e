"""Processes forked from one that has loaded torch, gRPC and the shard, so that each begins in a moment.

That one belongs to the test process, ends with it, and never computes, so that no thread of torch is lost in a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from tempfile import NamedTemporaryFile
from unittest import mock

PRELOADED = [
    "millrace_testing.shards.poison_shard",
    "millrace_shard.commands.serve",
    "millrace_testing.shards.ranks",
]

Program = Callable[[Sequence[str]], int]


@cache
def forking() -> ForkServerContext:
    """The context whose processes are forked from the one that has loaded all."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    path = os.pathsep.join(filter(None, sys.path))
    with mock.patch.dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1"):
        forkserver.ensure_running()
    return context


class Forked:
    """A program in a process of its own, with a few of the methods of `subprocess.Popen`."""

    def __init__(
        self,
        program: Program,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it, with a umask of 0: whatever is private has to be so by its own doing."""
        self._output = NamedTemporaryFile("r")  # noqa: SIM115
        self._process: ForkServerProcess = forking().Process(
            target=_run, args=(program, list(arguments), self._output.name, dict(environment or {}))
        )
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """As of `Popen`: None while it runs, and -N where signal N ended it."""
        return self._process.exitcode

    @property
    def pid(self) -> int:
        """Of a process that has been started."""
        assert self._process.pid is not None
        return self._process.pid

    def send_signal(self, number: signal.Signals) -> None:
        """To a process that still runs."""
        os.kill(self.pid, number)

    def end(self) -> None:
        """Kill it if it still runs, and forget its output."""
        self._process.kill()
        self._process.join()
        self._output.close()

    def communicate(self, timeout: float) -> str:
        """All it wrote to stdout and stderr, once it has ended; raises TimeoutError after `timeout` seconds."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"it runs on after {timeout} s")
        return self._output.read()


def _run(
    program: Program, arguments: Sequence[str], output: str, environment: Mapping[str, str]
) -> None:
    from millrace_shard import process

    with Path(output).open("ab") as file:
        for standard in (1, 2):
            os.dup2(file.fileno(), standard)
    os.environ.update(environment)
    os.umask(0)
    # Noted when the module was loaded, which was in the process that this one was forked from.
    vars(process)["PARENT"] = os.getppid()
    sys.exit(program(arguments))
