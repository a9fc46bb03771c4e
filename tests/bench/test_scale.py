"""The load, the shards and the tables of `python -m bench.scale`; the routers run by hand."""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from dataclasses import fields
from itertools import islice, pairwise
from pathlib import Path

import pytest
from bench.scale import simulate
from bench.scale.cache_index import CacheIndex, IndexedCache
from bench.scale.compare import fleet
from bench.scale.fast_engine import FastEngine
from bench.scale.fleet import CellsByPrefix, CellsInTurn, Division
from bench.scale.fleet_metrics import FLEET_FIGURES
from bench.scale.gateway import (
    Gateway,
    KvAware,
    LeastLoaded,
    PrefixHash,
    Ring,
    RoundRobin,
    Ticket,
    beginning,
)
from bench.scale.kv_follower import Follower, block_names
from bench.scale.load import prompt_ids, shifted, shortened
from bench.scale.simulated_replica import Routing
from bench.scale.timed_shards import TimedShard
from bench.scale.traces import TraceWorkload, copied, read_published
from bench.scale.validate import Compared, errors, parse_arguments, text
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.simulate.deployment import Deployment
from millrace.simulate.engine import Engine
from millrace.simulate.metrics import Distribution, SimulationMetrics
from millrace.simulate.simulated_request import Arrival
from millrace.simulate.trace import TraceError
from millrace_proto import generate_pb2 as pb
from millrace_router.kv_events.recorder import EventRecorder
from millrace_router.prediction.cost import CostModel
from millrace_router.prediction.step_load import StepLoad
from millrace_router.request.block_hashes import BlockHashes
from millrace_router.scheduler.block_manager import BlockManager

COSTS = {
    "step": 0.02,
    "decode_row": 0.001,
    "decode_context_token": 0.0,
    "prefill_step": 0.003,
    "prefill_token": 0.0012,
    "prefill_pair": 0.0,
}


@pytest.mark.parametrize(
    ("request_", "load"),
    [
        (pb.StepRequest(decode=pb.Decode(decode_slots=[0, 1, 5])), StepLoad(decodes=3)),
        (
            pb.StepRequest(
                prefill=pb.Prefill(chunk_slots=[2, 3], chunk_tokens=[7, 40], decode_slots=[1])
            ),
            StepLoad(prefill_tokens=47, num_chunks=2, decodes=1),
        ),
        (
            pb.StepRequest(prefill=pb.Prefill(chunk_slots=[2], chunk_tokens=[7])),
            StepLoad(prefill_tokens=7, num_chunks=1),
        ),
    ],
)
def test_a_timed_step_takes_what_the_cost_model_says(
    request_: pb.StepRequest, load: StepLoad
) -> None:
    shard = TimedShard(COSTS, vocab_size=500, num_blocks=10)
    expected = CostModel.fixed(COSTS).seconds(load)
    assert shard.seconds(request_) == pytest.approx(expected)


def test_costs_of_contexts_are_refused() -> None:
    with pytest.raises(ValueError, match="prefill_pair have to be 0"):
        TimedShard(COSTS | {"prefill_pair": 1e-9}, vocab_size=500, num_blocks=10)


def test_a_shorter_request_shares_as_many_parts() -> None:
    long = Arrival(1.0, 1030, 100, chain=(4, 5, 6), chain_tokens=512)
    short = shortened(long, 32)
    assert (short.prompt_tokens, short.output_tokens, short.max_new_tokens) == (33, 3, 3)
    assert (short.chain, short.chain_tokens) == ((4, 5, 6), 16)
    assert shortened(Arrival(0.0, 5, 5), 32).output_tokens == 1
    with pytest.raises(ValueError, match="cannot be 3 times shorter"):
        shortened(long, 3)


def test_prompts_have_equal_tokens_where_chains_are_equal() -> None:
    def ids(*chain: int, tokens: int) -> list[int]:
        return prompt_ids(Arrival(0.0, tokens, 1, chain=chain, chain_tokens=16), 0, 1000)

    one, other = ids(1, 2, 3, tokens=40), ids(1, 2, 4, tokens=48)
    assert (len(one), len(other)) == (40, 48)
    assert one[:32] == other[:32]
    assert one[32:] != other[32:40]
    alone = [prompt_ids(Arrival(0.0, 40, 1), number, 1000) for number in (0, 1, 0)]
    assert alone[0] == alone[2] != alone[1]


