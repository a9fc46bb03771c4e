"""llguidance and xgrammar on one vocabulary: setting up, compiling, filling masks, going on by a token."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bench.guidance.schemas import Schemas
from bench.guidance.workloads import PEOPLE
from bench.scheduling.lab import Lab
from bench.scheduling.part import Case, Figures, Part, Table
from bench.scheduling.workloads import milliseconds
from millrace_shard.batch.sequence import Grammar, GrammarKind
from millrace_shard.structured_output.grammar.grammar_source import GrammarInvalid, lark_of
from millrace_shard.structured_output.matcher import Matcher
from millrace_shard.structured_output.vocabulary import Vocabulary, read_tokens

Bits = NDArray[np.int32]
NUM_SCHEMAS, MOST_TOKENS = 60, 60
LARGE = {
    "type": "object",
    "properties": {
        f"field_{number}": {"type": "string", "pattern": f"^[a-z]{{3,{number + 3}}}[0-9]+$"}
        for number in range(120)
    },
}


class Followed(Protocol):
    """A compiled grammar along one text."""

    def fill(self, bits: Bits) -> None:
        """Write the mask [1, W]."""

    def accept(self, token: int) -> bool:
        """Go on; False at the end of the text."""


class Library(Protocol):
    """Either of the two, set up for one vocabulary."""

    def compile(self, schema: dict[str, Any]) -> Callable[[], Followed]:
        """What makes followers of `schema`. ValueError where the library refuses it."""


class Llguidance:
    """As the shard uses it, in one thread."""

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int], eos: int) -> None:
        self._vocabulary = Vocabulary.of(tokens, special=special, eos_token_ids=(eos,))

    def compile(self, schema: dict[str, Any]) -> Callable[[], Followed]:
        """As the shard does."""
        try:
            lark = lark_of(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
            matcher = Matcher.of(lark, self._vocabulary)
        except GrammarInvalid as error:
            raise ValueError(str(error)) from error
        return lambda: _Llguidance(matcher.copy())


class _Llguidance:
    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher

    def fill(self, bits: Bits) -> None:
        self._matcher.inner.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)

    def accept(self, token: int) -> bool:
        assert self._matcher.consume(token)
        return not self._matcher.has_ended


class Xgrammar:
    """With no more white space than ours."""

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int], eos: int) -> None:
        import torch  # noqa: PLC0415
        import xgrammar  # noqa: PLC0415

        self._from_numpy = torch.from_numpy
        self._matcher = xgrammar.GrammarMatcher
        known = xgrammar.TokenizerInfo(
            encoded_vocab=[b"" if id_ in special else token for id_, token in enumerate(tokens)],
            vocab_type=xgrammar.VocabType.RAW,
            vocab_size=len(tokens),
            stop_token_ids=[eos],
        )
        self._compiler = xgrammar.GrammarCompiler(known, max_threads=1, cache_enabled=False)

    def compile(self, schema: dict[str, Any]) -> Callable[[], Followed]:
        """Keys that are not listed are allowed, as the specification has it."""
        try:
            compiled = self._compiler.compile_json_schema(
                json.dumps(schema), any_whitespace=False, separators=(",", ":"), strict_mode=False
            )
        except (RuntimeError, ValueError) as error:
            raise ValueError(str(error)) from error
        return lambda: _Xgrammar(self._matcher(compiled), self._from_numpy)


class _Xgrammar:
    def __init__(self, matcher: Any, from_numpy: Callable[[Bits], Any]) -> None:  # noqa: ANN401
        self._matcher = matcher
        self._from_numpy = from_numpy

    def fill(self, bits: Bits) -> None:
        self._matcher.fill_next_token_bitmask(self._from_numpy(bits))

    def accept(self, token: int) -> bool:
        assert self._matcher.accept_token(token)
        return not self._matcher.is_terminated()


MAKERS: dict[str, Callable[[Sequence[bytes], Sequence[int], int], Library]] = {
    "llguidance": Llguidance,
    "xgrammar": Xgrammar,
}
CASES = tuple(Case(name) for name in MAKERS)


def run(lab: Lab, case: Case) -> Figures:
    config = json.loads((lab.model / "config.json").read_text())
    tokens, special = read_tokens(lab.model / "tokenizer.json", config["vocab_size"])
    eos = config["eos_token_id"]
    make = partial(MAKERS[case.name], tokens, sorted({*special, eos}), eos)
    # Once in vain, for what is imported.
    make()
    started = time.perf_counter()
    library = make()
    setting_up = time.perf_counter() - started
    source = Schemas("libraries")
    schemas: list[dict[str, Any]] = [
        PEOPLE,
        LARGE,
        *(source.schema() for _ in range(lab.sized(NUM_SCHEMAS, 5))),
    ]
    compiling, filling, accepting = [], [], []
    for number, schema in enumerate(schemas):
        started = time.perf_counter()
        try:
            new = library.compile(schema)
        except ValueError:
            continue
        compiling.append(time.perf_counter() - started)
        fills, accepts = follow(new(), len(tokens), random.Random(number))
        filling += fills
        accepting += accepts
    return {
        "vocabulary": float(len(tokens)),
        "set-up, ms": 1000 * setting_up,
        "taken": float(len(compiling)),
        **_quantiles("compile", compiling, unit="ms"),
        **_quantiles("mask", filling, unit="us"),
        **_quantiles("accept", accepting, unit="us"),
    }


def _quantiles(name: str, seconds: Sequence[float], *, unit: str) -> dict[str, float]:
    scale = {"ms": 1.0, "us": 1000.0}[unit]
    p50, p99, worst = milliseconds(seconds, 0.5, 0.99, 1.0)
    return {
        f"{name} p50, {unit}": scale * p50,
        f"p99 of {name}": scale * p99,
        f"worst {name}": scale * worst,
    }


def follow(
    followed: Followed, vocab_size: int, rng: random.Random
) -> tuple[list[float], list[float]]:
    """Take any of the tokens allowed, again and again; seconds of each mask and of each token."""
    fills, accepts = [], []
    bits = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)
    for _ in range(MOST_TOKENS):
        started = time.perf_counter()
        followed.fill(bits)
        fills.append(time.perf_counter() - started)
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        if not len(allowed):
            break
        token = int(rng.choice(allowed))
        started = time.perf_counter()
        goes_on = followed.accept(token)
        accepts.append(time.perf_counter() - started)
        if not goes_on:
            break
    return fills, accepts


def conclude(table: Table) -> Sequence[str]:
    ours, other = (table[case.name] for case in CASES)
    masks, compiles = (
        other[title].median / ours[title].median for title in ("worst mask", "worst compile")
    )
    return [
        f"The longest mask of xgrammar takes {masks:.1f} times as long as that of llguidance, its longest compilation"
        f" {compiles:.1f} times."
    ]


PART = Part(
    name="libraries",
    title="llguidance against xgrammar",
    method=(
        "Both on the model's vocabulary, one thread each: schemas with many strings, patterns and objects, then a walk"
        f" of at most {MOST_TOKENS} tokens through each, any of the allowed ones at every step."
    ),
    cases=CASES,
    run=run,
    conclude=conclude,
)
