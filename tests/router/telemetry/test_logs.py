"""Log lines: both formats, other libraries' lines, requests that were given up."""

from __future__ import annotations

import asyncio
import io
import logging

import orjson
import pytest
import structlog

from millrace_testing.router.edge import logging_to, serving


def fields(output: io.BytesIO) -> list[dict[str, object]]:
    return [orjson.loads(line)["fields"] for line in output.getvalue().splitlines()]


def test_json_lines_have_the_shape_of_tgis() -> None:
    output = io.BytesIO()
    with logging_to(output):
        structlog.get_logger("millrace_router.engine.batcher").warning("step %d", 7, took=0.5)
    line = orjson.loads(output.getvalue())
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "level": "WARN",
        "fields": {"message": "step 7", "took": 0.5},
        "target": "millrace_router.engine.batcher",
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


@pytest.mark.parametrize("json_output", [True, False])
async def test_malformed_requests_are_not_quoted(json_output: bool) -> None:
    output = io.BytesIO()
    with logging_to(output, json_output=json_output):
        async with serving() as edge:
            host, port = edge.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /health HTTP/1.1\r\nauthorization: hush\r\nb\x00d secret\r\n\r\n")
            assert b"400" in await reader.readline()
            writer.close()
    assert b"an HTTP connection failed" in output.getvalue()
    assert b"BadHttpMessage" in output.getvalue() or b"InvalidHeader" in output.getvalue()
    assert b"ERROR" not in output.getvalue(), "it is the client's mistake"
    for quoted in (b"hush", b"secret", b"Traceback", b"127.0.0.1"):
        assert quoted not in output.getvalue()


@pytest.mark.parametrize("json_output", [True, False])
def test_tracebacks_do_not_show_variables(json_output: bool) -> None:
    output = io.BytesIO()

    def fail(prompt: str) -> None:
        assert prompt
        raise ValueError("odd")

    with logging_to(output, json_output=json_output):
        try:
            fail("sec" + "ret")
        except ValueError:
            structlog.get_logger("x").exception("failed")
    assert b"in fail" in output.getvalue()
    assert b"secret" not in output.getvalue()


def test_line_breaks_in_values_start_no_line() -> None:
    output = io.BytesIO()
    forged = "x\n2026 INFO forged\r\x1b[2J\x85\u2028é"
    with logging_to(output, json_output=False):
        structlog.get_logger("a").info(forged, route=forged)
        try:
            raise ValueError(forged)
        except ValueError:
            structlog.get_logger("a").exception("failed")
    text = output.getvalue().decode()
    first, *rest = text.removesuffix("\n").split("\n")
    assert first.endswith(
        "a: x\\u000a2026 INFO forged\\u000d\\u001b[2J\\u0085\\u2028é"
        " route=x\\u000a2026 INFO forged\\u000d\\u001b[2J\\u0085\\u2028é"
    )
    assert not {"\r", "\x1b", "\x85", "\u2028"} & set(text)
    assert [line for line in rest if not line.startswith("  ")] == rest[:1]


async def test_paths_are_logged_as_they_came_and_cut() -> None:
    output = io.BytesIO()
    with logging_to(output):
        async with serving() as edge:
            await edge.client.get(edge.url + "/a%0Ab")
            await edge.client.get(edge.url + "/" + "%C3%A9" * 100)
    routes = [str(line["route"]) for line in fields(output) if line["message"] == "request"]
    assert routes == ["/a%0Ab", ("/" + "%C3%A9" * 100)[:200]]
