"""The shard's end of `grammar_worker`: asks, waits no longer than allowed, starts another where one has ended."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Lock

from millrace_shard.batch.sequence import Grammar
from millrace_shard.structured_output.grammar.grammar_source import GrammarInvalid
from millrace_shard.structured_output.grammar_trial import Stalled, Trial
from millrace_shard.structured_output.grammar_worker import READY
from millrace_shard.structured_output.slow_turns import SlowTurns, TooManySlow

START_SECONDS = 60.0
ENDING_SECONDS = 0.1
WORKER = "millrace_shard.structured_output.grammar_worker"

logger = logging.getLogger(__name__)


class CompilerBusy(Exception):  # noqa: N818
    """Nothing was found out about a grammar, for reasons that lie not in it: to be tried again."""


class GrammarProcess:
    """One process, started when it is first needed, and its forks; for any number of threads."""

    def __init__(self, folder: Path, *, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._arguments = [str(folder), str(vocab_size), json.dumps(eos_token_ids)]
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._turns = SlowTurns()

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        process = self._process
        return None if process is None else process.pid

    def try_out(
        self, grammar: Grammar, *, timeout: float, is_busy: Callable[[], bool] | None
    ) -> str:
        """What to give `LLMatcher` for `grammar`; `timeout` in seconds of work.

        A grammar that takes long goes on slowly while `is_busy`, and after others of its kind; None is for a step that
        waits.

        Raises GrammarInvalid, CompilerBusy.
        """
        try:
            trial, process = self._begun(grammar)
        except (OSError, Stalled) as error:
            raise CompilerBusy(f"no process to compile grammars in: {error}") from error
        limit = trial.limit(timeout)
        try:
            is_answered = (
                trial.is_answered_within(limit)
                if is_busy is None
                else self._turns.work(trial, limit, is_busy=is_busy)
            )
            if not is_answered:
                if limit.is_spent():
                    raise GrammarInvalid(f"the grammar takes over {timeout:g} s to compile")
                raise CompilerBusy("the machine is too busy to compile a grammar")
            answer: dict[str, str] = json.loads(trial.answer())
        except TooManySlow as error:
            raise CompilerBusy(str(error)) from None
        except OSError:
            if _has_ended(process):
                raise CompilerBusy("the process to compile grammars in has ended") from None
            raise GrammarInvalid("the grammar takes too much memory or nests too deeply") from None
        finally:
            trial.close()
        if (reason := answer.get("busy")) is not None:
            raise CompilerBusy(f"no process to compile grammars in: {reason}")
        if (reason := answer.get("error")) is not None:
            raise GrammarInvalid(reason)
        return answer["lark"]

    def close(self) -> None:
        """End the process, whatever it and its forks do."""
        with self._lock:
            self._end()

    def _begun(self, grammar: Grammar) -> tuple[Trial, subprocess.Popen[bytes]]:
        """A fork that has `grammar`. Raises OSError, Stalled."""
        ours, theirs = socket.socketpair()
        trial = Trial(ours)
        try:
            with theirs, self._lock:
                process, control = self._started()
                socket.send_fds(control, [b"1"], [theirs.fileno()])
            trial.begin(grammar, seconds=START_SECONDS)
        except BaseException as error:
            trial.close()
            if isinstance(error, Stalled):
                self.close()
            raise
        return trial, process

    def _started(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """The process, and how to talk to it. The lock is held. Raises OSError, Stalled."""
        if self._process is None or self._control is None or self._process.poll() is not None:
            self._end()
            # What this process can import, its child can, and nothing from where it happens to stand.
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
            logger.info("grammars are tried out by process %d", self._process.pid)
        return self._process, self._control

    def _end(self) -> None:
        process, control = self._process, self._control
        self._process = self._control = None
        if control is not None:
            control.close()
        if process is not None:
            process.kill()
            process.wait()


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a fork has ended with it, which takes a moment to show."""
    try:
        process.wait(ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True
