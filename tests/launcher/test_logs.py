"""Children's lines keep their level, time and fields; the banner and the progress bar."""

from __future__ import annotations

import ast
import io
import json
import logging
import math
import re
import select
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import pytest

from millrace_launcher import logs
from millrace_launcher.banner import closing_banner, url
from millrace_launcher.config import LauncherConfig
from millrace_launcher.demo import demo_folder
from millrace_launcher.errors import ArgumentValidation
from millrace_launcher.logs import bar
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


def test_stderr_is_for_those_who_debug() -> None:
    stream = io.StringIO()
    logs.setup(LauncherConfig(log_level="debug"), stream)
    logs.relay("careful", source="shard-0", plain_level=logging.DEBUG)
    assert "DEBUG shard-0: careful" in stream.getvalue()


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
def test_words_for_log_levels_are_understood(
    word: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_any_record_is_relayed_as_one_line_of_valid_json() -> None:
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


NUM_LINES = 2000
"""More than a pipe holds."""
SECONDS = 60
"""Limit for a process that waits for its reader, which is a failure."""
NOISY = {
    "launcher": """
from millrace_launcher import logs
from millrace_launcher.config import LauncherConfig
logs.setup(LauncherConfig())
say = logs.log.info
""",
    "router": """
import structlog
from millrace_router.telemetry import logs
logs.configure("info", json_output=True)
say = structlog.get_logger("x").info
""",
    "shard": """
import logging
from millrace_shard import logs
logs.configure("info", json_output=True)
say = logging.getLogger("x").info
""",
}


@pytest.mark.parametrize("process", NOISY)
def test_no_process_waits_for_the_reader_of_its_log(process: str) -> None:
    program = (
        f"import sys\n{NOISY[process]}\nfor number in range({NUM_LINES}): say(f'line {{number}}')\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", f"{program}sys.stderr.write('done')"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as noisy:
        assert noisy.stdout is not None
        assert noisy.stderr is not None
        if not select.select([noisy.stderr], [], [], SECONDS)[0]:
            noisy.kill()
        assert noisy.stderr.read(4) == "done"
        lines = noisy.stdout.read().splitlines()
    assert [f"line {number}" in line for number, line in enumerate(lines)] == [True] * NUM_LINES


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def progress(fraction: float, message: str = "downloaded") -> str:
    return json.dumps({"timestamp": "T", "fields": {"message": message, "fraction": fraction}})


def shown(stream: io.StringIO, *lines: str, json_output: bool = False) -> str:
    logs.setup(LauncherConfig(json_output=json_output, log_colorize=False), stream)
    for line in lines:
        logs.relay(line, source="download")
    return stream.getvalue()


def on_screen(text: str) -> list[str]:
    """The lines of a terminal that understands the start of a line and the clearing of it."""
    return [line.rpartition("\r\x1b[K")[2] for line in text.split("\n")]


def test_a_terminal_has_one_bar_that_moves_and_then_goes() -> None:
    stream = Terminal()
    assert on_screen(shown(stream, progress(0.1))) == ["  [##..................]  10% downloaded"]
    logs.relay(progress(0.5), source="download")
    assert on_screen(stream.getvalue()) == ["  [##########..........]  50% downloaded"]
    logs.relay('{"timestamp": "T", "fields": {"message": "done"}}', source="download")
    assert on_screen(stream.getvalue()) == ["T  INFO download: done", ""]
    assert logs.has_bar()


def test_a_file_has_lines_and_json_keeps_the_fraction() -> None:
    assert shown(io.StringIO(), progress(0.1)) == "T  INFO download: downloaded\n"
    assert not logs.has_bar()
    line = json.loads(shown(Terminal(), progress(0.1), json_output=True))
    assert line["fields"] == {"message": "downloaded", "fraction": 0.1}
    assert not logs.has_bar()


def test_a_bar_holds_no_control_character_and_no_impossible_share() -> None:
    assert bar(2, "a\x1b[2J\r\n\u202eb") == f"  [{'#' * 20}] 100% a[2Jb"
    assert bar(-1, "") == bar(math.nan, "") == f"  [{'.' * 20}]   0% "


# Of the router's.
ROUTES = {
    "/",
    "/docs",
    "/generate",
    "/generate_stream",
    "/health",
    "/info",
    "/metrics",
    "/v1/models",
}


@pytest.mark.parametrize(
    ("hostname", "expected"),
    [
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("::1", "http://[::1]:80"),
        ("10.0.0.7", "http://10.0.0.7:80"),
    ],
)
def test_the_url_names_a_host_that_can_be_reached(hostname: str, expected: str) -> None:
    assert url(hostname, 80) == expected


@pytest.mark.parametrize("needs_key", [False, True])
def test_curl_and_python_parse(needs_key: bool) -> None:
    text = closing_banner("http://127.0.0.1:3917", model="a/b", needs_key=needs_key)
    lines = [line.strip() for line in text.splitlines()]
    words = shlex.split(next(line for line in lines if line.startswith("curl")))
    assert words[1] == "http://127.0.0.1:3917/generate"
    assert json.loads(words[words.index("-d") + 1])["parameters"] == {"max_new_tokens": 60}
    headers = [words[i + 1] for i, word in enumerate(words) if word == "-H"]
    assert headers[0] == "Content-Type: application/json"
    assert headers[1:] == (["Authorization: Bearer $API_KEY"] if needs_key else [])
    start = next(i for i, line in enumerate(lines) if line.startswith("from "))
    tree = ast.parse("\n".join(lines[start:]))
    assert len(tree.body) == 2
    for page in ("docs", "metrics"):
        assert f"http://127.0.0.1:3917/{page}" in text


def test_every_url_is_one_the_router_answers() -> None:
    text = closing_banner("http://127.0.0.1:3917", model="a/b", needs_key=False)
    paths = [urlsplit(found).path or "/" for found in re.findall(r"http://[^\s\",]+", text)]
    assert len(paths) >= 4
    assert set(paths) <= ROUTES


def test_installed_model_comes_before_the_checkouts(tmp_path: Path) -> None:
    package = tmp_path / "launcher" / "millrace_launcher"
    package.mkdir(parents=True)
    with pytest.raises(ArgumentValidation, match="give --model-id"):
        demo_folder(package)
    checkout = tmp_path / "demo" / "model"
    checkout.mkdir(parents=True)
    (checkout / "config.json").write_text("{}")
    assert demo_folder(package) == checkout
    (package / "demo_model").mkdir()
    (package / "demo_model" / "config.json").write_text("{}")
    assert demo_folder(package) == package / "demo_model"
