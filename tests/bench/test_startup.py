"""`python -m bench.startup` reads a launcher's log, writes a checkpoint and summarizes several starts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from bench.startup import MB, Start, Starts, kv_bytes, loading_seconds, peak_bytes, read_seconds


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
