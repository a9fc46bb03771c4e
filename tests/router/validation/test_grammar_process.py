"""Large grammars are read one at a time in a process of their own, and hold up nobody but each other."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from millrace_router.errors import Overloaded, ToolError, ValidationError
from millrace_router.request.grammar import GrammarType, JsonGrammar, LarkGrammar, RegexGrammar
from millrace_router.request.request import Grammar, GrammarKind
from millrace_router.tool_calls.tool import Tool, ToolChoice
from millrace_router.validation.grammar_admission import MAX_WAITING
from millrace_router.validation.grammar_process import GrammarProcess
from millrace_router.validation.grammar_reader import LARGE_BYTES, GrammarReader
from millrace_testing.router.edge import limits_with, serving
from millrace_testing.router.grammar_worker import NotingFormat, grammar_workers, refuse

PADDING = "x" * LARGE_BYTES
REQUIRED, AUTO = ToolChoice("required"), ToolChoice("auto")
SMALL = RegexGrammar(type="regex", value="a")


Workers = Callable[[], list[psutil.Process]]


@pytest.fixture
def workers() -> Iterator[Workers]:
    """Those that were started in the test; none is left when their owners are gone."""
    others = grammar_workers()

    def started() -> list[psutil.Process]:
        return [worker for worker in grammar_workers() if worker not in others]

    yield started
    gc.collect()
    assert started() == []


def schema(mark: str) -> GrammarType:
    """A large one."""
    return JsonGrammar(type="json", value={"const": mark + PADDING})


def tool(name: str, *, pad: str = PADDING) -> Tool:
    return Tool(name, pad, {"type": "object"}, strict=False)


async def stopped(worker: psutil.Process) -> None:
    async with asyncio.timeout(60):
        while worker.status() != psutil.STATUS_STOPPED:
            await asyncio.sleep(0)


async def test_only_what_is_large_is_read_elsewhere(tmp_path: Path, workers: Workers) -> None:
    reader, made, here = GrammarReader(), NotingFormat(tmp_path / "notes"), f"{os.getpid()}"
    small = await reader.of_chat(made, [tool("small", pad="")], REQUIRED, None)
    assert (small, workers()) == (Grammar(GrammarKind.LARK, here), [])
    assert await reader.of_chat(made, [tool("free")], AUTO, None) is None
    assert await reader.read(SMALL) == SMALL.resolved()
    assert workers() == []
    large = await reader.of_chat(made, [tool("large")], REQUIRED, None)
    (worker,) = workers()
    assert large == Grammar(GrammarKind.LARK, f"{worker.pid}")
    for grammar in (schema("a"), LarkGrammar(type="lark", value=PADDING + "a")):
        await reader.read(grammar)
    assert workers() == [worker]
    assert made.noted == ["small", "large"]


async def test_what_was_read_is_remembered(tmp_path: Path) -> None:
    reader, made = GrammarReader(), NotingFormat(tmp_path / "notes")
    for name in ("a", "a", "b", "a"):
        await reader.of_chat(made, [tool(name)], REQUIRED, None)
    assert made.noted == ["a", "b"]


async def test_what_nobody_waits_for_is_not_read(tmp_path: Path, workers: Workers) -> None:
    reader, made = GrammarReader(), NotingFormat(tmp_path / "notes")
    await reader.read(schema("a"))
    (worker,) = workers()
    reading = [
        asyncio.create_task(reader.of_chat(made, [tool(name)], REQUIRED, None))
        for name in ("stop", "a", "b")
    ]
    await stopped(worker)
    for task in reading[:2]:
        task.cancel()
    await asyncio.wait(reading[:2])
    worker.resume()
    assert await reading[2] == Grammar(GrammarKind.LARK, f"{worker.pid}")
    assert made.noted == ["stop", "b"]


async def test_only_so_many_wait(workers: Workers) -> None:
    reader = GrammarReader()
    await reader.read(schema("a"))
    (worker,) = workers()
    worker.suspend()
    reading = [asyncio.create_task(reader.read(schema(f"{i}"))) for i in range(MAX_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await reader.read(schema("b"))
    assert await reader.read(SMALL) == SMALL.resolved()
    worker.resume()
    assert len(await asyncio.gather(*reading)) == MAX_WAITING
    assert await reader.read(schema("b")) == schema("b").resolved()


async def test_a_process_that_dies_fails_one_request_and_another_takes_its_place(
    tmp_path: Path, workers: Workers
) -> None:
    reader, made = GrammarReader(), NotingFormat(tmp_path / "notes")
    await reader.read(schema("a"))
    (worker,) = workers()
    reading = asyncio.create_task(reader.of_chat(made, [tool("stop")], REQUIRED, None))
    await stopped(worker)
    worker.kill()
    with pytest.raises(Overloaded):
        await reading
    assert await reader.read(schema("b")) == schema("b").resolved()
    (worker,) = workers()
    worker.kill()
    await asyncio.to_thread(psutil.wait_procs, [worker])
    assert await reader.read(schema("c")) == schema("c").resolved()


def test_a_call_that_takes_too_long_is_given_up(workers: Workers) -> None:
    process = GrammarProcess(most_seconds=0.5)
    with pytest.raises(Overloaded):
        process.call(time.sleep, 1000)
    assert workers() == []
    assert process.call(os.path.join, "a", "b") == "a/b"


@pytest.mark.parametrize("error", [ValidationError, ToolError])
def test_errors_are_told_in_the_same_words(error: type[ValidationError | ToolError]) -> None:
    process = GrammarProcess()
    with pytest.raises(error) as caught:
        process.call(refuse, error)
    assert str(caught.value) == str(error("no"))


def test_the_process_ends_with_its_owner() -> None:
    process = GrammarProcess()
    worker = psutil.Process(process.call(os.getpid))
    del process
    assert not worker.is_running()


def test_the_process_ends_with_a_router_that_is_killed() -> None:
    code = (
        "import os\n"
        "from millrace_router.validation.grammar_process import GrammarProcess\n"
        "process = GrammarProcess()\n"
        "print(process.call(os.getpid), flush=True)\n"
        "input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as router:
        assert router.stdout is not None
        # What it logs comes before.
        worker = psutil.Process(next(int(line) for line in router.stdout if line.strip().isdigit()))
        router.kill()
    assert psutil.wait_procs([worker], 60) == ([worker], [])


async def test_nobody_else_waits_for_a_large_grammar() -> None:
    def asking(grammar: object) -> dict[str, Any]:
        return {"inputs": "a", "parameters": {"grammar": grammar}}

    first, second = ({"type": "json", "value": {"const": mark + PADDING}} for mark in "ab")
    others = grammar_workers()
    async with serving(limits=limits_with(max_concurrent_requests=9)) as edge:
        assert (await edge.post("/generate", asking(first)))[0] == 200
        (worker,) = (one for one in grammar_workers() if one not in others)
        worker.suspend()
        waiting = asyncio.create_task(edge.post("/generate", asking(second)))
        async with asyncio.timeout(60):
            while not edge.services.infer.permits.taken:
                await asyncio.sleep(0)
        assert (await edge.post("/generate", {"inputs": "a"}))[0] == 200
        assert (await edge.post("/generate", asking({"type": "regex", "value": "a"})))[0] == 200
        assert not waiting.done()
        worker.resume()
        assert (await waiting)[0] == 200