def test_other_runs_have_other_prompts_a_little_later() -> None:
    arrivals = [Arrival(at, 40, 1, chain=(1, 2, 3), chain_tokens=16) for at in (0.0, 0.05, 3.0)]
    assert shifted(arrivals, 0.1, 0) == arrivals
    for one in (shifted(arrivals, 0.1, seed) for seed in (1, 2)):
        times = [arrival.arrived_at for arrival in one]
        assert times == sorted(times)
        assert times[0] >= 0.0
        assert 3.0 < times[2] <= 3.1
    assert shifted(arrivals, 0.1, 1) != shifted(arrivals, 0.1, 2)
    assert prompt_ids(arrivals[0], 0, 1000, "a")[:16] != prompt_ids(arrivals[0], 0, 1000, "b")[:16]


def test_an_index_follows_the_events_of_real_caches() -> None:
    index, recorders, caches = CacheIndex(), [], []
    for _ in range(2):
        recorder = EventRecorder(4)
        recorders.append(recorder)
        caches.append(BlockManager(10, 4, recorder.new_cache()))
    followers = [Follower(index, replica, 4) for replica in range(2)]
    prompts = [list(range(13)), [*range(8), 99, 98, 97, 96]]

    def held(prompt: list[int]) -> list[int]:
        for follower, recorder in zip(followers, recorders, strict=True):
            _, events, _ = recorder.take() or [0, [], 0]
            assert isinstance(events, list)
            follower.apply(events)
        return index.num_held(block_names(prompt, 4), 2)

    assert held(prompts[0]) == [0, 0]
    for slot, (blocks, prompt) in enumerate(zip(caches, prompts, strict=True)):
        keys = BlockHashes(4, None, (), keeps_content=True).first(3, prompt, [])
        blocks.admit(slot, 12, keys=keys)
        blocks.grow(slot, 12)
        blocks.enter(slot, keys)
        blocks.release(slot)
    assert held(prompts[0]) == [3, 2]
    assert held(prompts[1]) == [2, 3]
    caches[0].admit(7, 36)
    caches[0].grow(7, 32)
    assert held(prompts[0]) == [1, 2]
    recorders[1].new_cache()
    assert held(prompts[1]) == [1, 0]


def test_errors_are_relative() -> None:
    real = {"hit_share": [0.2], "tokens_per_second": [100.0], "ttft_p50": [0.5], "ttft_p90": [1.0]}
    figures: dict[Routing, Compared] = {
        "prefix": {"measured": real, "simulated": real | {"ttft_p50": [0.6]}}
    }
    assert errors(figures) == pytest.approx([0.0, 0.0, 0.2, 0.0])
    several: dict[Routing, Compared] = {
        "kv": {"measured": real, "simulated": real | {"ttft_p50": [0.4, 0.5, 0.9]}}
    }
    assert errors(several) == pytest.approx([0.0, 0.0, 0.2, 0.0])
    assert "| 0.6 (0.4 to 0.9) | 1.20" in text(several)
    assert "| prefix  | TTFT p50, s | 0.5      | 0.6       | 1.20  |" in text(figures)
    assert parse_arguments(["--trace", "x.jsonl"]).replicas == 4


def options(**changes: object) -> argparse.Namespace:
    values = {
        "trace": Path("t.jsonl"),
        "replicas_per_copy": 4,
        "requests": 100,
        "speedup": 1.0,
        "sample": 250,
        "cell_size": 256,
        "gateways": 2,
        "balance_factor": 1.5,
        "cache": "0.32 M",
    }
    return argparse.Namespace(**(values | changes))


