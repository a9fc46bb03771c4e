"""Stops processes that hold a loaded model while another one is measured, so that they use no CPU."""

from __future__ import annotations

from contextlib import suppress

import psutil

from bench.harness.machine import family

STOP_SECONDS = 20.0


class Family:
    """A process of ours and all its descendants."""

    def __init__(self, pid: int) -> None:
        self._process: psutil.Process | None = None
        with suppress(psutil.NoSuchProcess):
            self._process = psutil.Process(pid)

    def processes(self) -> list[psutil.Process]:
        """The living members; empty once the first process has ended."""
        if self._process is None:
            return []
        try:
            return family(self._process)
        except psutil.NoSuchProcess:
            return []

    def freeze(self) -> None:
        """Stop every member, parents first, so that no parent restarts a child."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.suspend()

    def thaw(self) -> None:
        """Let all members continue."""
        for process in reversed(self.processes()):
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def end(self) -> None:
        """Send SIGTERM to all, then SIGKILL to the rest, because workers may outlive their parent."""
        processes = self.processes()
        for signal in (psutil.Process.terminate, psutil.Process.kill):
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    signal(process)
                    process.resume()
            _, processes = psutil.wait_procs(processes, timeout=STOP_SECONDS)
