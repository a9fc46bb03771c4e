"""Lines of any length arrive complete, kinds of ends differ, and children die with their descendants."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_launcher.processes.guard import left_over
from millrace_launcher.processes.process import TAIL_LINES, ManagedProcess, SpawnedProcess, lines
from millrace_launcher.settings.commands import Command


class Lines(list[str]):
    """The output of a child; its first line sets the event."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = asyncio.Event()

    def add(self, line: str) -> bool:
        self.append(line)
        self.begun.set()
        return True


async def run(code: str, *arguments: str) -> tuple[ManagedProcess, Lines, list[str]]:
    out = Lines()
    errors: list[str] = []
    paths = os.pathsep.join(path for path in sys.path if path)
    command = Command(
        "child", (sys.executable, "-c", code, *arguments), {**os.environ, "PYTHONPATH": paths}
    )
    process = await SpawnedProcess.start(command, takes_line=out.add, on_error_line=errors.append)
    return process, out, errors


async def test_lines_of_any_length_arrive_whole_and_in_order() -> None:
    code = "import sys; w = sys.stdout.write; w('a' * 10**6 + '\\n'); w('\\n'); w('é' * 10**5 + '\\r\\n'); w('last')"
    process, out, _ = await run(code)
    assert await process.wait() == 0
    assert out == ["a" * 10**6, "", "é" * 10**5, "last"]


@given(st.lists(st.binary(max_size=12), max_size=8))
@settings(deadline=None, max_examples=200)
def test_chunk_borders_do_not_matter(chunks: list[bytes]) -> None:
    async def collect() -> list[str]:
        stream = asyncio.StreamReader()
        for chunk in chunks:
            stream.feed_data(chunk)
        stream.feed_eof()
        return [line async for line in lines(stream)]

    whole = b"".join(chunks)
    expected = [part.decode(errors="replace").rstrip("\r") for part in whole.split(b"\n")]
    assert asyncio.run(collect()) == (
        expected if whole and not whole.endswith(b"\n") else expected[:-1]
    )


async def test_stderr_tail_keeps_the_last_lines() -> None:
    process, _, errors = await run(
        "import sys; [print(i, file=sys.stderr) for i in range(1000)]; sys.exit(3)"
    )
    assert await process.wait() == 3
    assert process.ending == "exit code 3"
    assert process.stderr_tail == [str(i) for i in range(1000 - TAIL_LINES, 1000)]
    assert len(errors) == 1000


async def test_signal_is_named() -> None:
    process, _, _ = await run("import os; os.kill(os.getpid(), 11)")
    assert await process.wait() == -signal.SIGSEGV
    assert process.ending == "killed by signal SIGSEGV"


async def test_a_child_has_its_own_group_in_the_session_of_the_launcher() -> None:
    process, out, _ = await run("import os; print(os.getpid(), os.getpgrp(), os.getsid(0))")
    await process.wait()
    assert out == [f"{process.pid} {process.pid} {os.getsid(0)}"]


async def test_terminate_waits_for_an_orderly_end() -> None:
    code = (
        "import signal, sys, threading\n"
        "stop = threading.Event()\n"
        "signal.signal(signal.SIGTERM, lambda *_: stop.set())\n"
        "print('up', flush=True)\n"
        "stop.wait()\n"
        "print('bye')"
    )
    process, out, _ = await run(code)
    await out.begun.wait()
    await process.terminate(50)
    assert process.ending == "exit code 0"
    assert out == ["up", "bye"]


async def test_deaf_child_and_its_own_child_are_killed() -> None:
    code = (
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.sigwait([signal.SIGUSR1])'])\n"
        "print(child.pid, flush=True)\n"
        "child.wait()"
    )
    process, out, _ = await run(code)
    await out.begun.wait()
    grandchild = psutil.Process(int(out[0]))
    await process.terminate(0.01)
    assert process.ending == "killed by signal SIGKILL"
    assert await asyncio.to_thread(psutil.wait_procs, [grandchild], 60) == ([grandchild], [])


@pytest.mark.parametrize(
    ("lines", "left"),
    [
        ([], set()),
        (["11\n", "12\n"], {11, 12}),
        (["11\n", "12\n", "gone 11\n", "13\n"], {12, 13}),
        (["11\n", "gone 11\n", "11\n"], {11}),
        (["11\n", "done\n"], set()),
        (["gone 5\n", "x\n", "7"], {7}),
    ],
)
def test_only_children_that_have_not_ended_are_left_over(lines: list[str], left: set[int]) -> None:
    assert left_over(lines) == left
