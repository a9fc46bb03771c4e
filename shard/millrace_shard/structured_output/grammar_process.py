"""A separate process that tries out grammars, so that no grammar can take the shard's time, memory or stack."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from threading import Lock

from millrace_proto.sequence import Grammar
from millrace_shard.structured_output.grammar_source import GrammarInvalid
from millrace_shard.structured_output.grammar_worker import READY

START_SECONDS = 50.0
"""Wall-clock time for the process to start, and for each fork of it."""
ANSWER_SECONDS = 50.0
"""Wall-clock time for a fork to answer. A router waits longer; the CPU time of a fork has a lower limit."""
ENDING_SECONDS = 0.1
WORKER = "millrace_shard.structured_output.grammar_worker"

logger = logging.getLogger(__name__)


class CompilerBusy(Exception):  # noqa: N818
    """A grammar was not tried out, for reasons outside of the grammar: the caller may try again."""


class GrammarProcess:
    """A `grammar_worker`, which starts with the first grammar. Any number of threads may use it."""

    def __init__(self, folder: Path, *, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._arguments = [str(folder), str(vocab_size), json.dumps(eos_token_ids)]
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    def try_out(self, grammar: Grammar, *, timeout: float) -> str:
        """Compile `grammar` in a fork; the result is Lark that `LLMatcher` takes.

        `timeout` is the CPU time in seconds that the fork may use.

        Raises GrammarInvalid, CompilerBusy.
        """
        request = {"kind": grammar.kind.name, "source": grammar.source, "seconds": timeout}
        ours, theirs = socket.socketpair()
        with ours:
            try:
                with theirs, self._lock:
                    process, control = self._started()
                    socket.send_fds(control, [b"1"], [theirs.fileno()])
                self._await_fork(ours)
            except OSError as error:
                raise CompilerBusy(f"no process to compile grammars in: {error}") from error
            answer = _answer(ours, json.dumps(request).encode() + b"\n")
        if not answer:
            if _has_ended(process):
                raise CompilerBusy("the process to compile grammars in has ended")
            raise GrammarInvalid("the grammar takes too much memory or nests too deeply")
        reply: dict[str, str] = json.loads(answer)
        if (reason := reply.get("busy")) is not None:
            raise CompilerBusy(f"no process to compile grammars in: {reason}")
        if (reason := reply.get("error")) is not None:
            raise GrammarInvalid(reason)
        return reply["lark"]

    def close(self) -> None:
        with self._lock:
            self._end()

    def _await_fork(self, connection: socket.socket) -> None:
        """Wait until a fork has taken `connection`. Raises OSError; a process that hangs is killed."""
        connection.settimeout(START_SECONDS)
        try:
            if connection.recv(len(READY)) != READY:
                raise ConnectionError("it could not fork")
        except TimeoutError:
            self.close()
            raise

    def _started(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """The process and its control socket. The caller holds the lock. Raises OSError."""
        if self._process is None or self._control is None or self._process.poll() is not None:
            self._end()
            # The child imports from the same paths, and not from the working directory.
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "OPENBLAS_NUM_THREADS": "1",
            }
            self._control, theirs = socket.socketpair()
            self._control.settimeout(START_SECONDS)
            try:
                with theirs:
                    self._process = subprocess.Popen(  # noqa: S603
                        [sys.executable, "-P", "-m", WORKER, *self._arguments],
                        stdin=theirs.fileno(),
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        env=environment,
                    )
                if self._control.recv(len(READY)) != READY:
                    raise ConnectionError("it has ended")
            except OSError:
                self._end()
                raise
            logger.info("process %d tries out grammars", self._process.pid)
        return self._process, self._control

    def _end(self) -> None:
        process, control = self._process, self._control
        self._process = self._control = None
        if control is not None:
            control.close()
        if process is not None:
            process.kill()
            process.wait()


def _answer(connection: socket.socket, request: bytes) -> bytes:
    """The fork's answer to `request`; empty if the fork has ended without one. Raises CompilerBusy."""
    connection.settimeout(ANSWER_SECONDS)
    try:
        connection.sendall(request)
        with connection.makefile("rb") as stream:
            return stream.readline()
    except TimeoutError:
        raise CompilerBusy("the machine is too busy to compile a grammar") from None
    except OSError:
        return b""


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether `process` has ended. A fork that dies with it may be noticed a moment earlier."""
    try:
        process.wait(ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True
