"""Batches of rows to sample: their parameters, and how peaked their scores are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

from millrace_proto.sampling import Sampling

Kinds = Callable[[int], list[Sampling]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A batch by name; `kinds` returns the parameters of a number of rows."""

    name: str
    kinds: Kinds
    is_flat: bool = False
    """Whether the scores are flat, so that thousands of tokens are likely."""
    masked_share: float = 0.0
    """Share of the rows with a grammar's mask."""


EVERYTHING = Sampling(
    do_sample=True,
    temperature=0.8,
    top_k=50,
    top_p=0.95,
    typical_p=0.95,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    presence_penalty=0.1,
)
CHAT = Sampling(do_sample=True, temperature=0.7, top_p=0.9)


def same(kind: Sampling) -> Kinds:
    """The same parameters for all rows, with different seeds."""
    return lambda count: [replace(kind, seed=seed) for seed in range(count)]


def mixed(count: int) -> list[Sampling]:
    """Different parameters in every row, with every combination of processors."""
    switches = list(product((False, True), repeat=5))
    kinds = []
    for i in range(count):
        by_rank, by_mass, typical, penalised, sampled = switches[i * 11 % len(switches)]
        part = i / count
        kinds.append(
            Sampling(
                do_sample=sampled,
                seed=i,
                temperature=0.5 + part if sampled else 1.0,
                top_k=10 + i if by_rank and sampled else 0,
                top_p=0.8 + 0.19 * part if by_mass and sampled else 1.0,
                typical_p=0.9 + 0.09 * part if typical and sampled else 1.0,
                repetition_penalty=1.05 + 0.3 * part if penalised else 1.0,
                frequency_penalty=0.5 * part if penalised and by_rank else 0.0,
                presence_penalty=0.5 * part if penalised and by_mass else 0.0,
            )
        )
    return kinds


def mixed_with_all(count: int) -> list[Sampling]:
    """The same, and every fourth with min-p, every eighth with 300 biases, every sixteenth watermarked."""
    bias = tuple((7 * i, math.sin(i)) for i in range(300))
    return [
        replace(
            kind,
            min_p=0.02 if kind.do_sample and i % 4 == 1 else 0.0,
            bias=bias if i % 8 == 2 else (),
            watermark=i % 16 == 3,
        )
        for i, kind in enumerate(mixed(count))
    ]


CASES = (
    Case(name="greedy", kinds=same(Sampling())),
    Case(name="temperature and top-p (chat)", kinds=same(CHAT)),
    Case(name="temperature alone", kinds=same(replace(CHAT, top_p=1.0))),
    Case(name="top-k 50", kinds=same(replace(CHAT, top_p=1.0, top_k=50))),
    Case(name="everything, one set for all", kinds=same(EVERYTHING)),
    Case(name="everything mixed, as many sets as rows", kinds=mixed),
    Case(
        name="the same with min-p, biases, watermarks, a quarter with grammars",
        kinds=mixed_with_all,
        masked_share=0.25,
    ),
    Case(name="chat, flat scores", kinds=same(CHAT), is_flat=True),
    Case(name="mixed, flat scores", kinds=mixed, is_flat=True),
)
