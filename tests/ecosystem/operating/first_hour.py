"""`python -m tests.ecosystem.operating.first_hour` records the output of the commands in docs/when-a-start-fails.md.

A fresh clone of the last commit is installed and served as the README says, on a machine where port 3000 is free. Paths
are shortened, and long outputs and lines are cut where the page says `…`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

from millrace_testing.project import ROOT

PAGE = ROOT / "docs" / "when-a-start-fails.md"
BLOCK = re.compile(r"(?<=<!-- recorded: )([\w-]+)( -->\n```text\n)(.*?)(?=```\n)", re.DOTALL)
BLOCKS = {match[1]: match[3] for match in BLOCK.finditer(PAGE.read_text())}
"""The recordings by their names."""
MOST_LINES = 12
WIDTH = 140
CUT = "…"
SETTINGS = ("WARNING: ", "torch: from ")
"""Beginnings of remarks of pip, and of the choice of PyTorch's index."""
SECONDS = 900
"""For the longest of all, the installation."""
OFFLINE = ("unshare", "--user", "--map-root-user", "--net")
"""Runs a command without a network."""
LAUNCHER = ".venv/bin/millrace-launcher"
SERVE_SMOLLM2 = ".venv/bin/millrace serve smollm2"
ASK_SMOLLM2 = (
    "curl -s 127.0.0.1:3000/v1/chat/completions -H 'Content-Type: application/json'"
    """ -d '{"temperature": 0, "max_tokens": 40, "messages": [{"role": "user", "content": "What is the capital of"""
    """ France?"}]}' | .venv/bin/python -c 'import json, sys; print(json.load(sys.stdin)["choices"][0]["message"]"""
    """["content"])'"""
)
ASK = (
    "curl -s 127.0.0.1:3000/generate -H 'Content-Type: application/json'"
    """ -d '{"inputs": "What is prefill?", "parameters": {"max_new_tokens": 20}}'"""
)


def recorded_answer(block: str) -> tuple[dict[str, Any], str]:
    """The body of the last request in a block of the page, and the line that it printed."""
    *_, command, answer = block.splitlines()
    words = shlex.split(command.removeprefix("$ "))
    return json.loads(words[words.index("-d") + 1]), answer


class Terminal:
    """Types commands in a folder, and keeps what a reader would see."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        kept = ("PYTHONPATH", "VIRTUAL_ENV")
        self._environment = {k: v for k, v in os.environ.items() if k not in kept}
        self._environment["TIMEFORMAT"] = "real %1Rs"

    def run(self, command: str, *, without: tuple[str, ...] = ()) -> list[str]:
        """What a command prints until it ends; `without` is put before it, unseen."""
        with self._started(command, without) as (process, lines, _):
            process.wait(SECONDS)
        return self._shown(command, lines)

    @contextmanager
    def running(self, command: str, until: str) -> Iterator[Callable[[], list[str]]]:
        """A command that has printed `until`; the value reads what it printed so far. Ctrl-C ends it."""
        with self._started(command, ()) as (process, lines, wait_for):
            wait_for(until)
            yield lambda: self._shown(command, lines)
            os.killpg(process.pid, signal.SIGINT)
            process.wait(SECONDS)

    @contextmanager
    def _started(
        self, command: str, without: tuple[str, ...]
    ) -> Iterator[tuple[subprocess.Popen[str], list[str], Callable[[str], None]]]:
        process = subprocess.Popen(
            [*without, "bash", "-c", command],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        lines: list[str] = []
        changed = Event()

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line.rstrip("\n"))
                changed.set()
            changed.set()

        def wait_for(text: str) -> None:
            while not any(text in line for line in lines):
                assert process.poll() is None, "\n".join(lines)
                changed.wait(SECONDS)
                changed.clear()

        thread = Thread(target=read)
        thread.start()
        try:
            yield process, lines, wait_for
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            thread.join()
            assert process.stdout is not None
            process.stdout.close()

    def _shown(self, command: str, lines: list[str]) -> list[str]:
        """The command and its output, with short paths and lines; remarks on this machine's settings are none."""
        places = {str(self._folder): "~/millrace", str(Path.home()): "~"}
        shown = [line for line in lines if not line.startswith(SETTINGS)]
        for place, name in places.items():
            shown = [line.replace(place, name) for line in shown]
        return [f"$ {command}", *(cut(line) for line in shown)]


def cut(line: str) -> str:
    """A line that fits the page; an error is kept whole."""
    return line if len(line) <= WIDTH or line.startswith("Error: ") else f"{line[: WIDTH - 1]}{CUT}"


def shortened(lines: list[str], *, first: int, most: int = MOST_LINES) -> list[str]:
    """At most `most` lines: the `first` ones and the last."""
    if len(lines) <= most:
        return lines
    return [*lines[:first], CUT, *lines[first - most + 1 :]]


def record(clone: Path) -> Mapping[str, list[str]]:
    """The outputs by their names on the page."""
    terminal = Terminal(clone)
    found = {}
    with terminal.running("make serve", until=":3000/generate") as printed:
        served = [line for line in printed() if line]
        answer = terminal.run(ASK)
        found["first-answer"] = [*shortened(served, first=3, most=MOST_LINES - 3), *answer]
        found["port"] = terminal.run(LAUNCHER)
    with terminal.running(SERVE_SMOLLM2, until=":3000/generate") as printed:
        command, *lines = printed()
        banner = next(line for line in lines if "is served at" in line)
        found["smollm2"] = [command, CUT, banner, *terminal.run(ASK_SMOLLM2)]
    found["flag"] = terminal.run(f"{LAUNCHER} --max-batch-prefil-tokens 512")
    found["offline"] = terminal.run(f"time {LAUNCHER} --model-id Qwen/Qwen3-0.6B", without=OFFLINE)
    found["folder"] = terminal.run(f"{LAUNCHER} --model-id ./Qwen3")
    found["kv-memory"] = terminal.run(f"{LAUNCHER} --kv-memory 1k")
    with terminal.running(LAUNCHER, until="Starting shard") as printed:
        started = len(printed())
    found["ctrl-c"] = [*printed()[:started], "^C", *printed()[started:]]
    return {name: shortened(lines, first=3) for name, lines in found.items()}


def written(page: str, found: Mapping[str, list[str]]) -> str:
    """The page with these outputs. Raises KeyError for a block that is not recorded."""

    def block(match: re.Match[str]) -> str:
        return f"{match[1]}{match[2]}" + "".join(f"{line}\n" for line in found[match[1]])

    return BLOCK.sub(block, page)


def main() -> None:
    """Record, and write the page anew."""
    with tempfile.TemporaryDirectory(prefix="millrace-") as folder:
        clone = Path(folder) / "millrace"
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        PAGE.write_text(written(PAGE.read_text(), record(clone)))


if __name__ == "__main__":
    main()
