"""A process that tries grammars out, each in a fork of it: one that takes for ever, or all memory, harms nobody.

`python -m millrace_shard.structured_output.grammar_worker FOLDER VOCAB_SIZE EOS_IDS`, with one end of a Unix socket
as standard input. It says `ready`, and from then on takes connections, each for one grammar. Lines of JSON go over a
connection: the fork's process id; a request with `kind` and `source`; an answer with `lark`, what `LLMatcher` may be
given, or `error`, or `busy` with what was in the way of an answer.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import socket
import sys
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from millrace_shard.batch.sequence import Grammar, GrammarKind
from millrace_shard.process import die_with_parent
from millrace_shard.structured_output.background import in_background
from millrace_shard.structured_output.grammar.grammar_source import GrammarInvalid, lark_of
from millrace_shard.structured_output.matcher import Matcher
from millrace_shard.structured_output.vocabulary import Vocabulary, load_vocabulary

STACK_BYTES = 1 << 20
"""Half of what the smallest thread of the shard may have: what overflows a stack does so here."""
COMPILE_BYTES = 1 << 30
NUM_TRIED = 12
"""Tokens of a text that are tried out: a list of alternatives that is too long shows itself behind the first ones."""
NICENESS = 10
"""A forward pass goes before."""
READY = b"ready\n"
FIRST = (Grammar(GrammarKind.REGEX, "a+"), Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}'))
"""The first of each kind takes four times as long as others, which each fork would pay for."""


def main(argv: list[str]) -> int:
    """Fork for each connection until standard input ends."""
    die_with_parent()
    os.nice(NICENESS)
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
    # Nobody waits for a fork.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # Forks share what is never collected.
    gc.freeze()
    own = os.getpid()
    with socket.socket(fileno=sys.stdin.fileno()) as control:
        control.sendall(READY)
        while descriptors := socket.recv_fds(control, 1, 1)[1]:
            # Where there is no room for another process, whoever asks finds the connection closed.
            with socket.socket(fileno=descriptors[0]) as connection, suppress(OSError):
                if os.fork() == 0:
                    _try_out_for(connection, vocabulary, parent=own)
        control.detach()
    return 0


def _try_out_for(connection: socket.socket, vocabulary: Vocabulary, *, parent: int) -> NoReturn:
    """In a fork, which this ends."""
    try:
        die_with_parent(parent)
        _go_first_where_memory_is_short()
        _say(connection, os.getpid())
        with connection.makefile("rb") as stream:
            if line := stream.readline():
                _say(connection, _answer_in_background(line, vocabulary))
    finally:
        # Nothing of the parent's is to be wound up here.
        os._exit(0)


def _answer_in_background(line: bytes, vocabulary: Vocabulary) -> dict[str, Any]:
    try:
        return in_background(partial(_answer_to, line, vocabulary))
    except Exception as error:  # noqa: BLE001, such as that there is no room for a thread
        return {"busy": str(error)}


def _go_first_where_memory_is_short() -> None:
    """Rather than the shard, which has more of it."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _answer_to(line: bytes, vocabulary: Vocabulary) -> dict[str, Any]:
    request = json.loads(line)
    return _answer(Grammar(GrammarKind[request["kind"]], request["source"]), vocabulary)


def _answer(grammar: Grammar, vocabulary: Vocabulary) -> dict[str, Any]:
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
    """What to compile, which was compiled here, allows some text, and reaches no limit at its beginning."""
    lark = lark_of(grammar)
    matcher, random = Matcher.of(lark, vocabulary), np.random.default_rng(0)
    for place in range(NUM_TRIED):
        mask = np.frombuffer(matcher.inner.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        _check(matcher)
        if not len(allowed):
            if place == 0:
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
    """Room for `num_bytes` more than is mapped now; an allocation past that ends the process."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _say(connection: socket.socket, said: object) -> None:
    connection.sendall(json.dumps(said).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
