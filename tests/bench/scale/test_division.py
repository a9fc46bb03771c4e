"""Which cell gets which request."""

from __future__ import annotations

from collections import Counter

from bench.scale.fleet import CellsByPrefix, CellsInTurn, Division
from bench.scale.gateway import Ring, beginning

from millrace.simulate.simulated_request import Arrival


def test_cells_differ_by_one_replica_at_most() -> None:
    division = Division(10_000, 256)
    assert (division.num_cells, {division.size(cell) for cell in range(40)}) == (40, {250})
    division = Division(11, 4)
    assert [division.size(cell) for cell in range(division.num_cells)] == [4, 4, 3]


def test_a_cell_gets_as_many_requests_as_it_has_replicas() -> None:
    cells = CellsInTurn(Division(11, 4))
    counts = Counter(cells.choose(number, Arrival(0.0, 1, 1)) for number in range(1100))
    assert counts == {0: 400, 1: 400, 2: 300}


def test_the_beginnings_of_a_cell_are_spread_over_its_replicas() -> None:
    division = Division(10_000, 64)
    cells = CellsByPrefix(division, balance_factor=float("inf"))
    arrivals = [Arrival(0.0, 1, 1, group=f"{number}") for number in range(40_000)]
    mine = [each for number, each in enumerate(arrivals) if cells.choose(number, each) == 0]
    assert len(mine) > 100
    replicas = Ring(division.size(0))
    homes = Counter(next(replicas.walk(beginning(each, 0))) for each in mine)
    # Independent of the cell, so that a replica has about a sixty-fourth of them.
    assert max(homes.values()) < 0.1 * len(mine)


def test_a_beginning_has_a_cell_until_that_has_too_much() -> None:
    cells = CellsByPrefix(Division(40, 10), balance_factor=1.25)
    spread = Counter(
        cells.choose(number, Arrival(0.1 * number, 1, 1, group=f"{number % 50}"))
        for number in range(5000)
    )
    assert max(spread.values()) < 1.3 * 1250
    one = [cells.choose(0, Arrival(1000.0 + number, 1, 1, group="x")) for number in range(100)]
    assert Counter(one).most_common()[0][1] < 0.4 * 100
    alone = [cells.choose(0, Arrival(5000.0 + 100 * n, 1, 1, group="x")) for n in range(5)]
    assert len(set(alone)) == 1
