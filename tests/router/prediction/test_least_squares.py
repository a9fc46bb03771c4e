"""Non-negative least squares against trying every set of unknowns that may be positive."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_router.prediction.least_squares import solve_nonnegative

NUMBERS = st.floats(-10, 10, allow_subnormal=False)


def cost(gram: np.ndarray, moment: np.ndarray, x: np.ndarray) -> float:
    return float(x @ gram @ x / 2 - moment @ x)


def best_of_all_sets(gram: np.ndarray, moment: np.ndarray) -> float:
    """The least cost: at the optimum, some set of unknowns solves its own equations and is not negative."""
    least, size = 0.0, len(moment)
    for count in range(1, size + 1):
        for chosen in map(list, combinations(range(size), count)):
            x = np.zeros(size)
            x[chosen] = np.linalg.solve(gram[np.ix_(chosen, chosen)], moment[chosen])
            if (x >= 0).all():
                least = min(least, cost(gram, moment, x))
    return least


@settings(deadline=None, max_examples=300)
@given(data=st.data(), size=st.integers(1, 6))
def test_no_set_of_positive_unknowns_does_better(data: st.DataObject, size: int) -> None:
    factor = np.array(data.draw(st.lists(NUMBERS, min_size=size * size, max_size=size * size)))
    factor = factor.reshape(size, size)
    gram = factor.T @ factor + 0.01 * np.eye(size)
    moment = np.array(data.draw(st.lists(NUMBERS, min_size=size, max_size=size)))
    x = np.array(solve_nonnegative(gram.tolist(), moment.tolist()))
    assert (x >= 0).all()
    least = best_of_all_sets(gram, moment)
    assert cost(gram, moment, x) <= least + 1e-6 * (1 + abs(least))


def test_without_bounds_in_the_way_it_is_the_plain_solution() -> None:
    assert solve_nonnegative([[2.0, 0.0], [0.0, 4.0]], [2.0, 2.0]) == [1.0, 0.5]


def test_where_everything_would_be_negative_all_is_zero() -> None:
    assert solve_nonnegative([[2.0, 0.0], [0.0, 4.0]], [-1.0, -1.0]) == [0.0, 0.0]
