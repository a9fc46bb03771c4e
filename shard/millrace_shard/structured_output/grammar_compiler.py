"""Grammars of all sequences: tried out in another process, compiled once, kept while they are used."""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import BoundedSemaphore, Lock

from millrace_shard.batch.sequence import Grammar
from millrace_shard.structured_output.background import in_background
from millrace_shard.structured_output.grammar.grammar_source import GrammarInvalid, lark_of
from millrace_shard.structured_output.grammar_process import CompilerBusy, GrammarProcess
from millrace_shard.structured_output.matcher import Lexer, Matcher
from millrace_shard.structured_output.vocabulary import Vocabulary, load_vocabulary

MAX_SOURCE_BYTES = 1 << 20
TIMEOUT = 5.0
MAX_COMPILES = 32
"""Grammars that are tried out at a time, a few of which may take long; twice as many as a router asks for."""
MAX_CALLS = 64
"""Calls of `check` at a time, several of which may be for one grammar; fewer than the server has workers."""
MAX_CACHED = 256
MAX_CACHED_BYTES = 4 << 20
"""Of source; compiled, a grammar takes up to a hundred times that."""
SMALL = 1 << 14
"""Characters of source that are translated in this process without anyone's noticing."""
RENEW_SECONDS = 0.25
"""What compiling may have taken for a step to wait until it is done once more."""

logger = logging.getLogger(__name__)


class GrammarCompiler:
    """Safe for any number of threads; never to be waited for by the engine's."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        folder: Path,
        *,
        timeout: float = TIMEOUT,
        max_source_bytes: int = MAX_SOURCE_BYTES,
    ) -> None:
        """`folder` is where a process reads the same vocabulary; `timeout` in seconds bounds one grammar."""
        self.vocabulary = vocabulary
        self._timeout = timeout
        self._max_source_bytes = max_source_bytes
        self._lock = Lock()
        self._cache: OrderedDict[bytes, tuple[int, Future[Matcher]]] = OrderedDict()
        self._compiles = BoundedSemaphore(MAX_COMPILES)
        self._calls = BoundedSemaphore(MAX_CALLS)
        self._process = GrammarProcess(
            folder, vocab_size=vocabulary.size, eos_token_ids=vocabulary.eos_token_ids
        )

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        timeout: float = TIMEOUT,
        max_source_bytes: int = MAX_SOURCE_BYTES,
    ) -> GrammarCompiler | None:
        """For the model in `folder`; None, with a line in the log, where its tokenizer allows no grammars."""
        vocabulary = load_vocabulary(folder, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
        if vocabulary is None:
            return None
        return cls(vocabulary, folder, timeout=timeout, max_source_bytes=max_source_bytes)

    def check(self, grammar: Grammar, *, is_busy: Callable[[], bool] = lambda: False) -> None:
        """Whether a sequence may have `grammar`: compiles it unless that was done.

        `is_busy` tells, from any thread, whether CPUs are wanted for something better than a grammar that takes long.

        Raises GrammarInvalid with the reason, CompilerBusy.
        """
        with _place(self._calls, f"{MAX_CALLS} requests wait for their grammars"):
            self._compiled(grammar, tried_out=False, is_busy=is_busy)

    def matcher(self, grammar: Grammar) -> Matcher:
        """A new matcher at the start of a text. `grammar` was checked, here or in an earlier life of this shard.

        Raises GrammarInvalid.
        """
        return self._compiled(grammar, tried_out=True, is_busy=None).copy()

    def renewed(self, grammar: Grammar, stale: Lexer) -> Matcher | None:
        """As `matcher`, on another lexer than `stale`; None where a step may not wait for one.

        Raises GrammarInvalid.
        """
        key = _key(grammar)
        with self._lock:
            size, known = self._cache.get(key, (0, None))
            is_stale = known is not None and _has_lexer(known, stale)
            if is_stale:
                del self._cache[key]
        if (is_stale or known is None) and (size > SMALL or stale.compile_seconds > RENEW_SECONDS):
            return None
        return self.matcher(grammar)

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _compiled(
        self, grammar: Grammar, *, tried_out: bool, is_busy: Callable[[], bool] | None
    ) -> Matcher:
        size = len(grammar.source.encode(errors="surrogatepass"))
        if size > self._max_source_bytes:
            raise GrammarInvalid(
                f"the grammar has {size} bytes; {self._max_source_bytes} are allowed"
            )
        key = _key(grammar)
        future: Future[Matcher] = Future()
        with self._lock:
            _, known = self._cache.setdefault(key, (size, future))
            self._cache.move_to_end(key)
            self._evict()
        if known is not future:
            if tried_out and not known.done():
                # What is found out beside a step may take its time, and a step waits for this.
                return self._compiled_at_once(grammar, size)
            try:
                return known.result()
            except (GrammarInvalid, CompilerBusy):
                if not tried_out:
                    raise
            return self._compiled(grammar, tried_out=True, is_busy=None)
        try:
            lark = self._translated(grammar, size, tried_out=tried_out, is_busy=is_busy)
            compiled = partial(Matcher.of, lark, self.vocabulary)
            # Of a grammar that was tried out before, a step may be waiting for this.
            matcher = compiled() if tried_out else in_background(compiled)
        except BaseException as error:
            # Whoever waits is told; whoever comes later tries again, as a process may have been slow or killed.
            self._drop(key, future)
            future.set_exception(error)
            raise
        future.set_result(matcher)
        return matcher

    def _compiled_at_once(self, grammar: Grammar, size: int) -> Matcher:
        lark = self._translated(grammar, size, tried_out=True, is_busy=None)
        return Matcher.of(lark, self.vocabulary)

    def _translated(
        self, grammar: Grammar, size: int, *, tried_out: bool, is_busy: Callable[[], bool] | None
    ) -> str:
        """What to give `LLMatcher`. Raises GrammarInvalid, CompilerBusy."""
        if tried_out and size <= SMALL:
            return lark_of(grammar)
        try:
            with _place(self._compiles, f"{MAX_COMPILES} grammars are being compiled"):
                return self._process.try_out(grammar, timeout=self._timeout, is_busy=is_busy)
        except (GrammarInvalid, CompilerBusy) as error:
            if not tried_out:
                raise
            # A sequence that runs must not fail for what became of a process.
            logger.warning("a grammar that is known is compiled in this process: %s", error)
            return lark_of(grammar)

    def _evict(self) -> None:
        """Down to the limits, least recently used first; the newest stays. The lock is held."""
        total = sum(size for size, _ in self._cache.values())
        while len(self._cache) > 1 and (len(self._cache) > MAX_CACHED or total > MAX_CACHED_BYTES):
            _, (size, _) = self._cache.popitem(last=False)
            total -= size

    def _drop(self, key: bytes, future: Future[Matcher]) -> None:
        with self._lock:
            if self._cache.get(key, (0, None))[1] is future:
                del self._cache[key]


def _has_lexer(compiled: Future[Matcher], lexer: Lexer) -> bool:
    if not compiled.done() or compiled.exception() is not None:
        return False
    return compiled.result().lexer is lexer


@contextmanager
def _place(places: BoundedSemaphore, taken: str) -> Iterator[None]:
    if not places.acquire(blocking=False):
        raise CompilerBusy(f"{taken}; try again later")
    try:
        yield
    finally:
        places.release()


def _key(grammar: Grammar) -> bytes:
    source = grammar.source.encode(errors="surrogatepass")
    return hashlib.blake2b(source, person=grammar.kind.name.encode()).digest()
