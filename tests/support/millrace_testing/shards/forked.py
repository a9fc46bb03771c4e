"""Processes forked from a server that has imported torch, gRPC and the shard, so that each starts at once.

The server is a child of the test process and ends with it. It never computes, so that a fork loses no thread of torch.
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
    """The multiprocessing context whose processes are forked from the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    path = os.pathsep.join(filter(None, sys.path))
    with mock.patch.dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1"):
        forkserver.ensure_running()
    return context


class Forked:
    """A program in its own process, with some methods of `subprocess.Popen`."""

    def __init__(
        self,
        program: Program,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the program with a umask of 0, so that it must set private modes itself."""
        self._output = NamedTemporaryFile("r")  # noqa: SIM115
        self._process: ForkServerProcess = forking().Process(
            target=_run, args=(program, list(arguments), self._output.name, dict(environment or {}))
        )
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """None while the process runs, and -N after signal N ended it, as in `Popen`."""
        return self._process.exitcode

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process.pid is not None
        return self._process.pid

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the running process."""
        os.kill(self.pid, number)

    def end(self) -> None:
        """Kill the process if it runs, and delete its output."""
        self._process.kill()
        self._process.join()
        self._output.close()

    def communicate(self, timeout: float) -> str:
        """The output of the ended process on stdout and stderr; raises TimeoutError after `timeout` seconds."""
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
    # The module recorded its value at import, in the server.
    vars(process)["PARENT"] = os.getppid()
    sys.exit(program(arguments))
