"""Published traces are read by their own fields; the lines here are made up, in the forms of the publishers."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.scale.traces import read_published

from millrace.simulate.simulated_request import Arrival
from millrace.simulate.trace import TraceError

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
