"""A process that tries out each grammar in a separate fork, with limits on CPU time, memory and stack.

Command: `python -m millrace_shard.structured_output.grammar_worker FOLDER VOCAB_SIZE EOS_IDS`, with a Unix socket as
standard input. The process sends `ready`, then receives connections over this socket, one for each grammar. A fork
sends `ready` over its connection and receives a line of JSON with `kind`, `source` and `seconds` of CPU time. Its
answer is a line of JSON with `lark`, which `LLMatcher` takes, or `error` with the fault of the grammar, or `busy` with
another reason for not trying it out.
"""

from __future__ import annotations

import gc
import json
import math
import os
import resource
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from millrace_proto.sequence import Grammar, GrammarKind
from millrace_shard.process import die_with_parent
from millrace_shard.structured_output.compilation import compiled
from millrace_shard.structured_output.grammar_source import GrammarInvalid
from millrace_shard.structured_output.matcher import Matcher
from millrace_shard.structured_output.vocabulary import Vocabulary, load_vocabulary

STACK_BYTES = 1 << 20
"""Half the stack of the smallest thread of the shard: a grammar that overflows a stack overflows this one."""
COMPILE_BYTES = 1 << 30
NUM_TRIED = 12
"""Tokens of a text that are tried out: some limits, such as the number of alternatives, show only after a few."""
TICK_SECONDS = 0.01
"""Least time between looks at the CPU time of a fork."""
READY = b"ready\n"
FIRST = (Grammar(GrammarKind.REGEX, "a+"), Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}'))
"""Compiled before any fork: the first grammar of each kind takes four times as long as later ones."""


def main(argv: list[str]) -> int:
    """Fork for each connection until standard input ends."""
    die_with_parent()
    use_idle_cpus()
    folder, vocab_size, eos_token_ids = argv
    vocabulary = load_vocabulary(
        Path(folder), vocab_size=int(vocab_size), eos_token_ids=json.loads(eos_token_ids)
    )
    if vocabulary is None:
        return 1
    _limit_memory(COMPILE_BYTES)
    threading.stack_size(STACK_BYTES)
    for grammar in FIRST:
        _answer(grammar, vocabulary)
    # The kernel removes forks that have ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # Forks share the memory of objects that are never collected.
    gc.freeze()
    parent = os.getpid()
    with socket.socket(fileno=sys.stdin.fileno()) as control:
        control.sendall(READY)
        while descriptors := socket.recv_fds(control, 1, 1)[1]:
            # When the fork fails, the shard finds the connection closed.
            with socket.socket(fileno=descriptors[0]) as connection, suppress(OSError):
                if os.fork() == 0:
                    _serve_one(connection, vocabulary, parent=parent)
        control.detach()
    return 0


def use_idle_cpus() -> None:
    """Let the calling thread, and all that it starts, run on half of the CPUs while these are idle.

    A nice value is not enough: threads of a forward pass wait for each other many times in each time slice that a nice
    thread gets. Idle CPUs alone are not enough either: a thread that wakes may wait for the next tick of its CPU.
    """
    if sys.platform != "linux" or os.sched_getscheduler(0) == os.SCHED_IDLE:
        return
    cpus = sorted(os.sched_getaffinity(0))
    # A sandbox may forbid it.
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        os.sched_setaffinity(0, cpus[len(cpus) // 2 :])


def _serve_one(connection: socket.socket, vocabulary: Vocabulary, *, parent: int) -> NoReturn:
    """Try out one grammar in a fork, which ends here."""
    try:
        die_with_parent(parent)
        _prefer_for_oom_kill()
        connection.sendall(READY)
        with connection.makefile("rb") as stream:
            if line := stream.readline():
                answer = _answer_in_time(json.loads(line), vocabulary)
                connection.sendall(json.dumps(answer).encode() + b"\n")
    finally:
        # Exit handlers are the parent's.
        os._exit(0)


def _prefer_for_oom_kill() -> None:
    """Let the kernel kill this process rather than the shard when memory runs out."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _answer_in_time(request: dict[str, Any], vocabulary: Vocabulary) -> dict[str, str]:
    """Answer a request on a thread with a small stack, within its CPU time."""
    grammar, seconds = Grammar(GrammarKind[request["kind"]], request["source"]), request["seconds"]
    # The kernel ends this process if this thread does not get to look at the time.
    most = math.ceil(seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (most, most))
    try:
        answer = ThreadPoolExecutor(1).submit(_answer, grammar, vocabulary)
    except RuntimeError as error:
        return {"busy": str(error)}
    while not answer.done() and (left := seconds - time.process_time()) > 0:
        wait([answer], max(left, TICK_SECONDS))
    if answer.done():
        return answer.result()
    return {"error": f"the grammar takes over {seconds:g} s to compile"}


def _answer(grammar: Grammar, vocabulary: Vocabulary) -> dict[str, str]:
    try:
        return {"lark": _try_out(grammar, vocabulary)}
    except GrammarInvalid as error:
        return {"error": str(error)}
    except RecursionError:
        return {"error": "the grammar is nested too deeply"}
    except MemoryError:
        return {"error": "the grammar takes too much memory"}
    except ValueError as error:
        return {"error": str(error)[:500]}


def _try_out(grammar: Grammar, vocabulary: Vocabulary) -> str:
    """The grammar as Lark, after it has compiled here, has allowed a text, and has reached no limit at its start."""
    lark, matcher = compiled(grammar, vocabulary)
    random = np.random.default_rng(0)
    for length in range(NUM_TRIED):
        mask = np.frombuffer(matcher.inner.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        _check(matcher)
        if not len(allowed):
            if length == 0:
                raise GrammarInvalid("no text matches")
            break
        matcher.consume(int(random.choice(allowed)))
        _check(matcher)
        if matcher.has_ended:
            break
    return lark


def _check(matcher: Matcher) -> None:
    """Raises GrammarInvalid where a limit is reached."""
    if matcher.inner.is_error():
        raise GrammarInvalid(matcher.error() or "it cannot be followed")


def _limit_memory(num_bytes: int) -> None:
    """Allow `num_bytes` more than is mapped now; a larger allocation ends the process."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
