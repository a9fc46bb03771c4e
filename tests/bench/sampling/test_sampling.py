"""The benchmark of the sampler: what its batches ask for, and that all of them run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench.sampling.__main__ import method, parse_arguments, table
from bench.sampling.cases import CASES, Kinds, mixed, mixed_with_all
from bench.sampling.worker import STEP, time_cases


@pytest.mark.parametrize("kinds", [mixed, mixed_with_all])
def test_mixed_batches_have_as_many_sets_of_parameters_as_rows(
    kinds: Kinds,
) -> None:
    found = kinds(128)
    sampled = {replace(kind, seed=0) for kind in found if kind.do_sample}
    assert len(sampled) == sum(kind.do_sample for kind in found) == 64
    for kind in found:
        assert kind.refusal() is None


def test_every_case_runs_and_is_timed() -> None:
    names = [case.name for case in CASES]
    found = time_cases(names, 8, 3000, 1)
    assert list(found) == names
    assert all(len(times) == 1 and times[0] > 0 for times in found.values())


def test_the_table_compares_and_tells_shares_only_where_both_are_known() -> None:
    ours = {"a": [1.0, 3.0, 2.0], "b": [6.0], STEP: [18.0]}
    assert table(ours, {"a": [8.0]}).splitlines() == [
        "| case | ms | range | before, ms | range | before / now | share of a 1B step |",
        "| --- | --: | --: | --: | --: | --: | --: |",
        "| a | 2.0 | 1.0 to 3.0 | 8.0 | 8.0 to 8.0 | 4.0 | 10 % |",
        "| b | 6.0 | 6.0 to 6.0 |  |  |  | 25 % |",
        "| step | 18.0 | 18.0 to 18.0 |  |  |  |  |",
    ]
    assert table({"a": [2.0]}, {}).splitlines()[2] == "| a | 2.0 | 2.0 to 2.0 |"


def test_the_method_says_when_others_used_the_machine() -> None:
    options = parse_arguments([])
    for was_quiet in (True, False):
        text = method(options, was_quiet=was_quiet)
        assert ("Other processes" in text) is not was_quiet
        assert "128 rows, vocabulary 128000, CPU time of one thread" in text
