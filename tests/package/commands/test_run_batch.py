"""A batch against a server whose every word is known."""

from __future__ import annotations

import asyncio
import codecs
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.package.programs import run, started

from millrace.batch import (
    BadLine,
    BatchRequest,
    Counts,
    Output,
    count_lines,
    parse,
    read_lines,
    run_batch,
)
from millrace.http.client import Client
from millrace_testing.router.sse import served_application


class Server:
    """Answers a chat with its last word; `fail` is refused, and `wait` answered when it may be."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.most_at_once = 0
        self.busy = 0
        self.waits = asyncio.Event()
        self.may_go_on = asyncio.Event()
        self._running = 0

    def application(self) -> web.Application:
        application = web.Application()
        application.router.add_post("/v1/chat/completions", self._chat)
        return application

    async def _chat(self, request: web.Request) -> web.Response:
        text = (await request.json())["messages"][-1]["content"]
        if self.busy:
            self.busy -= 1
            return web.json_response({"error": {"message": "busy"}}, status=429)
        self.asked.append(text)
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        if text == "wait":
            self.waits.set()
            await self.may_go_on.wait()
        await asyncio.sleep(0)
        self._running -= 1
        if text == "nest":
            return web.json_response({"choices": nested(400)})
        if text == "fail":
            return web.json_response({"error": {"message": "no"}}, status=400)
        return web.json_response({"choices": [{"message": {"content": f"re {text}"}}]})


def line(custom_id: str, text: str, **more: Any) -> str:
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    value = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(value | more)


def nested(depth: int) -> list[Any]:
    """Lists in lists; orjson reads 1 024 levels and writes 254."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def answers(path: Path) -> dict[str | None, Any]:
    found = [json.loads(text) for text in path.read_text().splitlines()]
    assert all(set(each) == {"id", "custom_id", "response", "error"} for each in found)
    by_id = {each["custom_id"]: each for each in found}
    assert len(by_id) == len(found)
    return by_id


