"""Log lines: both formats, other libraries' lines, requests that were given up."""

from __future__ import annotations

import asyncio
import io
import logging

import orjson
import pytest
import structlog

from millrace_fakes_edge import logging_to, serving


def fields(output: io.BytesIO) -> list[dict[str, object]]:
    return [orjson.loads(line)["fields"] for line in output.getvalue().splitlines()]


def test_json_lines_have_the_shape_of_tgis() -> None:
    output = io.BytesIO()
    with logging_to(output):
        structlog.get_logger("millrace_router.batcher").warning("step %d", 7, took=0.5)
    line = orjson.loads(output.getvalue())
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "level": "WARN",
        "fields": {"message": "step 7", "took": 0.5},
        "target": "millrace_router.batcher",
    }


def test_text_lines_are_one_line_each() -> None:
    output = io.BytesIO()
    with logging_to(output, json_output=False):
        structlog.get_logger("millrace_router.x").info("Connected", url="http://a")
    line = output.getvalue().decode()
    assert line.endswith("Z  INFO millrace_router.x: Connected url=http://a\n")


@pytest.mark.parametrize("json_output", [True, False])
def test_failures_come_with_their_traceback(json_output: bool) -> None:
    output = io.BytesIO()
    with logging_to(output, json_output=json_output):
        try:
            raise ValueError("odd")
        except ValueError:
            structlog.get_logger("x").exception("failed")
    assert b"ValueError: odd" in output.getvalue()
    assert b"ERROR" in output.getvalue()


def test_other_libraries_are_relayed_and_narrowed() -> None:
    output = io.BytesIO()
    with logging_to(output):
        logging.getLogger("grpc").error("lost %s", "it")
        logging.getLogger("asyncio").debug("noise")
    line = orjson.loads(output.getvalue())
    assert (line["target"], line["fields"]["message"]) == ("grpc", "lost it")


def test_lesser_lines_are_left_out() -> None:
    output = io.BytesIO()
    with logging_to(output, level="warning"):
        structlog.get_logger("x").info("no")
        logging.getLogger("y").info("no")
    assert output.getvalue() == b""


async def test_a_request_that_was_given_up_has_its_line() -> None:
    output = io.BytesIO()
    with logging_to(output):
        async with serving(None) as edge:
            asked = {"inputs": "secret words"}
            task = asyncio.create_task(edge.post("/generate_stream", asked))
            await edge.batcher.arrived.wait()
            task.cancel()
            await edge.services.infer.permits.all_free()
    (line,) = [line for line in fields(output) if line["message"] == "request"]
    assert line["status"] == 499
    assert (line["prompt_tokens"], line["generated_tokens"]) == (2, 0)
    assert b"secret" not in output.getvalue()