def test_more_replicas_have_more_copies_and_some_cells_of_them_are_simulated() -> None:
    small, large = (fleet(options(), "kv", count) for count in (16, 10_000))
    assert isinstance(small.workload, TraceWorkload)
    assert isinstance(large.workload, TraceWorkload)
    assert (small.workload.copies, small.sample, small.num_simulated_cells) == (4, 16, 1)
    assert (large.workload.copies, large.sample, large.num_simulated_cells) == (2500, 250, 1)
    assert large.gateways == 2
    assert large.workload.trace_requests == 100
    with pytest.raises(ValueError, match="no whole number of copies"):
        fleet(options(), "kv", 10)


def test_a_fleet_has_the_flags_of_one_server_beside_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cost = tmp_path / "cost.json"
    cost.write_text(json.dumps(COSTS), encoding="utf-8")
    flags = ["--cost", str(cost), "--num-blocks", "101", "--block-size", "16"]
    flags += ["--max-total-tokens", "900", "--rate", "9", "--requests", "30", "--processes", "1"]
    flags += ["--replicas", "4", "--cell-size", "2", "--fail", "1:1:1"]
    assert simulate.main([*flags, "--routing", "prefix", "kv"]) == 0
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert "4 replicas, prefix" in header
    assert "4 replicas, kv" in header
    assert len(rows) == len(FLEET_FIGURES)
    assert simulate.main([*flags, "--fail", "1:5:1"]) == 1
    assert simulate.main([*flags, "--colour", "red"]) == 1


TRACE = [
    Arrival(0.0, 600, 1, chain=(0, 1), chain_tokens=512),
    Arrival(3.0, 700, 2, group="a", prefix_tokens=5),
    Arrival(3.0, 1500, 3, chain=(0, 2, 3), chain_tokens=512),
    Arrival(6.0, 40, 4),
]
SPAN = 7.5


def test_one_copy_is_the_trace() -> None:
    assert list(copied(iter(TRACE), 1)) == TRACE
    assert list(copied(iter([]), 3)) == []


