"""The load, the shards and the tables of `python -m bench.scale`; the routers run by hand."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from bench.scale import simulate
from bench.scale.cache_index import CacheIndex
from bench.scale.compare import Point, fleet, plot, table
from bench.scale.fleet_metrics import FLEET_FIGURES, FleetMetrics
from bench.scale.kv_follower import Follower, block_names
from bench.scale.load import prompt_ids, shifted, shortened
from bench.scale.simulated_replica import Routing
from bench.scale.timed_shards import TimedShard
from bench.scale.traces import TraceWorkload
from bench.scale.validate import Compared, errors, parse_arguments, text

from millrace.simulate.simulated_request import Arrival
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


def test_a_table_has_a_row_and_a_plot_a_mark_for_each_point() -> None:
    points = [
        Point(routing, count, FleetMetrics(replicas=count, finished=count))
        for count in (4, 16)
        for routing in ("round-robin", "kv")
    ]
    assert len(table(points).splitlines()) == 2 + 4
    assert plot(points, "x").count("<circle") == 6 * 4


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
