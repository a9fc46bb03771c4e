"""The log of the shard on standard output: JSON in TGI's format for the launcher, or text for people."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

from millrace_proto.log_output import log_text

LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
WORDS = {"WARNING": "WARN", "CRITICAL": "ERROR"}
NOISY_LIBRARIES = (
    *("transformers", "torch", "huggingface_hub", "asyncio", "filelock"),
    # The HTTP clients of the hub's client, by its version.
    *("httpx", "httpx2", "httpcore", "httpcore2", "urllib3"),
)

logger = logging.getLogger(__name__)


def configure(level: str, *, json_output: bool, file: TextIO | None = None) -> None:
    """Log records of `level` and above, and warnings of libraries, to `file` or standard output."""
    threshold = LEVELS[level]
    handler = logging.StreamHandler(log_text(sys.stdout if file is None else file, _report_dropped))
    handler.setFormatter(JsonFormatter() if json_output else TextFormatter())
    logging.basicConfig(handlers=[handler], level=threshold, force=True)
    logging.captureWarnings(capture=True)
    for name in NOISY_LIBRARIES:
        logging.getLogger(name).setLevel(max(threshold, logging.WARNING))


def _report_dropped(count: int) -> None:
    logger.warning("%d lines of the log were dropped, because nothing read them", count)


class JsonFormatter(logging.Formatter):
    """Formats a record as `{"timestamp", "level", "fields": {"message", …}, "target"}` in one line.

    An attribute `fields` of the record adds fields.
    """

    def format(self, record: logging.LogRecord) -> str:
        fields = {**getattr(record, "fields", {}), "message": record.getMessage()}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(
            {
                "timestamp": _timestamp(record),
                "level": _level(record),
                "fields": fields,
                "target": record.name,
            }
        )


class TextFormatter(logging.Formatter):
    """Formats a record as time, level, module and message; a traceback follows on separate lines."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, more with a traceback."""
        line = f"{_timestamp(record)} {_level(record):>5} {record.name}: {record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _timestamp(record: logging.LogRecord) -> str:
    time = datetime.fromtimestamp(record.created, tz=UTC)
    return time.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _level(record: logging.LogRecord) -> str:
    return WORDS.get(record.levelname, record.levelname)
