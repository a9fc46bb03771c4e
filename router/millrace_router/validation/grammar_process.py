"""The router's end of `grammar_worker`: asks, waits no longer than is sane, starts another where one has ended."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from threading import Timer
from typing import Any, TypeVar, TypeVarTuple
from weakref import finalize

import structlog

from millrace_router.errors import Overloaded, RouterError
from millrace_router.validation.grammar_admission import BUSY

MOST_SECONDS = 30.0
"""What takes a tenth of a second as a rule takes no longer, unless the process is stopped or the machine swaps."""

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")

log = structlog.get_logger(__name__)


class GrammarProcess:
    """One process, started when it is first needed, that ends with this object; used by one thread at a time."""

    def __init__(self, *, most_seconds: float = MOST_SECONDS) -> None:
        """A call that takes `most_seconds` is given up, and the process with it."""
        self._most_seconds = most_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = _nothing

    def call(self, function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        """Call a function of a module there, with arguments that can be pickled.

        Raises:
            RouterError: as the function.
            Overloaded: there is no process to be had, or it ended, or it took far too long.

        """
        request = pickle.dumps((function, arguments))
        try:
            has_result, answer = self._ask(request)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            log.warning("A grammar could not be read in a process of its own", error=repr(error))
            self._close()
            raise Overloaded(BUSY) from error
        if not has_result:
            raise _told(*answer)
        result: Result = answer
        return result

    def _ask(self, request: bytes) -> tuple[bool, Any]:
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        timer = Timer(self._most_seconds, process.kill)
        timer.start()
        try:
            process.stdin.write(request)
            process.stdin.flush()
            answer: tuple[bool, Any] = pickle.load(process.stdout)  # noqa: S301
            return answer
        finally:
            timer.cancel()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._close()
            # What this process can import, its child can, and nothing from where it happens to stand.
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "millrace_router.validation.grammar_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
            self._end = finalize(self, _end, self._process)
            log.info("Large grammars are read by a process of their own", pid=self._process.pid)
        return self._process

    def _close(self) -> None:
        self._process = None
        self._end()


def _told(kind: type[RouterError], arguments: tuple[object, ...]) -> RouterError:
    error = kind.__new__(kind)
    error.args = arguments
    return error


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process, whatever it does."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        # What could not be written is still to be, and cannot.
        with suppress(OSError):
            pipe.close()


def _nothing() -> None:
    pass