def test_copies_come_in_order_within_the_time_of_the_trace() -> None:
    found = list(copied(iter(TRACE), 3))
    assert all(one.arrived_at <= other.arrived_at for one, other in pairwise(found))
    assert 0 <= found[0].arrived_at < found[-1].arrived_at < SPAN
    assert Counter(arrival.output_tokens for arrival in found) == dict.fromkeys((1, 2, 3, 4), 3)
    times = [arrival.arrived_at for arrival in found if arrival.output_tokens == 4]
    # Each copy begins in a third of its own.
    assert sorted((at - 6.0) % SPAN // (SPAN / 3) for at in times) == [0, 1, 2]


def test_requests_in_turn_go_to_every_replica_from_every_part_of_the_trace() -> None:
    times = (0.0, 1.13, 2.31, 3.47)
    trace = [Arrival(at, 9, number) for number, at in enumerate(times, 1)]
    found = list(copied(iter(trace), 100))
    for replica in range(8):
        lengths = [arrival.output_tokens for arrival in found[replica::8]]
        assert len(lengths) == 50
        assert set(lengths) == {1, 2, 3, 4}


def test_copies_share_with_themselves_what_the_trace_shares() -> None:
    found = list(copied(iter(TRACE), 3))
    firsts = Counter(arrival.chain[0] for arrival in found if arrival.chain)
    assert sorted(firsts.values()) == [2, 2, 2]
    others = [number for arrival in found for number in arrival.chain[1:]]
    assert len(set(others)) == len(others) == 9
    assert len({arrival.group for arrival in found if arrival.group}) == 3


def test_the_beginning_of_a_trace_has_the_span_of_its_requests(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    lines = "".join(f"{second},{second},3\n" for second in (1, 2, 3, 90))
    trace.write_text(f"arrived_at,prompt_tokens,output_tokens\n{lines}", encoding="utf-8")
    arrivals = list(TraceWorkload(trace=trace, trace_requests=3, copies=2).arrivals())
    assert Counter(arrival.prompt_tokens for arrival in arrivals) == {1: 2, 2: 2, 3: 2}
    # 3 requests in 3 s have a span of 4 s.
    assert all(0 <= arrival.arrived_at < 4 for arrival in arrivals)


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


MOONCAKE = (
    '{"timestamp": 1500, "input_length": 700, "output_length": 5, "hash_ids": [0, 7]}\n'
    '{"timestamp": 3000, "input_length": 1025, "output_length": 9, "hash_ids": [0, 8, 9]}\n'
)
QWEN = (
    '{"chat_id": 3, "parent_chat_id": -1, "timestamp": 1.25, "input_length": 33,'
    ' "output_length": 4, "type": "text", "turn": 1, "hash_ids": [4, 5, 6]}\n'
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 23:59:59.5000000,374,44\n"
    "2023-11-17 00:00:01.7500009,396,109\n"
)


def read(tmp_path: Path, name: str, text: str) -> list[Arrival]:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return list(read_published(path))


def test_mooncake_counts_milliseconds_and_parts_of_512_tokens(tmp_path: Path) -> None:
    assert read(tmp_path, "m.jsonl", MOONCAKE) == [
        Arrival(1.5, 700, 5, chain=(0, 7), chain_tokens=512),
        Arrival(3.0, 1025, 9, chain=(0, 8, 9), chain_tokens=512),
    ]


def test_qwen_counts_seconds_and_parts_of_16_tokens(tmp_path: Path) -> None:
    expected = [Arrival(1.25, 33, 4, chain=(4, 5, 6), chain_tokens=16)]
    assert read(tmp_path, "q.jsonl", QWEN) == expected


def test_azure_counts_from_its_first_request_over_midnight(tmp_path: Path) -> None:
    assert read(tmp_path, "a.csv", AZURE) == [Arrival(0.0, 374, 44), Arrival(2.25, 396, 109)]


@pytest.mark.parametrize(
    ("good", "line", "complaint"),
    [
        (
            MOONCAKE,
            '{"timestamp": 3001, "input_length": 5, "output_length": 5}',
            "hash_ids is miss",
        ),
        (
            MOONCAKE,
            '{"timestamp": 3001, "input_length": 513, "output_length": 5, "hash_ids": [1]}',
            "hash_ids has 1 numbers for 513 tokens, not one for each 512",
        ),
        (
            MOONCAKE,
            '{"timestamp": 3001, "input_length": 5, "output_length": 5, "hash_ids": ["x"]}',
            r"hash_ids is \['x'\], not a list of integers",
        ),
        (
            MOONCAKE,
            '{"timestamp": 2999, "input_length": 5, "output_length": 5, "hash_ids": [1]}',
            "arrives before",
        ),
        (
            MOONCAKE,
            '{"timestamp": 3001, "input_length": 5, "output_length": 0, "hash_ids": [1]}',
            "output_length is 0, not a number of tokens, 1 or more",
        ),
        (QWEN, '{"timestamp": 3, "input_length": 5, "output_length": 5, "hash_ids": [1]}', "chat_"),
        (MOONCAKE, QWEN.strip(), "unknown field 'chat_id'"),
        (AZURE, "yesterday,1,2", "TIMESTAMP is 'yesterday', not a date and a time"),
        (AZURE, "2023-11-17 00:00:02,1", "not as many fields"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, good: str, line: str, complaint: str) -> None:
    suffix = ".csv" if good is AZURE else ".jsonl"
    number = len(good.splitlines()) + 1
    with pytest.raises(TraceError, match=rf"t{suffix}:{number}: {complaint}"):
        read(tmp_path, f"t{suffix}", good + line + "\n")


def test_what_nobody_publishes_is_refused_with_line_and_field(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"b\.csv:2: unknown field 'Request tokens'"):
        read(tmp_path, "b.csv", "arrived_at,Request tokens\n1,2\n")


COST = {
    "step": 1.0,
    "decode_row": 0.07,
    "decode_context_token": 0.001,
    "prefill_step": 0.3,
    "prefill_token": 0.05,
    "prefill_pair": 0.0003,
}


@st.composite
def quiet_hours(draw: st.DrawFn) -> tuple[Deployment, list[Arrival]]:
    """Long answers, few at a time, and blocks that are enough or are not."""
    simulated = Deployment(
        cost_model=COST,
        block_size=4,
        num_blocks=draw(st.sampled_from([65, 80, 120, 1000])),
        max_total_tokens=256,
        max_input_tokens=32,
        max_batch_size=draw(st.sampled_from([2, 8])),
        max_batch_prefill_tokens=draw(st.sampled_from([32, 64])),
        fairness=draw(st.sampled_from(["none", "tenant"])),
        max_queue_wait=draw(st.sampled_from([None, None, 40.0])),
        steps_in_flight=draw(st.integers(1, 2)),
        late_planning=draw(st.sampled_from(["on", "off"])),
        step_ratios=tuple(draw(st.lists(st.floats(0.5, 2.0), max_size=5))),
        turn_seconds=draw(st.sampled_from([0.0, 0.01])),
    )
    now, arrivals = 0.0, []
    for _ in range(draw(st.integers(1, 25))):
        now += draw(st.sampled_from([0.0, math.sqrt(2), 30 * math.sqrt(3)]))
        group = draw(st.sampled_from(["", "", "a"]))
        arrivals.append(
            Arrival(
                now,
                prompt_tokens=draw(st.integers(1, 32)),
                output_tokens=draw(st.integers(1, 150)),
                max_new_tokens=draw(st.sampled_from([None, 100, 150])),
                group=group,
                prefix_tokens=draw(st.integers(0, 50)) if group else 0,
                tenant=draw(st.sampled_from(["one", "other"])),
                max_queue_seconds=draw(st.sampled_from([None, None, None, 20.0])),
            )
        )
    return simulated, arrivals


@settings(max_examples=150, deadline=None)
@given(quiet_hours())
def test_steps_taken_together_are_as_those_taken_one_by_one(
    given_load: tuple[Deployment, list[Arrival]],
) -> None:
    simulated, arrivals = given_load
    together, single = FastEngine(simulated), Engine(simulated)
    for arrival in arrivals:
        together.run_until(arrival.arrived_at)
        while single.next_event < arrival.arrived_at:
            single.step()
        assert (together.arrive(arrival) is None) == (single.arrive(arrival) is None)
        assert together.metrics.steps == single.metrics.steps
    together.run_until(math.inf)
    while single.next_event < math.inf:
        single.step()
    for item in fields(SimulationMetrics):
        one, other = getattr(together.metrics, item.name), getattr(single.metrics, item.name)
        if isinstance(one, Distribution):
            one, other = (one.count, one.mean), (other.count, other.mean)
        if item.name != "first_token_of":
            assert one == pytest.approx(other), item.name
    first, second = together._planner.blocks, single._planner.blocks
    assert first.cache is not None
    assert second.cache is not None
    assert first.num_free == second.num_free
    assert list(first.cache._idle) == list(second.cache._idle)


KEYS = [b"key %d" % number for number in range(4000)]


def firsts(num_members: int) -> list[int]:
    ring = Ring(num_members)
    return [next(ring.walk(key)) for key in KEYS]


def test_members_get_about_as_many_keys() -> None:
    counts = Counter(firsts(8))
    assert min(counts.values()) > 0.5 * len(KEYS) / 8
    assert max(counts.values()) < 1.6 * len(KEYS) / 8


def test_a_new_member_takes_keys_from_all_others_and_moves_no_other_key() -> None:
    before, after = firsts(8), firsts(9)
    moved = [b for b, a in zip(before, after, strict=True) if a != b]
    assert all(a == 8 for b, a in zip(before, after, strict=True) if a != b)
    assert 0.05 < len(moved) / len(KEYS) < 0.2
    assert set(moved) == set(range(8))


def test_a_walk_comes_to_every_member_once() -> None:
    assert sorted(Ring(30).walk(b"x")) == list(range(30))
    assert list(islice(Ring(5).walk(b"x"), 2)) == list(Ring(5).walk(b"x"))[:2]


def ticket(number: int = 0, *, group: str = "", tokens: int = 100) -> Ticket:
    return Ticket(Arrival(0.0, tokens, 10, group=group), number, 0.0)


def sent(gateway: Gateway, asked: Ticket) -> Ticket:
    asked.replica = gateway.choose(asked)
    gateway.sent(asked)
    return asked


def places(gateway: Gateway, count: int) -> list[int]:
    return [sent(gateway, ticket(number)).replica for number in range(count)]


def test_requests_go_round_past_those_that_are_down() -> None:
    gateway = RoundRobin(3, first=2)
    assert places(gateway, 4) == [2, 0, 1, 2]
    gateway.set_up(0, is_up=False)
    assert places(gateway, 3) == [1, 2, 1]
    gateway.set_up(0, is_up=True)
    assert places(gateway, 3) == [2, 0, 1]


def test_the_least_loaded_gets_the_next() -> None:
    gateway = LeastLoaded(3)
    one, two, three = (sent(gateway, ticket(number)) for number in range(3))
    assert [one.replica, two.replica, three.replica] == [0, 1, 2]
    gateway.left(two)
    assert sent(gateway, ticket()).replica == 1
    gateway.left(three)
    gateway.set_up(2, is_up=False)
    assert sent(gateway, ticket()).replica in (0, 1)


def test_a_beginning_stays_with_its_replica_until_the_bound() -> None:
    gateway = PrefixHash(4, ring=Ring(4), balance_factor=2.0)
    home = gateway.choose(ticket(group="a"))
    counts = Counter(sent(gateway, ticket(group="a")).replica for _ in range(8))
    # At most twice the mean: after n requests no more than ceil(2 * n / 4).
    assert counts[home] == 4
    assert set(counts) > {home}
    free = PrefixHash(4, ring=Ring(4), balance_factor=float("inf"))
    assert {sent(free, ticket(group="a")).replica for _ in range(8)} == {home}


def test_the_hash_takes_2048_tokens() -> None:
    def begins(*chain: int, tokens: int = 512) -> bytes:
        return beginning(Arrival(0.0, len(chain) * tokens, 1, chain=chain, chain_tokens=tokens), 0)

    assert begins(1, 2, 3, 4, 5) == begins(1, 2, 3, 4, 6)
    assert begins(1, 2, 3, 4, 5) != begins(1, 2, 3, 7, 5)
    assert begins(*range(128), 500, tokens=16) == begins(*range(128), 600, tokens=16)
    assert begins(0, 1) != begins(0, 2)
    short = [Arrival(0.0, 80, 1, chain=(1, 2, 3, 4, last), chain_tokens=16) for last in (5, 6)]
    assert beginning(short[0], 0, 64) == beginning(short[1], 0, 64)
    assert beginning(short[0], 0) != beginning(short[1], 0)
    assert begins(5) == begins(5)


def kv_aware(index: CacheIndex, keys: list[bytes]) -> KvAware:
    return KvAware(
        3, index=index, keys_of=lambda _: keys, block_size=16, balance_factor=float("inf")
    )


def test_a_request_goes_where_the_fewest_tokens_are_left_to_compute() -> None:
    index, keys = CacheIndex(), [b"a/0", b"a/1", b"a/2"]
    first, second = IndexedCache(index, 1), IndexedCache(index, 2)
    for place, key in enumerate(keys):
        first.enter(key, place)
        if place:
            second.enter(key, place)
    # The second replica lacks the beginning, so the rest is worth nothing.
    assert index.num_held(keys, 3) == [0, 3, 0]
    gateway = kv_aware(index, keys)
    one = sent(gateway, ticket(tokens=60))
    assert (one.replica, one.num_uncached) == (1, 12)
    two = sent(gateway, ticket(tokens=60))
    assert two.replica == 1
    # 36 tokens are pending there and 48 cached: 24 + 60 - 48 is still less than 60.
    gateway._pending[1] = 49
    assert sent(gateway, ticket(tokens=60)).replica != 1
    gateway.began(one)
    assert gateway._pending[1] == 49 - 12
    gateway.left(one)
    assert gateway._pending[1] == 49 - 12


def test_the_index_knows_what_is_evicted_and_what_is_lost() -> None:
    index, keys = CacheIndex(), [b"a/0", b"a/1"]
    cache = IndexedCache(index, 0)
    pins = [cache.enter(key, place) for place, key in enumerate(keys)]
    cache.unpin([pin for pin in pins if pin is not None])
    assert index.num_held(keys, 2) == [2, 0]
    cache.evict()
    assert index.num_held(keys, 2) == [1, 0]
    cache.lose_all()
    assert index.num_held(keys, 2) == [0, 0]
