"""On a terminal a download is a bar that the next line replaces; elsewhere it is lines."""

from __future__ import annotations

import io
import json
import math

import pytest

from millrace_launcher import logs
from millrace_launcher.config import LauncherConfig
from millrace_launcher.logs import bar


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


def test_a_bar_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert len(on_screen(shown(Terminal(), progress(0.5, "x" * 100)))[0]) == 39
