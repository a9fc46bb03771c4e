"""The rows of a step that are to be sampled, as the host knows them before the forward pass ends."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millrace_shard.arrays import Ints

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplingRows:
    """R rows. A sequence that may go on by several tokens has a row for each, at consecutive positions."""

    parameters: NDArray[np.void]
    """[R] of sequence.PARAMETERS."""
    positions: Ints
    """[R], index of the token to be sampled in its sequence: the number of tokens before it."""
    table_rows: Ints
    """[R], row of the history table, which is the sequence's slot."""

    def select(self, rows: Ints) -> SamplingRows:
        """Some of the rows."""
        return SamplingRows(
            parameters=self.parameters[rows],
            positions=self.positions[rows],
            table_rows=self.table_rows[rows],
        )


def is_greedy(p: NDArray[np.void]) -> Mask:
    """Whether the greatest score is the answer, and its log probability all that is asked for; `p` of PARAMETERS."""
    greedy: Mask = (
        ~p["do_sample"]
        & (p["temperature"] == 1)
        & (p["top_k"] == 0)
        & (p["top_p"] >= 1)
        & (p["typical_p"] >= 1)
        & (p["min_p"] == 0)
        & (p["top_n_tokens"] == 0)
    )
    return greedy


def is_narrow(p: NDArray[np.void], num_candidates: int) -> Mask:
    """Whether a row usually keeps few tokens, by a threshold on the scores or by a top-k below `num_candidates`."""
    narrow_by_top_k = (p["top_k"] > 0) & (p["top_k"] < num_candidates)
    narrow_by_probability = (p["top_k"] == 0) & (
        (p["top_p"] < 1) | ((p["min_p"] > 0) & (p["typical_p"] >= 1))
    )
    narrow: Mask = p["do_sample"] & (narrow_by_top_k | narrow_by_probability)
    return narrow


def is_penalised(p: NDArray[np.void]) -> Mask:
    """Whether a row's scores depend on the tokens before it by a penalty."""
    penalised: Mask = (p["repetition_penalty"] != 1) | is_counted(p)
    return penalised


def is_counted(p: NDArray[np.void]) -> Mask:
    """Whether it matters how often the tokens before it occur."""
    counted: Mask = (
        (p["frequency_penalty"] != 0)
        | (p["presence_penalty"] != 0)
        | (p["openai_frequency_penalty"] != 0)
    )
    return counted


def is_too_short(rows: SamplingRows) -> Mask:
    """Whether fewer tokens than `min_new_tokens` are generated yet."""
    p = rows.parameters
    short: Mask = rows.positions - p["num_prompt"] < p["min_new_tokens"]
    return short


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowGroups:
    """Places among R rows, ascending. The same for as long as the same rows run."""

    watermarked: Ints
    penalised: Ints
    biased: Ints
    has_minimum: bool
    """Whether any row is to have some number of tokens before it may end."""
    is_greedy: Mask
    """[R]."""
    all_greedy: bool
    narrow_by_top_k: Ints
    """Drawn from few tokens, as a rule: by top-k."""
    narrow_by_probability: Ints
    """The same, by a threshold on the scores."""

    @classmethod
    def of(cls, p: NDArray[np.void], *, num_candidates: int) -> RowGroups:
        """`p` [R] of PARAMETERS; rows of a top-k of less than `num_candidates` are drawn from few tokens."""
        greedy, narrow = is_greedy(p), is_narrow(p, num_candidates)
        return cls(
            watermarked=np.flatnonzero(p["watermark"]),
            penalised=np.flatnonzero(is_penalised(p)),
            biased=np.flatnonzero(p["is_biased"]),
            has_minimum=bool((p["min_new_tokens"] > 0).any()),
            is_greedy=greedy,
            all_greedy=bool(greedy.all()),
            narrow_by_top_k=np.flatnonzero(narrow & (p["top_k"] > 0)),
            narrow_by_probability=np.flatnonzero(narrow & (p["top_k"] == 0)),
        )
