"""The launcher of one replica, as a child process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from threading import Thread
from time import sleep
from typing import IO

from millrace_ray.child import bound
from millrace_ray.serving.errors import ServingError

ASK_SECONDS = 2.0
POLL_SECONDS = 0.1
KEPT_LINES = 20
OPENMP_THREADS = "OMP_NUM_THREADS"
"""Ray sets it for its own worker; the launcher divides the CPUs among its ranks."""
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


class LauncherProcess:
    """`millrace-launcher` on an address of this node."""

    def __init__(self, address: str, port: int, flags: Mapping[str, str]) -> None:
        """Start it. `flags`: the text of their environment variables."""
        self.address = address
        self.port = port
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        environment = {name: text for name, text in os.environ.items() if name != OPENMP_THREADS}
        if not environment.get(VISIBLE_GPUS):
            # Ray hides the GPUs from a worker that has asked for none; the ranks of a launcher may be elsewhere.
            environment.pop(VISIBLE_GPUS, None)
        environment |= {name.upper(): text for name, text in flags.items()}
        program = [sys.executable, "-m", "millrace_launcher", f"--hostname={address}"]
        self._process = subprocess.Popen(  # noqa: S603
            bound([*program, f"--port={port}"]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            process_group=0,
        )
        Thread(target=self._pump, daemon=True).start()

    def wait_until_ready(self) -> None:
        """Return once a request would run; raises ServingError if it ends before."""
        while self.status("/readyz") != 200:
            self.check_running()
            sleep(POLL_SECONDS)

    def check(self) -> None:
        """Raise ServingError unless its router answers."""
        self.check_running()
        if self.status("/livez") != 200:
            raise ServingError(f"the router at {self.address}:{self.port} does not answer")

    def check_running(self) -> None:
        """Raise ServingError if it has ended."""
        code = self._process.poll()
        if code is not None:
            last = next((line for line in reversed(self._lines) if line.strip()), "no output")
            raise ServingError(f"the launcher ended with exit code {code}: {last}")

    def status(self, path: str) -> int:
        """The status of a page; 0 without an answer."""
        with suppress(OSError, HTTPException):
            return self._get(path)[0]
        return 0

    def metrics(self) -> Mapping[str, float]:
        """Its series without labels, by name; raises OSError."""
        _, body = self._get("/metrics")
        pairs = (line.split(" ") for line in body.decode().splitlines() if "{" not in line)
        return {pair[0]: float(pair[1]) for pair in pairs if len(pair) == 2}

    def end(self, grace_seconds: float) -> None:
        """SIGTERM, and the time to drain."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_seconds)
        self._process.kill()
        self._process.wait()

    def _get(self, path: str) -> tuple[int, bytes]:
        connection = HTTPConnection(self.address, self.port, timeout=ASK_SECONDS)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def _pump(self) -> None:
        stream: IO[str] | None = self._process.stdout
        assert stream is not None
        with stream:
            for line in stream:
                self._lines.append(line.rstrip("\n"))
                sys.stdout.write(line)
                sys.stdout.flush()
