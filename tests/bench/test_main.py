"""The command line, and what becomes of a peer that fails."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from bench.__main__ import parse_arguments
from bench.comparison.plan import Attempt, installed
from bench.peers.engines import OURS
from bench.peers.process import EngineError
from bench.profile import label, table
from bench.quick import (
    PASSED,
    SLOWER,
    TOLERANCE,
    UNKNOWN,
    Finding,
    read_floors,
    verdict,
    write_floors,
)
from bench.startup import MB, Start, Starts, kv_bytes, loading_seconds, peak_bytes, read_seconds

from millrace.load.apis import LLAMA, TGI, VLLM, BadStreamError, Dialect
from millrace.load.levels import closed


def test_levels_alone_mean_servers_alone() -> None:
    assert parse_arguments([]).only == ["offline", "served"]
    assert parse_arguments(["--levels", "c1:128+64"]).only == ["served"]
    both = ["--levels", "c1:128+64", "--only", "offline", "served"]
    assert parse_arguments(both).only == ["offline", "served"]


def test_ours_is_always_there_and_the_unknown_never() -> None:
    assert installed([OURS, "no-such-peer"]) == [OURS]


def test_a_peers_failure_is_a_note_and_ours_an_error() -> None:
    notes: list[str] = []
    with Attempt("vllm", notes) as attempt:
        raise EngineError("vllm ended with 1:\nTraceback\nNo memory")
    assert attempt.failed
    assert notes == ["vllm took no further part: vllm ended with 1: No memory"]
    with pytest.raises(EngineError), Attempt(OURS, notes):
        raise EngineError("gone")
    with pytest.raises(KeyError), Attempt("vllm", notes):
        raise KeyError("a defect of the benchmark")
    assert len(notes) == 1


LEVEL = closed(1, 4, 7)


@pytest.mark.parametrize("dialect", [TGI, VLLM, LLAMA])
def test_every_dialect_asks_for_the_length_and_no_early_end(dialect: Dialect) -> None:
    body = dialect.body("a prompt", LEVEL)
    flat = {**body, **body.get("parameters", {})}
    assert 7 in (flat.get("max_new_tokens"), flat.get("max_tokens"), flat.get("n_predict"))
    assert flat["ignore_eos"] is True
    assert "a prompt" in flat.values()


def test_tokens_of_an_event_are_counted_by_what_it_holds() -> None:
    vllm = {"choices": [{"token_ids": [5, 6], "text": "x", "finish_reason": "length"}]}
    assert VLLM.num_tokens(vllm, 0) == 2
    assert LLAMA.num_tokens({"tokens": [1]}, 3) == 1
    assert TGI.num_tokens({"index": 4}, 3) == 1
    VLLM.check_end(vllm, 2)
    LLAMA.check_end({"stop": True, "tokens_predicted": 4}, 4)


@pytest.mark.parametrize(
    ("dialect", "last"),
    [
        (VLLM, {}),
        (VLLM, {"choices": [{"token_ids": [5], "finish_reason": None}]}),
        (LLAMA, {"stop": False, "tokens": [1]}),
        (LLAMA, {"stop": True, "tokens_predicted": 3}),
        (TGI, {"index": 4}),
    ],
)
def test_a_stream_without_its_end_is_no_stream(dialect: Dialect, last: dict[str, object]) -> None:
    with pytest.raises(BadStreamError):
        dialect.check_end(last, 4)


@pytest.mark.parametrize(
    ("share", "is_clean", "recorded", "status"),
    [
        (0.50, True, 0.50, PASSED),
        (0.90, True, 0.50, PASSED),
        (0.50 * TOLERANCE, True, 0.50, PASSED),
        (0.50 * TOLERANCE - 0.01, True, 0.50, SLOWER),
        (0.50 * TOLERANCE - 0.01, False, 0.50, UNKNOWN),
        (0.50, False, 0.50, PASSED),
        (0.50, True, None, UNKNOWN),
    ],
)
def test_a_case_fails_only_below_its_recorded_floor(
    share: float, is_clean: bool, recorded: float | None, status: int
) -> None:
    assert Finding("x", share, is_clean, recorded).status == status


def test_one_slower_case_fails_the_whole() -> None:
    good, slow = Finding("a", 0.5, True, 0.5), Finding("b", 0.1, True, 0.5)
    unknown = Finding("c", 0.5, True, None)
    assert verdict([good, good]) == PASSED
    assert verdict([good, unknown]) == UNKNOWN
    assert verdict([unknown, slow, good]) == SLOWER
    assert "SLOWER" in slow.text


def test_floors_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "floors.json"
    assert read_floors(path) == {}
    write_floors(path, {"one stream": 0.71234, "first of 1024": 0.8})
    assert read_floors(path) == {"one stream": 0.712, "first of 1024": 0.8}


@pytest.mark.parametrize(
    ("name", "sizes", "shown"),
    [
        ("aten::mm", [[2, 3], [3, 4]], "aten::mm"),
        (
            "millrace::linear",
            [[32, 576], [], [1536, 576], [1, 2]],
            "millrace::linear 32x576, 1536x576",
        ),
        ("millrace::attend", [[], [7]], "millrace::attend"),
    ],
)
def test_our_operators_are_told_apart_by_their_matrices(
    name: str, sizes: list[list[int]], shown: str
) -> None:
    assert label(name, sizes) == shown


def test_the_rest_of_a_step_is_between_operators() -> None:
    lines = table({"a": 60.0, "b": 25.0}, 100.0).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    assert cells[0] == ["a", "60.0", "60.0 %"]
    assert cells[-1] == ["between operators (Python, numpy)", "15.0", "15.0 %"]


def test_the_loading_time_is_that_of_the_log() -> None:
    lines = [
        "Starting shard 0",
        "  INFO millrace_shard.commands.composition: weights loaded in 1.25 s, 7 MB",
        "",
    ]
    assert loading_seconds(lines) == 1.25
    with pytest.raises(ValueError, match="unpack"):
        loading_seconds(lines[:1])


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({"num_key_value_heads": 3, "head_dim": 64}, 2 * 2 * 30 * 3 * 64),
        ({"num_key_value_heads": 3}, 2 * 2 * 30 * 3 * 64),
        ({}, 2 * 2 * 30 * 9 * 64),
    ],
)
def test_keys_and_values_are_counted(tmp_path: Path, fields: dict[str, int], size: int) -> None:
    config = {"num_hidden_layers": 30, "num_attention_heads": 9, "hidden_size": 576, **fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert kv_bytes(tmp_path, tokens=7) == 7 * size


def test_a_process_has_had_something_resident() -> None:
    assert MB < peak_bytes(os.getpid()) < 1_000_000 * MB


def test_files_are_read_by_a_fresh_process(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(1000))
    assert read_seconds([tmp_path / "a"]) > 0


def test_the_rest_is_what_weights_and_keys_do_not_take() -> None:
    start = Start(
        ready_seconds=4.0,
        load_seconds=2.0,
        read_seconds=1.5,
        shard_bytes=1000 * MB,
        router_bytes=100 * MB,
        other_cores=0.0,
    )
    row = Starts(model="a", weights_bytes=300 * MB, kv_bytes=90 * MB, starts=[start]).row
    assert row == ("a", "4.00", "2.00", "1.50", "0.75", "1000", "300", "90", "610", "100")
