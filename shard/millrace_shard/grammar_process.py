"""The shard's end of `grammar_worker`: asks, waits no longer than allowed, kills, starts another."""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from millrace_shard.grammar_source import GrammarInvalid
from millrace_shard.sequence import Grammar
from millrace_shard.work_limit import WorkLimit, cpu_seconds

START_SECONDS = 60.0
CHUNK = 1 << 16

logger = logging.getLogger(__name__)


class Stalled(Exception):  # noqa: N818
    """A process was given no time to do its work."""


class CompilerBusy(Exception):  # noqa: N818
    """Nothing was found out about a grammar, for reasons that lie not in it: to be tried again."""


class GrammarProcess:
    """One process, started when it is first needed; used by one thread at a time."""

    def __init__(self, folder: Path, *, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._arguments = [str(folder), str(vocab_size), json.dumps(eos_token_ids)]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return None if self._process is None else self._process.pid

    def try_out(self, grammar: Grammar, *, timeout: float) -> str:
        """What to give `LLMatcher` for `grammar`; `timeout` in seconds of work.

        Raises GrammarInvalid, CompilerBusy.
        """
        try:
            process = self._started()
        except (OSError, Stalled) as error:
            self.close()
            raise CompilerBusy(f"no process to compile grammars in: {error}") from error
        try:
            answer = _ask(process, grammar, timeout)
        except Stalled:
            self.close()
            raise CompilerBusy("the machine is too busy to compile a grammar") from None
        except TimeoutError:
            self.close()
            raise GrammarInvalid(f"the grammar takes over {timeout:g} s to compile") from None
        except OSError:
            self.close()
            raise GrammarInvalid("the grammar takes too much memory or nests too deeply") from None
        if (reason := answer.get("error")) is not None:
            raise GrammarInvalid(reason)
        lark: str = answer["lark"]
        return lark

    def close(self) -> None:
        """End the process, whatever it does."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            # What this process can import, its child can, and nothing from where it happens to stand.
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "OPENBLAS_NUM_THREADS": "1",
            }
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-P", "-m", "millrace_shard.grammar_worker", *self._arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
            _read_line(self._process, START_SECONDS)
            logger.info("grammars are tried out by process %d", self._process.pid)
        return self._process


def _ask(process: subprocess.Popen[bytes], grammar: Grammar, seconds: float) -> dict[str, Any]:
    assert process.stdin is not None
    request = {"kind": grammar.kind.name, "source": grammar.source}
    # The process has answered everything so far: it reads.
    process.stdin.write(json.dumps(request).encode() + b"\n")
    process.stdin.flush()
    answer: dict[str, Any] = json.loads(_read_line(process, seconds))
    return answer


def _read_line(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """A line of its output.

    Raises:
        TimeoutError: the process has worked for `seconds`.
        Stalled: it was given no time to.
        ConnectionError: it has ended.

    """
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    line, limit = bytearray(), WorkLimit(seconds, partial(cpu_seconds, process.pid))
    while not line.endswith(b"\n"):
        if (left := limit.seconds_left()) <= 0.0:
            raise TimeoutError if limit.is_spent() else Stalled
        if not select.select([descriptor], [], [], left)[0]:
            continue
        chunk = os.read(descriptor, CHUNK)
        if not chunk:
            raise ConnectionError("the process has ended")
        line += chunk
    return bytes(line)
