"""Children's lines keep their level, time and fields; JSON stays JSON."""

from __future__ import annotations

import io
import json
import logging
from datetime import UTC, datetime
from typing import Literal

import pytest

from millrace_launcher import logs
from millrace_launcher.config import LauncherConfig
from millrace_router.telemetry import logs as router_logs
from millrace_shard import logs as shard_logs

Level = Literal["info", "debug", "error"]


def relayed(
    *lines: str, json_output: bool = False, level: Level = "info", colour: bool | None = None
) -> str:
    stream = io.StringIO()
    config = LauncherConfig(json_output=json_output, log_level=level, log_colorize=colour)
    logs.setup(config, stream)
    for line in lines:
        logs.relay(line, source="shard-0")
    return stream.getvalue()


LINE = json.dumps(
    {
        "timestamp": "T1",
        "level": "WARN",
        "fields": {"message": "hot", "rows": 3},
        "target": "engine",
    }
)


def test_times_have_one_form_in_all_processes() -> None:
    record = logging.makeLogRecord({"created": 1.0, "msg": "at a whole second"})
    moment = datetime.fromtimestamp(record.created, tz=UTC).strftime(router_logs.TIME_FORMAT)
    assert moment == "1970-01-01T00:00:01.000000Z"
    for formatter in (logs.JsonFormatter(), shard_logs.JsonFormatter()):
        assert json.loads(formatter.format(record))["timestamp"] == moment


def test_json_line_is_re_emitted_at_its_level() -> None:
    assert relayed(LINE) == "T1  WARN engine: hot rows=3\n"
    assert json.loads(relayed(LINE, json_output=True)) == json.loads(LINE)
    assert relayed(LINE, level="error") == ""


@pytest.mark.parametrize("line", ["plain words", "{not json", '["a list"]', '{"no": "message"}'])
def test_other_lines_are_shown_as_they_are(line: str) -> None:
    assert relayed(line).endswith(f"INFO shard-0: {line}\n")
    record = json.loads(relayed(line, json_output=True))
    assert record["fields"] == {"message": line}
    assert record["target"] == "shard-0"


def test_percent_signs_and_empty_lines() -> None:
    assert "100 %s done" in relayed("100 %s done")
    assert relayed("", "  ") == ""


def test_stderr_is_for_those_who_debug() -> None:
    stream = io.StringIO()
    logs.setup(LauncherConfig(log_level="debug"), stream)
    logs.relay("careful", source="shard-0", plain_level=logging.DEBUG)
    assert "DEBUG shard-0: careful" in stream.getvalue()


def test_colours_only_when_wanted() -> None:
    assert "\x1b" not in relayed(LINE)
    assert "\x1b[33m WARN\x1b[0m" in relayed(LINE, colour=True)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("WARN", "warning"),
        ("Debug", "debug"),
        ("error", "error"),
        ("text_generation=trace", "info"),
        ("", "info"),
    ],
)
def test_log_level_words(word: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOG_LEVEL", word)
    assert LauncherConfig().log_level == expected


HOSTILE = "a\x1b[2J\r\n2026-01-01T00:00:00Z ERROR forged: b\x9b\u2028\u202e\x00\ud83dé\tend"
SHOWN = r"a\x1b[2J\r\n2026-01-01T00:00:00Z ERROR forged: b\x9b\u2028\u202e\x00\ud83dé" "\tend"


def hostile_record() -> str:
    fields = {"message": HOSTILE, HOSTILE: 1, "prompt": HOSTILE}
    return json.dumps({"timestamp": HOSTILE, "level": "INFO", "fields": fields, "target": HOSTILE})


def test_relayed_lines_hold_no_control_character_and_forge_no_line() -> None:
    assert relayed(hostile_record()) == (
        f"{SHOWN}  INFO {SHOWN}: {SHOWN} {SHOWN}=1 prompt={SHOWN}\n"
    )
    assert relayed("plain \x1b[31m\x07").endswith(r"shard-0: plain \x1b[31m\x07" "\n")


def test_json_is_one_line_that_reads_back_whatever_it_holds() -> None:
    text = relayed(hostile_record(), json_output=True)
    text.encode()
    assert text.count("\n") == 1
    assert json.loads(text) == json.loads(hostile_record())


def test_further_lines_are_indented() -> None:
    line = json.dumps({"fields": {"message": "bad", "exception": "Traceback:\n  E\x1b\n2026 x"}})
    assert relayed(line).endswith("bad\n    Traceback:\n      E\\x1b\n    2026 x\n")
    stream = io.StringIO()
    logs.setup(LauncherConfig(), stream)
    logs.log.error("complete output:\n%s", "2026 forged\x1b")
    assert stream.getvalue().endswith("complete output:\n    2026 forged\\x1b\n")
