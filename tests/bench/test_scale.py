"""The load, the shards and the tables of `python -m bench.scale`; the routers run by hand."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path

import pytest
from bench.scale import simulate
from bench.scale.cache_index import CacheIndex, IndexedCache
from bench.scale.fast_engine import FastEngine
from bench.scale.fleet_metrics import FLEET_FIGURES
from bench.scale.gateway import Gateway, KvAware, Ticket
from bench.scale.kv_follower import Follower, block_names
from bench.scale.load import prompt_ids
from bench.scale.traces import read_published
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.simulate.deployment import Deployment
from millrace.simulate.engine import Engine
from millrace.simulate.metrics import Distribution, SimulationMetrics
from millrace.simulate.simulated_request import Arrival
from millrace.simulate.trace import TraceError
from millrace_router.kv_events.recorder import EventRecorder
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


def test_prompts_have_equal_tokens_where_chains_are_equal() -> None:
    def ids(*chain: int, tokens: int) -> list[int]:
        return prompt_ids(Arrival(0.0, tokens, 1, chain=chain, chain_tokens=16), 0, 1000)

    one, other = ids(1, 2, 3, tokens=40), ids(1, 2, 4, tokens=48)
    assert (len(one), len(other)) == (40, 48)
    assert one[:32] == other[:32]
    assert one[32:] != other[32:40]
    alone = [prompt_ids(Arrival(0.0, 40, 1), number, 1000) for number in (0, 1, 0)]
    assert alone[0] == alone[2] != alone[1]


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


def test_a_fleet_accepts_its_own_flags_and_the_flags_of_one_server(
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
            '{"timestamp": 3001, "input_length": 513, "output_length": 5, "hash_ids": [1]}',
            "hash_ids has 1 numbers for 513 tokens, not one for each 512",
        ),
        (MOONCAKE, QWEN.strip(), "unknown field 'chat_id'"),
        (AZURE, "yesterday,1,2", "TIMESTAMP is 'yesterday', not a date and a time"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, good: str, line: str, complaint: str) -> None:
    suffix = ".csv" if good is AZURE else ".jsonl"
    number = len(good.splitlines()) + 1
    with pytest.raises(TraceError, match=rf"t{suffix}:{number}: {complaint}"):
        read(tmp_path, f"t{suffix}", good + line + "\n")


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


def ticket(number: int = 0, *, group: str = "", tokens: int = 100) -> Ticket:
    return Ticket(Arrival(0.0, tokens, 10, group=group), number, 0.0)


def sent(gateway: Gateway, asked: Ticket) -> Ticket:
    asked.replica = gateway.choose(asked)
    gateway.sent(asked)
    return asked


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
