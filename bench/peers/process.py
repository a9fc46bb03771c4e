"""The parent's side of an engine process: starts it, loads a model, runs requests, freezes it in between."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import psutil

from bench.harness.machine import Family
from bench.harness.paths import ROOT
from bench.peers.worker import LOAD, RUN, Limits, Request
from millrace.load.measurement import Timeline

SOURCES = ("proto", "router", "shard", "launcher", ".")
END_SECONDS = 10.0
COMMON = {"HF_HUB_OFFLINE": "1", "PYTHONFAULTHANDLER": "1"}


class EngineError(Exception):
    """The engine did not start, or died; the message holds the end of its log."""


class EngineProcess:
    """One engine. Created running, and frozen after each call that returns."""

    def __init__(
        self,
        name: str,
        *,
        python: Path,
        module: str,
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        """`environment` is added to our own."""
        self.name = name
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        read_end, write_end = os.pipe()
        path = os.pathsep.join(str(ROOT / source) for source in SOURCES)
        with log.open("wb") as output:
            self._child = subprocess.Popen(
                [str(python), "-m", module, f"--answers={write_end}"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, **COMMON, "PYTHONPATH": path, **environment},
                pass_fds=[write_end],
                start_new_session=True,
            )
        os.close(write_end)
        self._answers: IO[str] = os.fdopen(read_end)
        self._family = Family(self._child.pid)

    def processes(self) -> list[psutil.Process]:
        """All processes of the engine."""
        return self._family.processes()

    def load(self, model: Path, limits: Limits) -> None:
        """Load a checkpoint and allocate memory; raises EngineError."""
        self._do({"do": LOAD, "model": str(model), "limits": asdict(limits)})

    def run(self, requests: Sequence[Request], concurrency: int) -> list[Timeline]:
        """Generate for all requests, at most `concurrency` in flight; raises EngineError."""
        wanted = [(each.ids, each.new_tokens) for each in requests]
        answer = self._do({"do": RUN, "requests": wanted, "concurrency": concurrency})
        return [Timeline(due, arrivals) for due, arrivals in answer["moments"]]

    def end(self) -> None:
        """End it and its descendants."""
        self._family.thaw()
        if self._child.stdin is not None:
            with suppress(BrokenPipeError):
                self._child.stdin.close()
        self._family.end()
        self._child.wait()
        self._answers.close()

    def _wait(self) -> int:
        """Wait for the end of a process without an answer; one of its threads may block that end."""
        try:
            return self._child.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self._family.end()
            return self._child.wait()

    def _do(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._child.stdin is not None
        self._family.thaw()
        try:
            self._child.stdin.write(json.dumps(command).encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            line = ""
        else:
            line = self._answers.readline()
        if not line:
            status = self._wait()
            end = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
            raise EngineError(f"{self.name} ended with {status}:\n{end}")
        self._family.freeze()
        answer: dict[str, Any] = json.loads(line)
        return answer
