"""Which rows of a step go through which operations, as far as their parameters alone say."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millrace_shard.sampling_rows import Mask, is_greedy, is_narrow, is_penalised
from millrace_shard.step import Ints


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
    by_rank: Ints
    """Drawn from few tokens, as a rule: by top-k."""
    by_mass: Ints
    """The same, by a threshold on the scores."""

    @classmethod
    def of(cls, p: NDArray[np.void], *, most_narrow: int) -> RowGroups:
        """`p` [R] of PARAMETERS; rows of a top-k of less than `most_narrow` are drawn from few tokens."""
        greedy, narrow = is_greedy(p), is_narrow(p, most_narrow)
        return cls(
            watermarked=np.flatnonzero(p["watermark"]),
            penalised=np.flatnonzero(is_penalised(p)),
            biased=np.flatnonzero(p["is_biased"]),
            has_minimum=bool((p["min_new_tokens"] > 0).any()),
            is_greedy=greedy,
            all_greedy=bool(greedy.all()),
            by_rank=np.flatnonzero(narrow & (p["top_k"] > 0)),
            by_mass=np.flatnonzero(narrow & (p["top_k"] == 0)),
        )
