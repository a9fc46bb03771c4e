"""Finding the request that breaks steps, against a world that knows who does."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_router.suspects import Suspects


def positions(members: list[int]) -> dict[int, int]:
    return {member: 10 + member for member in members}


def search(members: list[int], poison: set[int]) -> tuple[list[int], int]:
    """Run until nobody is suspected: who was found guilty, after how many failures. A step names whoever may run."""
    suspects: Suspects[int] = Suspects()
    guilty: list[int] = []
    alive, num_failures = list(members), 0
    while True:
        running = [m for m in alive if not suspects or m in suspects.group]
        if poison.isdisjoint(running):
            if not suspects:
                return guilty, num_failures
            for member in running:
                suspects.computed(member, 10 + member)
            continue
        num_failures += 1
        found = suspects.failed(positions(running))
        if found is not None:
            assert running == [found], "found guilty in company"
            guilty.append(found)
            alive.remove(found)


@settings(deadline=None)
@given(st.integers(1, 300), st.data())
def test_the_guilty_one_is_found_within_the_bound_and_nobody_else(
    count: int, data: st.DataObject
) -> None:
    culprit = data.draw(st.integers(0, count - 1))
    guilty, num_failures = search(list(range(count)), {culprit})
    assert guilty == [culprit]
    assert num_failures <= 2 * math.log2(count) + 2


@settings(deadline=None)
@given(st.integers(2, 40), st.data())
def test_several_are_found_one_after_the_other(count: int, data: st.DataObject) -> None:
    poison = data.draw(st.sets(st.integers(0, count - 1), min_size=2, max_size=5))
    guilty, num_failures = search(list(range(count)), poison)
    assert set(guilty) == poison
    assert num_failures <= len(poison) * (2 * math.log2(count) + 2)


def test_a_failure_that_does_not_come_again_clears_everybody() -> None:
    suspects: Suspects[int] = Suspects()
    assert suspects.failed(positions([1, 2, 3])) is None
    assert suspects.group == {1, 2, 3}
    assert not suspects.computed(1, 10), "short of where it failed"
    assert 1 in suspects
    assert [suspects.computed(member, 10 + member) for member in (1, 2, 3)] == [False, False, True]
    assert not suspects


def test_one_alone_is_guilty_after_a_second_failure_only() -> None:
    suspects: Suspects[int] = Suspects()
    assert suspects.failed({7: 5}) is None
    assert suspects.failed({7: 5}) == 7
    assert not suspects


def test_one_whose_mates_are_cleared_already_is_tried_alone_before_it_is_guilty() -> None:
    suspects: Suspects[int] = Suspects()
    suspects.failed({1: 5, 2: 5})
    suspects.computed(1, 5)
    assert suspects.failed({1: 6, 2: 5}) is None
    assert suspects.group == {2}
    assert suspects.failed({2: 5}) == 2


def test_a_half_that_runs_well_gives_way_to_the_other_one() -> None:
    suspects: Suspects[int] = Suspects()
    suspects.failed(positions([1, 2, 3, 4]))
    suspects.failed(positions([1, 2, 3, 4]))
    assert suspects.group == {1, 2}
    assert not suspects.computed(1, 11)
    assert suspects.computed(2, 12), "others are to run now"
    assert suspects.group == {3}
    assert suspects.cleared(3), "its client has left"
    assert suspects.group == {4}
    assert suspects.failed({4: 14}) == 4


def test_a_failure_of_others_begins_a_new_search() -> None:
    suspects: Suspects[int] = Suspects()
    suspects.failed({1: 5})
    assert suspects.failed({8: 5, 9: 5}) is None
    assert suspects.group == {8, 9}
