from __future__ import annotations

from pathlib import Path

import pytest

from millrace.simulate.simulated_request import Arrival
from millrace.simulate.trace import TraceError, read_trace


def written(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_csv_and_json_lines_say_the_same(tmp_path: Path) -> None:
    csv = written(
        tmp_path,
        "a.csv",
        "arrived_at,prompt_tokens,output_tokens,max_new_tokens,group,prefix_tokens,priority,tenant,"
        "max_queue_seconds\n"
        "0.5,10,20,,,,,,\n"
        "1,30,40,50,chat,25,-3,acme,2.5\n",
    )
    lines = written(
        tmp_path,
        "a.jsonl",
        '{"arrived_at": 0.5, "prompt_tokens": 10, "output_tokens": 20, "group": null}\n'
        "\n"
        '{"arrived_at": 1, "prompt_tokens": 30, "output_tokens": 40, "max_new_tokens": 50,'
        ' "group": "chat", "prefix_tokens": 25, "priority": -3, "tenant": "acme",'
        ' "max_queue_seconds": 2.5}\n',
    )
    expected = [Arrival(0.5, 10, 20), Arrival(1.0, 30, 40, 50, "chat", 25, -3, "acme", 2.5)]
    assert list(read_trace(csv)) == expected
    assert list(read_trace(lines)) == expected


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("1,2", "not as many fields"),
        ("1,2,3,4,5", "not as many fields"),
        ("x,2,3,", "arrived_at is 'x', not a number of seconds"),
        ("nan,2,3,", "arrived_at is 'nan'"),
        ("-1,2,3,", "arrived_at is '-1'"),
        ("1,0,3,", "prompt_tokens is '0', not a number of tokens, 1 or more"),
        ("1,2.5,3,", "prompt_tokens is '2.5'"),
        ("1,2,,", "output_tokens is missing"),
        ("0.2,2,3,", "arrives before the request above it"),
        ("1,2,3,4", "prefix_tokens without a group"),
    ],
)
def test_a_bad_line_of_csv_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    header = "arrived_at,prompt_tokens,output_tokens,prefix_tokens"
    path = written(tmp_path, "bad.csv", f"{header}\n0.5,2,3,\n{line}\n")
    with pytest.raises(TraceError, match=rf"bad\.csv:3: {complaint}"):
        list(read_trace(path))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "Expecting property name"),
        ("[1]", "not a JSON object"),
        ('{"arrived_at": 1, "prompt_tokens": 2}', "output_tokens is missing"),
        ('{"arrived_at": true, "prompt_tokens": 2, "output_tokens": 3}', "arrived_at is True"),
        ('{"arrived_at": 1, "prompt_tokens": 2.5, "output_tokens": 3}', "prompt_tokens is 2.5"),
        ('{"arrived_at": 1, "prompt_tokens": [2], "output_tokens": 3}', "prompt_tokens is "),
        (
            '{"arrived_at": 1, "prompt_tokens": 2, "output_tokens": 3, "priority": 11}',
            "priority is 11, not an integer from -10 to 10",
        ),
        (
            '{"arrived_at": 1, "prompt_tokens": 2, "output_tokens": 3, "outptu": 1}',
            "unknown field 'outptu'; there are arrived_at, prompt_tokens",
        ),
    ],
)
def test_a_bad_line_of_json_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    good = '{"arrived_at": 0, "prompt_tokens": 2, "output_tokens": 3}'
    path = written(tmp_path, "bad.jsonl", f"{good}\n{line}\n")
    with pytest.raises(TraceError, match=rf"bad\.jsonl:2: {complaint}"):
        list(read_trace(path))


def test_what_is_no_trace_at_all_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"a\.txt: a trace is a \.csv or a \.jsonl file"):
        list(read_trace(tmp_path / "a.txt"))
    with pytest.raises(TraceError, match="No such file"):
        list(read_trace(tmp_path / "none.csv"))
    (tmp_path / "latin.csv").write_bytes(b"\xff\xfe\n")
    with pytest.raises(TraceError, match=r"latin\.csv: "):
        list(read_trace(tmp_path / "latin.csv"))
