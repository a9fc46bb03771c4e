"""The schedule of faults and the population of requests: all that a seed decides."""

from __future__ import annotations

from collections import Counter

import pytest
from bench.faults.adapters import CHANGING, SHELVED, STEADY
from bench.faults.chaos.__main__ import parse_arguments
from bench.faults.chaos.campaign import USUAL, Kind, campaign
from bench.faults.chaos.malformed import MALFORMED, OVERSIZED
from bench.faults.chaos.population import greedy_streams, mixed_streams, population
from bench.faults.chaos.scenes import SCENES


@pytest.mark.parametrize("num_faults", [1, 5, 14, 15, 100, 333])
def test_a_campaign_has_as_many_faults_as_asked_for(num_faults: int) -> None:
    assert len(campaign(1, num_faults=num_faults, num_ranks=1)) == num_faults


def test_every_kind_is_there_and_the_weights_hold() -> None:
    counts = Counter(fault.kind for fault in campaign(7, num_faults=1000, num_ranks=1))
    total = sum(kind.value.weight for kind in USUAL)
    assert set(counts) == set(USUAL) == set(Kind) - {Kind.POISON}
    for kind in USUAL:
        assert counts[kind] == pytest.approx(1000 * kind.value.weight / total, abs=2)


def test_the_seed_decides_everything() -> None:
    assert campaign(1, num_faults=50, num_ranks=2) == campaign(1, num_faults=50, num_ranks=2)
    assert campaign(1, num_faults=50, num_ranks=2) != campaign(2, num_faults=50, num_ranks=2)
    assert population(1, size=30) == population(1, size=30)
    assert population(1, size=30) != population(2, size=30)


def test_only_the_kinds_asked_for() -> None:
    found = campaign(1, num_faults=9, num_ranks=1, kinds=(Kind.KILL, Kind.BURST))
    assert {fault.kind for fault in found} == {Kind.KILL, Kind.BURST}


def test_faults_come_within_the_pace() -> None:
    delays = [f.delay for f in campaign(1, num_faults=50, num_ranks=1, longest_delay=5.0)]
    assert all(0.05 <= delay <= 5.0 for delay in delays)
    assert max(delays) > 2.0


@pytest.mark.parametrize("name", SCENES)
def test_every_scene_is_a_command_line_that_further_flags_change(name: str) -> None:
    options = parse_arguments([f"--scene={name}", "--faults=3", "--seed=5"])
    assert (options.scene, options.faults, options.seed) == (name, 3, 5)
    expected = SCENES[name].get("clients", 12)
    assert options.clients == expected
    assert options.adapters or not any(kind.value.needs_adapters for kind in options.kinds)


def test_adapters_need_the_demo_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--model=gemma3"])
    assert "--no-adapters" in capsys.readouterr().err
    assert parse_arguments(["--scene=kills", "--model=gemma3"]).model == "gemma3"


def test_each_rank_is_hit_alone_and_all_of_them_together() -> None:
    hit = {fault.ranks for fault in campaign(1, num_faults=100, num_ranks=3)}
    assert hit == {(0,), (1,), (2,), (0, 1, 2)}


def test_the_population_is_mixed() -> None:
    requests = population(5, size=180)
    assert len({request.name for request in requests}) == 180
    assert {(request.path, request.streams) for request in requests} == {
        ("/generate_stream", True),
        ("/generate", False),
        ("/", True),
        ("/", False),
        ("/v1/chat/completions", True),
        ("/v1/chat/completions", False),
        ("/v1/completions", True),
        ("/v1/completions", False),
    }
    native = [request.body["parameters"] for request in requests if not request.is_openai]
    for key in ("seed", "stop", "top_n_tokens", "repetition_penalty", "decoder_input_details"):
        having = sum(key in parameters for parameters in native)
        assert 0 < having < len(native), key


def test_half_of_the_population_has_adapters() -> None:
    adapters = (*STEADY, SHELVED, *CHANGING)
    requests = population(5, size=500, adapters=adapters)
    named = Counter(request.adapter for request in requests if request.adapter)
    assert set(named) == set(adapters)
    assert 200 < named.total() < 300
    for request in requests:
        if request.is_openai:
            assert request.body["model"] == (request.adapter or "tgi")
            fields = request.body
        else:
            fields = request.body["parameters"]
            assert fields.get("adapter_id", "") == request.adapter
        assert ("adapter_source" in fields) == (request.adapter == SHELVED)
    natives = [request.body["parameters"] for request in requests if not request.is_openai]
    assert 0 < sum("merged_adapters" in parameters for parameters in natives) < 50


def test_whatever_samples_has_a_seed() -> None:
    for request in population(5, size=500):
        body = request.body
        if request.is_openai:
            assert body["temperature"] == 0 or "seed" in body
        else:
            parameters = body["parameters"]
            assert "temperature" not in parameters or "seed" in parameters
            assert "top_k" not in parameters or "seed" in parameters


def test_streams_of_a_scene_have_distinct_names_and_half_of_the_longest_answer() -> None:
    requests = mixed_streams(50, longest=200)
    assert len({request.name for request in requests}) == 50
    lengths = [request.body["parameters"]["max_new_tokens"] for request in requests]
    assert 100 <= min(lengths) <= max(lengths) <= 200
    assert all(request.streams for request in requests)


def test_long_streams_are_as_long_as_asked_for() -> None:
    for request in greedy_streams(1, count=3, new_tokens=77):
        assert request.streams
        assert request.body["parameters"]["max_new_tokens"] == 77
        assert request.body["parameters"]["ignore_eos"]


def test_bad_requests_expect_errors() -> None:
    for bad in (*MALFORMED, *OVERSIZED):
        assert bad.paths
        assert all(400 <= status < 500 for status in bad.statuses), bad.name
