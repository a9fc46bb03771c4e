"""The launcher's log with the lines of its children, as plain text or one JSON object a line."""

from __future__ import annotations

import json
import logging
import re
import shutil
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

from millrace_launcher.config import LauncherConfig
from millrace_launcher.errors import LaunchError
from millrace_proto.log_output import log_text

NUM_CELLS = 20
START_OF_LINE = "\r\x1b[K"
"""Moves the cursor to the start of its line, and clears the line."""


def bar(fraction: float, text: str) -> str:
    """A bar of `fraction`, 0 to 1, with its percentage and a text without control characters."""
    fraction = min(1.0, max(0.0, fraction))
    full = round(fraction * NUM_CELLS)
    shown = "".join(character for character in text if character.isprintable())
    return f"  [{'#' * full}{'.' * (NUM_CELLS - full)}] {fraction:4.0%} {shown}"


class BarHandler(logging.StreamHandler[TextIO]):
    """Writes records as lines, except those with the field `fraction`: each of them replaces the bar."""

    _has_bar = False

    def emit(self, record: logging.LogRecord) -> None:
        fraction = getattr(record, "fields", {}).get("fraction")
        if isinstance(fraction, int | float):
            # A line that wraps could not be cleared.
            width = shutil.get_terminal_size().columns - 1
            self.stream.write(START_OF_LINE + bar(fraction, record.getMessage())[:width])
            self.flush()
            self._has_bar = True
            return
        if self._has_bar:
            self.stream.write(START_OF_LINE)
            self._has_bar = False
        super().emit(record)


TRACE = 5
LEVELS: Mapping[str, int] = {
    "trace": TRACE,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "success": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.ERROR,
}
WORDS = {TRACE: "TRACE", logging.DEBUG: "DEBUG", logging.INFO: "INFO", logging.WARNING: "WARN"}
COLOURS = {"TRACE": "35", "DEBUG": "34", "INFO": "32", "WARN": "33", "ERROR": "31"}

# Control characters except the tab, line separators, direction marks, and halves of UTF-16 pairs.
UNSAFE = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

log = logging.getLogger("millrace_launcher")


def setup(config: LauncherConfig, stream: TextIO | None = None) -> None:
    """Write the log to `stream`, or to stdout, in the configured format; no reader can make the launcher wait."""
    stream = log_text(sys.stdout if stream is None else stream, _report_dropped)
    colour = config.log_colorize if config.log_colorize is not None else stream.isatty()
    draws_bars = stream.isatty() and not config.json_output
    handler = (BarHandler if draws_bars else logging.StreamHandler)(stream)
    handler.setFormatter(JsonFormatter() if config.json_output else PlainFormatter(colour=colour))
    log.handlers = [handler]
    log.propagate = False
    log.setLevel(LEVELS[config.log_level])


def tell_end(error: LaunchError, *, json_output: bool) -> None:
    """Say why the launch ends: a line on stderr, or in JSON logs a record with TGI's word for it."""
    if json_output:
        log.error("%s", error, extra={"fields": {"error": error.variant}})
    else:
        sys.stderr.write(f"Error: {_one_line(error)}\n")


def show(text: str) -> None:
    """Write `text` for people where the log goes, between its lines."""
    for handler in log.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.stream.write(text)
            handler.flush()


def _report_dropped(count: int) -> None:
    log.warning("%d lines of the log were dropped, because nothing read them", count)


def has_bar() -> bool:
    """Whether progress is drawn as a bar, so that it may be reported often."""
    return any(isinstance(handler, BarHandler) for handler in log.handlers)


def relay(line: str, *, source: str, plain_level: int = logging.INFO) -> None:
    """Log a child's line: a JSON object at its own level, any other line at `plain_level`."""
    record = _parse(line)
    if record is None:
        if line.strip():
            log.log(plain_level, "%s", line, extra={"target": source})
        return
    level = LEVELS.get(str(record.get("level", "info")).lower(), logging.INFO)
    fields = record["fields"]
    extra = {
        "target": record.get("target", source),
        "timestamp": record.get("timestamp"),
        "fields": fields,
    }
    log.log(level, "%s", fields.get("message", ""), extra=extra)


def error_message(line: str) -> str | None:
    """Return the message of a child's line that is a JSON object of the level error; None for any other line."""
    record = _parse(line)
    if record is None or LEVELS.get(str(record.get("level", "info")).lower()) != logging.ERROR:
        return None
    return str(record["fields"].get("message", ""))


class JsonFormatter(logging.Formatter):
    """`{"timestamp", "level", "fields": {"message", …}, "target"}`, as TGI's `--json-output`."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {**getattr(record, "fields", {}), "message": record.getMessage()}
        line = {
            "timestamp": _timestamp(record),
            "level": WORDS.get(record.levelno, "ERROR"),
            "fields": fields,
            "target": getattr(record, "target", record.name),
        }
        # Half of a UTF-16 pair is valid in JSON but not in UTF-8, so it stays escaped.
        return json.dumps(line, ensure_ascii=False).encode(errors="backslashreplace").decode()


class PlainFormatter(logging.Formatter):
    """`time LEVEL target: message key=value`, coloured on a terminal."""

    def __init__(self, *, colour: bool) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        word = WORDS.get(record.levelno, "ERROR")
        level = f"\x1b[{COLOURS[word]}m{word:>5}\x1b[0m" if self._colour else f"{word:>5}"
        fields = {k: v for k, v in getattr(record, "fields", {}).items() if k != "message"}
        fields.pop("fraction", None)
        traceback = fields.pop("exception", None)
        target, message = getattr(record, "target", None), record.getMessage()
        # Only the launcher's own messages may have several lines.
        text = _indented(message) if target is None else _one_line(message)
        tail = "".join(f" {_one_line(name)}={_one_line(value)}" for name, value in fields.items())
        if traceback is not None:
            tail += f"\n    {_indented(traceback)}"
        head = f"{_one_line(_timestamp(record))} {level} {_one_line(target or record.name)}"
        return f"{head}: {text}{tail}"


def _one_line(text: object) -> str:
    """Escape characters that move the cursor, end the line or change the direction of writing."""
    return UNSAFE.sub(lambda found: repr(found.group())[1:-1], str(text))


def _indented(text: object) -> str:
    """Indent further lines, so that none looks like the start of a record."""
    return "\n    ".join(map(_one_line, str(text).split("\n")))


def _parse(line: str) -> dict[str, Any] | None:
    """Parse a log object with fields; None for any other line."""
    if not line.startswith("{"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    if not isinstance(record.get("fields"), dict):
        if "message" not in record and "event" not in record:
            return None
        known = ("timestamp", "level", "target")
        fields = {name: value for name, value in record.items() if name not in known}
        if "message" not in fields:
            fields["message"] = fields.pop("event")
        record["fields"] = fields
    return record


def _timestamp(record: logging.LogRecord) -> str:
    """The child's own time for a relayed line."""
    given = getattr(record, "timestamp", None)
    if given:
        return str(given)
    moment = datetime.fromtimestamp(record.created, tz=UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
