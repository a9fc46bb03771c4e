"""The router's log lines, as text or as JSON in TGI's shape, with the lines of other libraries."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import MutableMapping
from typing import Any, BinaryIO

import orjson
import structlog
from aiohttp.http_exceptions import HttpProcessingError
from structlog.typing import ExcInfo

from millrace_proto.log_output import LogOutput, log_output

LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
TIME_FORMAT = "%Y-%m-%dT%H:%M:%S.%fZ"
"""That of the launcher and the shards: UTC with microseconds, also where they are 0."""
LEVEL_WORDS = {"warning": "WARN", "critical": "ERROR", "exception": "ERROR"}
NOISY_LIBRARIES = ("asyncio", "aiohttp.access", "aiohttp.server")

CONTROL_CHARACTERS = {
    code: f"\\u{code:04x}" for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)
}
"""Escapes, so that logged text cannot start a line or move the cursor."""

EventDict = MutableMapping[str, Any]


log = structlog.get_logger(__name__)


def _report_dropped(count: int) -> None:
    log.warning("lines of the log were dropped, because nothing read them", count=count)


LineFile = BinaryIO | LogOutput


class LineLogger:
    """Writes finished lines to a binary file; remembers the module that logs."""

    def __init__(self, target: str, file: LineFile) -> None:
        self.target = target
        self._file = file

    def msg(self, line: bytes) -> None:
        """Write one line at once, so that lines of several processes do not mix."""
        self._file.write(line + b"\n")
        self._file.flush()

    debug = info = warning = error = critical = exception = msg


class RelayHandler(logging.Handler):
    """Logs the records of other libraries."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log the record under its own logger's name."""
        logger = structlog.get_logger(record.name)
        if record.name.partition(".")[0] == "aiohttp":
            # Its messages and errors quote what clients sent.
            kind = record.exc_info[0] if record.exc_info else None
            error = kind.__name__ if kind else None
            # A client that has gone, was cut off, or does not speak HTTP is not an error of the server.
            theirs = kind is not None and issubclass(kind, (ConnectionError, HttpProcessingError))
            level = logging.DEBUG if theirs else record.levelno
            logger.log(level, "an HTTP connection failed", error=error)
        else:
            logger.log(record.levelno, record.getMessage(), exc_info=record.exc_info)


def configure(level: str, *, json_output: bool, file: BinaryIO | None = None) -> None:
    """Set up logging for the process; lines go to standard output unless `file` is given."""
    threshold = LEVELS[level]
    output: LineFile = file or log_output(sys.stdout, _report_dropped) or sys.stdout.buffer
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.TimeStamper(fmt=TIME_FORMAT, utc=True),
            structlog.processors.add_log_level,
            structlog.processors.ExceptionRenderer(_format_exception),
            _add_target,
            _render_json if json_output else _render_text,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=lambda *names: LineLogger(names[0] if names else "millrace_router", output),
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    root.handlers = [RelayHandler()]
    root.setLevel(threshold)
    for name in NOISY_LIBRARIES:
        logging.getLogger(name).setLevel(max(threshold, logging.WARNING))


def _format_exception(exc_info: ExcInfo) -> str:
    """Render without local variables, which may hold prompts and keys."""
    return "".join(traceback.format_exception(*exc_info)).rstrip("\n")


def _add_target(logger: LineLogger, _: str, event: EventDict) -> EventDict:
    event["target"] = logger.target
    return event


def _render_json(_: LineLogger, __: str, event: EventDict) -> bytes:
    return json_line(event)


def json_line(event: EventDict) -> bytes:
    """Render one line without its end; removes keys of `event`."""
    level = event.pop("level")
    line = {
        "timestamp": event.pop("timestamp"),
        "level": LEVEL_WORDS.get(level, level.upper()),
        "fields": {"message": event.pop("event"), **event},
        "target": event.pop("target"),
    }
    line["fields"].pop("target", None)
    return orjson.dumps(line, default=str, option=orjson.OPT_NON_STR_KEYS)


def _render_text(_: LineLogger, __: str, event: EventDict) -> bytes:
    level = event.pop("level")
    head = f"{event.pop('timestamp')} {LEVEL_WORDS.get(level, level.upper()):>5}"
    target, message = event.pop("target"), event.pop("event")
    lines = str(event.pop("exception", "")).splitlines()
    fields = "".join(f" {key}={value}" for key, value in event.items())
    shown = [f"{head} {target}: {message}{fields}", *(f"  {line}" for line in lines)]
    escaped = (line.translate(CONTROL_CHARACTERS) for line in shown)
    return "\n".join(escaped).encode(errors="backslashreplace")
