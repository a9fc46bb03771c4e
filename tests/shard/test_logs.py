"""Log lines, as the launcher and people read them."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Iterator
from datetime import datetime

import pytest

from millrace_shard.logs import configure


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """The process's logging is left as pytest set it up."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    # A capture that another test left on would make this one void.
    logging.captureWarnings(capture=False)
    yield
    logging.captureWarnings(capture=False)
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(*, json_output: bool, level: str = "info") -> list[str]:
    file = io.StringIO()
    configure(level, json_output=json_output, file=file)
    logger = logging.getLogger("millrace_shard.demo")
    logger.debug("hidden")
    logger.info("weights loaded in %.1f s", 3.14)
    logger.warning("two\nlines")
    try:
        raise ValueError("boom")
    except ValueError:
        logger.exception("step %d failed", 4)
    logging.getLogger("transformers.x").info("noise")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("careful", UserWarning, stacklevel=1)
    return file.getvalue().splitlines()


def test_json_lines_have_the_shape_of_tgis() -> None:
    result = [json.loads(line) for line in lines(json_output=True)]
    assert [line["level"] for line in result] == ["INFO", "WARN", "ERROR", "WARN"]
    assert result[0]["fields"] == {"message": "weights loaded in 3.1 s"}
    assert result[0]["target"] == "millrace_shard.demo"
    assert datetime.fromisoformat(result[0]["timestamp"]).utcoffset() is not None
    assert result[1]["fields"]["message"] == "two\nlines"
    assert "ValueError: boom" in result[2]["fields"]["exception"]
    assert "careful" in result[3]["fields"]["message"]


def test_text_lines_are_for_people() -> None:
    result = lines(json_output=False)
    assert result[0].endswith("  INFO millrace_shard.demo: weights loaded in 3.1 s")
    assert any("ValueError: boom" in line for line in result)


def test_the_level_is_the_least_that_is_logged() -> None:
    assert "hidden" in json.loads(lines(json_output=True, level="debug")[0])["fields"]["message"]
    result = lines(json_output=True, level="error")
    assert [json.loads(line)["level"] for line in result] == ["ERROR"]
