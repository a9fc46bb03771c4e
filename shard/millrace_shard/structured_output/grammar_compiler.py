"""Grammars of all sequences: tried out in a separate process, compiled once, and cached."""

from __future__ import annotations

import hashlib
import sys
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import BoundedSemaphore, Lock

from millrace_proto.sequence import Grammar
from millrace_shard.structured_output.compilation import compiled
from millrace_shard.structured_output.grammar_process import CompilerBusy, GrammarProcess
from millrace_shard.structured_output.grammar_source import GrammarInvalid
from millrace_shard.structured_output.grammar_worker import use_idle_cpus
from millrace_shard.structured_output.matcher import Lexer, Matcher
from millrace_shard.structured_output.vocabulary import Vocabulary

MAX_SOURCE_BYTES = 1 << 17
TIMEOUT = 2.0
NUM_COMPILES = 8
"""Grammars that are tried out and compiled at a time; they share the idle CPUs, and each may take 1 GiB."""
WAIT_SECONDS = 50.0
"""Wall-clock time that a request waits for its grammar. A router waits longer."""
MAX_CALLS = 64
"""Calls of `check` at a time, several of which may be for one grammar; fewer than the server has workers."""
MAX_CACHED = 256
MAX_CACHED_BYTES = 4 << 20
"""Bytes of source; a compiled grammar takes up to a hundred times its source."""
MAX_STATE_BYTES = 1 << 29
"""Bytes of the states that texts have reached in the cached grammars: up to 200 MB for one."""
MAX_RENEWED_CHARS = 1 << 14
RENEW_SECONDS = 0.25
"""Limits of source and compile time for a grammar that a step may compile once more."""


class GrammarCompiler:
    """Compiles grammars for any number of threads."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        folder: Path,
        *,
        timeout: float = TIMEOUT,
        max_source_bytes: int = MAX_SOURCE_BYTES,
    ) -> None:
        """`folder` has the tokenizer of `vocabulary`; `timeout` is the CPU time in seconds that a grammar may take."""
        self.vocabulary = vocabulary
        self._timeout = timeout
        self._max_source_bytes = max_source_bytes
        self._lock = Lock()
        self._cache: OrderedDict[bytes, tuple[int, Future[Matcher]]] = OrderedDict()
        self._calls = BoundedSemaphore(MAX_CALLS)
        self._pool = ThreadPoolExecutor(
            NUM_COMPILES,
            thread_name_prefix="compile",
            initializer=use_idle_cpus if sys.platform == "linux" else None,
        )
        self._process = GrammarProcess(
            folder, vocab_size=vocabulary.size, eos_token_ids=vocabulary.eos_token_ids
        )

    def check(self, grammar: Grammar, *, wait_seconds: float = WAIT_SECONDS) -> None:
        """Compile `grammar`, unless the cache has it, before a sequence may use it.

        Raises GrammarInvalid with the reason, CompilerBusy.
        """
        size, key = self._checked_size(grammar), _key(grammar)
        with _call_in(self._calls):
            with self._lock:
                cached = self._find(key)
                if cached is None:
                    cached = self._pool.submit(self._try_out, grammar)
                    self._keep(key, size, cached)
            try:
                cached.result(wait_seconds)
            except (TimeoutError, CancelledError):
                # A grammar that has not begun to compile leaves its place to others.
                cached.cancel()
                raise CompilerBusy("the machine is too busy to compile a grammar") from None
            finally:
                if not _is_compiled(cached):
                    self._drop(key, cached)

    def matcher(self, grammar: Grammar) -> Matcher:
        """A new matcher at the start of a text, of a grammar that `check` has accepted.

        A grammar that is not in the cache compiles on the calling thread, since a step may wait for it.

        Raises GrammarInvalid.
        """
        size, key = self._checked_size(grammar), _key(grammar)
        with self._lock:
            cached = self._find(key)
            self._evict()
        if cached is not None and _is_compiled(cached):
            return cached.result().copy()
        _, matcher = compiled(grammar, self.vocabulary)
        if cached is None:
            future: Future[Matcher] = Future()
            future.set_result(matcher)
            with self._lock:
                self._keep(key, size, future)
        return matcher.copy()

    def renewed(self, grammar: Grammar, stale: Lexer) -> Matcher | None:
        """The same as `matcher`, with another lexer than `stale`; None if that takes longer than a step may wait.

        Raises GrammarInvalid.
        """
        key = _key(grammar)
        with self._lock:
            _, cached = self._cache.get(key, (0, None))
        is_stale = cached is not None and _is_compiled(cached) and cached.result().lexer is stale
        if cached is not None and is_stale:
            self._drop(key, cached)
        is_slow = len(grammar.source) > MAX_RENEWED_CHARS or stale.compile_seconds > RENEW_SECONDS
        if (cached is None or is_stale) and is_slow:
            return None
        return self.matcher(grammar)

    def close(self) -> None:
        self._process.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _checked_size(self, grammar: Grammar) -> int:
        """Bytes of the source. Raises GrammarInvalid for more than are allowed."""
        size = len(grammar.source.encode(errors="surrogatepass"))
        if size > self._max_source_bytes:
            raise GrammarInvalid(
                f"the grammar has {size} bytes; {self._max_source_bytes} are allowed"
            )
        return size

    def _try_out(self, grammar: Grammar) -> Matcher:
        lark = self._process.try_out(grammar, timeout=self._timeout)
        return Matcher.of(lark, self.vocabulary)

    def _find(self, key: bytes) -> Future[Matcher] | None:
        """The cached grammar, which becomes the most recently used. The caller holds the lock."""
        if key not in self._cache:
            return None
        self._cache.move_to_end(key)
        return self._cache[key][1]

    def _keep(self, key: bytes, size: int, compiled: Future[Matcher]) -> None:
        """Cache a grammar and evict the least recently used ones beyond the limits. The caller holds the lock."""
        self._cache[key] = (size, compiled)
        self._cache.move_to_end(key)
        self._evict()

    def _evict(self) -> None:
        """Evict the least recently used grammars beyond the limits, but the last. The caller holds the lock."""
        source = sum(size for size, _ in self._cache.values())
        states = sum(_state_bytes(compiled) for _, compiled in self._cache.values())
        while len(self._cache) > 1 and (
            len(self._cache) > MAX_CACHED or source > MAX_CACHED_BYTES or states > MAX_STATE_BYTES
        ):
            _, (size, compiled) = self._cache.popitem(last=False)
            source -= size
            states -= _state_bytes(compiled)

    def _drop(self, key: bytes, compiled: Future[Matcher]) -> None:
        with self._lock:
            if self._cache.get(key, (0, None))[1] is compiled:
                del self._cache[key]


def _is_compiled(future: Future[Matcher]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def _state_bytes(future: Future[Matcher]) -> int:
    return future.result().lexer.state_bytes if _is_compiled(future) else 0


@contextmanager
def _call_in(calls: BoundedSemaphore) -> Iterator[None]:
    if not calls.acquire(blocking=False):
        raise CompilerBusy(f"{MAX_CALLS} requests wait for their grammars; try again later")
    try:
        yield
    finally:
        calls.release()


def _key(grammar: Grammar) -> bytes:
    source = grammar.source.encode(errors="surrogatepass")
    return hashlib.blake2b(source, person=grammar.kind.name.encode()).digest()