async def test_every_line_gets_a_line(tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.write_text("\n".join([line("a", "one"), "", "{", line("b", "fail"), line("c", "two")]))
    server = Server()
    async with served_application(server.application()) as url:
        status, said, err = await run("run-batch", str(source), str(out), "--url", url)
    assert (status, said) == (1, "")
    assert err.startswith("2 answered, 2 failed, 0 answered before of 4 in")
    found = answers(out)
    response = found["a"]["response"]
    assert (response["status_code"], found["a"]["error"]) == (200, None)
    assert response["body"]["choices"][0]["message"]["content"] == "re one"
    assert found["b"]["response"]["status_code"] == 400
    assert found["b"]["response"]["body"] == {"error": {"message": "no"}}
    assert found[None]["response"] is None
    assert found[None]["error"]["message"].startswith("line 3: it is not JSON")


async def test_a_deeply_nested_body_costs_only_its_line(tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    deep = line("a", "x", body={"messages": nested(400)})
    source.write_text("\n".join([deep, line("b", "nest"), line("c", "two")]))
    server = Server()
    async with served_application(server.application()) as url:
        for expected in (1, 0):
            status, _, err = await run("run-batch", str(source), str(out), "--url", url)
            assert (status, "Traceback" in err) == (expected, False)
    assert server.asked == ["nest", "two"]
    assert answers(out)["a"]["error"]["code"] == "invalid_request"
    assert json.loads(answers(out)["b"]["response"]["body"]) == {"choices": nested(400)}


async def test_a_run_goes_on_where_one_was_killed(tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.write_text("\n".join([line("a", "one"), "bad", line("b", "wait"), line("c", "two")]))
    server = Server()
    async with served_application(server.application()) as url:
        words = ("run-batch", str(source), str(out), "--url", url, "--concurrency", "1")
        process = await started(*words)
        await server.waits.wait()
        process.send_signal(signal.SIGKILL)
        await process.communicate()
        with out.open("ab") as file:
            file.write(b'{"id":"batch_req_1","custom_id":"c","resp')
        server.may_go_on.set()
        server.asked.clear()
        status, _, err = await run(*words)
        assert server.asked == ["wait", "two"]
        assert (status, err[:46]) == (0, "2 answered, 0 failed, 2 answered before of 4 i")
        assert set(answers(out)) == {"a", "b", "c", None}
        status, _, err = await run(*words)
    assert (status, err[:46]) == (0, "0 answered, 0 failed, 4 answered before of 4 i")
    assert server.asked == ["wait", "two"]


async def test_concurrency_is_bounded_and_refused_requests_are_retried(tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.write_text("\n".join(line(str(number), f"t{number}") for number in range(40)))
    server, counts = Server(), Counts()
    server.busy = 3
    async with served_application(server.application()) as url, Client(url) as client:
        with Output(out) as output:
            await run_batch(client, source, output, counts, concurrency=4, pause_seconds=0.0)
    assert (counts.answered, counts.failed) == (40, 0)
    assert 1 < server.most_at_once <= 4
    assert sorted(server.asked) == sorted(f"t{number}" for number in range(40))


async def test_a_later_run_retries_requests_that_a_busy_server_refused(tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.write_text(line("a", "one"))
    server = Server()
    server.busy = 13
    async with served_application(server.application()) as url, Client(url) as client:
        for answered, failed in ((0, 1), (1, 0)):
            counts = Counts()
            with Output(out) as output:
                await run_batch(client, source, output, counts, concurrency=1, pause_seconds=0.0)
            assert (counts.answered, counts.failed) == (answered, failed)
    assert set(answers(out)) == {"a"}


@pytest.mark.parametrize("text", [line("a", "one"), line("a", "one") + "\n", "notes\n", "notes"])
async def test_a_file_of_something_else_is_not_changed(tmp_path: Path, text: str) -> None:
    source = tmp_path / "in"
    source.write_text(text)
    words = ("run-batch", str(source), str(source), "--url", "http://127.0.0.1:9")
    status, _, err = await run(*words)
    assert (status, source.read_text()) == (2, text)
    assert "no answer of a batch" in err


async def test_a_server_that_is_gone_ends_the_run(tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.write_text(line("a", "one"))
    words = ("run-batch", str(source), str(out), "--url", "http://127.0.0.1:9")
    status, _, err = await run(*words)
    assert status == 1
    assert err.splitlines()[-1] == (
        "error: no server at http://127.0.0.1:9: nothing listens there; `millrace serve` starts one"
    )
    assert out.read_text() == ""


async def test_a_batch_without_a_server_starts_none_by_itself(tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.write_text(line("a", "one"))
    status, _, err = await run("run-batch", str(source), str(out))
    assert status == 2
    assert err.startswith("error: no server: name a running one by --url")
    assert "--model millrace/demo" in err
    assert not out.exists()


async def test_a_wrong_command_line_exits_with_2(tmp_path: Path) -> None:
    words = ("run-batch", str(tmp_path / "none"), str(tmp_path / "out"))
    status, _, err = await run(*words, "--model", "millrace/demo")
    assert (status, err.splitlines()[0]) == (
        2,
        f"error: {tmp_path / 'none'}: No such file or directory",
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "must be an object"),
        ("{}", "custom_id"),
        (line("a", "x", method="GET"), "method"),
        (line("a", "x", url="/v1/other"), "url is none of"),
        (line("a", "x", body=[]), "body must be an object"),
        (line("a", "x", body={"stream": True}), "cannot stream"),
        (line("a", "x", body={"a": nested(400)}), "nested too deeply"),
    ],
)
def test_bad_lines_are_answered_with_the_reason(text: str, reason: str) -> None:
    found = parse(7, text.encode())
    assert isinstance(found, BadLine)
    assert reason in found.answer()["error"]["message"]
    assert found.answer()["error"]["line"] == 7


def test_a_valid_line_becomes_a_request() -> None:
    found = parse(1, line("a", "x").encode())
    assert isinstance(found, BatchRequest)
    assert (found.custom_id, found.url) == ("a", "/v1/chat/completions")


async def test_the_second_line_of_a_custom_id_is_bad(tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.write_text("\n".join([line("a", "one"), line("a", "two")]))
    server = Server()
    async with served_application(server.application()) as url:
        for expected in (1, 0):
            status, _, _ = await run("run-batch", str(source), str(out), "--url", url)
            assert status == expected
    assert server.asked == ["one"]
    assert len(out.read_text().splitlines()) == 2


async def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(codecs.BOM_UTF8 + f"{line('a', 'x')}\n{line('b', 'y')}\n".encode())
    assert [one.custom_id for one in read_lines(path)] == ["a", "b"]
    assert all(isinstance(one, BatchRequest) for one in read_lines(path))
    assert count_lines(path) == 2
