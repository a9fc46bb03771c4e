"""One grammar that is tried out by a fork of `grammar_worker`."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
from contextlib import suppress
from functools import partial

from millrace_shard.batch.sequence import Grammar
from millrace_shard.structured_output.work_limit import WorkLimit, cpu_seconds

CHUNK = 1 << 16


class Stalled(Exception):  # noqa: N818
    """A process was given no time to do its work."""


class Trial:
    """The fork, and what it has said so far; used by one thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._said = bytearray()
        self._pid: int | None = None
        self._paused_at: float | None = None
        self._paused_seconds = 0.0

    def begin(self, grammar: Grammar, *, seconds: float) -> None:
        """Hand `grammar` over, which the fork has to take within `seconds`.

        Raises OSError where it is gone, Stalled.
        """
        limit = WorkLimit(seconds, lambda: None)
        if not self.is_answered_within(limit):
            raise Stalled
        self._pid = int(self.answer())
        request = {"kind": grammar.kind.name, "source": grammar.source}
        self._connection.settimeout(seconds)
        try:
            self._connection.sendall(json.dumps(request).encode() + b"\n")
        except TimeoutError:
            raise Stalled from None

    def limit(self, seconds: float) -> WorkLimit:
        """On its work, from now on; while it is paused no clock runs."""
        assert self._pid is not None
        return WorkLimit(seconds, partial(cpu_seconds, self._pid), clock=self._unpaused_seconds)

    def is_answered_within(self, limit: WorkLimit) -> bool:
        """Wait until it has answered, or the limit is reached. Raises OSError where it is gone."""
        while (left := limit.seconds_left()) > 0.0:
            if self.is_answered(left):
                return True
        return self.is_answered(0.0)

    def is_answered(self, seconds: float) -> bool:
        """Whether the answer is there; wait for more of it, for `seconds` at most. Raises OSError where it is gone."""
        if self._said.endswith(b"\n"):
            return True
        if not select.select([self._connection], [], [], seconds)[0]:
            return False
        chunk = self._connection.recv(CHUNK)
        if not chunk:
            raise ConnectionError("the process has ended")
        self._said += chunk
        return self._said.endswith(b"\n")

    def answer(self) -> bytes:
        """The line that it has said, once it has."""
        answer = bytes(self._said)
        self._said.clear()
        return answer

    def pause(self) -> None:
        """It does nothing until `resume`."""
        self._signal(signal.SIGSTOP)
        self._paused_at = time.monotonic()

    def resume(self) -> None:
        """After `pause`."""
        assert self._paused_at is not None
        self._paused_seconds += time.monotonic() - self._paused_at
        self._paused_at = None
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End it, whatever it does."""
        if self._pid is not None and not self._has_hung_up():
            self._signal(signal.SIGKILL)
        self._connection.close()

    def _unpaused_seconds(self) -> float:
        now = time.monotonic() if self._paused_at is None else self._paused_at
        return now - self._paused_seconds

    def _has_hung_up(self) -> bool:
        """Whether it has ended, after which its process id may be another's."""
        with suppress(OSError):
            self._connection.settimeout(0)
            return self._connection.recv(1) == b""
        return False

    def _signal(self, number: signal.Signals) -> None:
        assert self._pid is not None
        with suppress(ProcessLookupError):
            os.kill(self._pid, number)
