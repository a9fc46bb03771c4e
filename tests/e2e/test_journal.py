"""A real server keeps a journal while its shard is killed; its epochs replayed to another shard give the same bits."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
from bench.faults.streams import Answer, Clients, mixed_bodies

from millrace_router.journal.rotation import journal_files
from millrace_testing.launcher.e2e import END_SECONDS, ROOT, Server, launch

MODEL = ROOT / "demo" / "model"
GUIDED: dict[str, Any] = {
    "inputs": "What is a shard?",
    "parameters": {
        "max_new_tokens": 60,
        "details": True,
        "do_sample": True,
        "seed": 3,
        "grammar": {
            "type": "regex",
            "value": "(alpha|beta) and then (gamma|delta) follows [0-9]{4}",
        },
    },
}
BODIES = [*mixed_bodies(5, longest=60), GUIDED]
NUM_LONG = 3
"""At least this number of bodies generate more than 60 tokens."""
FLAGS = ("--deterministic=on", "--speculate=3")


async def ask_and_kill(server: Server) -> None:
    """Streams in whose middle the shard is killed; each is whole."""
    async with Clients(server.url) as clients:

        def send() -> Coroutine[Any, Any, list[Answer]]:
            clients.answers = []
            return clients.send_all(BODIES)

        streams, stopped = await server.caught(
            send, is_time=lambda: clients.num_tokens >= 60, num_running=NUM_LONG
        )
        stopped.kill()
        answers = await streams
    assert all(answer.is_whole and not answer.error for answer in answers)


@contextmanager
def shard(address: str, *flags: str) -> Iterator[None]:
    """A shard of the demo model and nothing else."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "millrace_shard", "serve", str(MODEL)),
            *(f"--address={address}", "--device=cpu", "--cpu-threads=1", *flags),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    )
    timer = Timer(END_SECONDS, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "Server started" in line:
                break
        else:
            raise AssertionError("".join(lines))
        timer.cancel()
        yield
    finally:
        timer.cancel()
        process.kill()
        process.communicate()


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def replay(journal: Path, address: str, *flags: str) -> tuple[int, str]:
    """Exit status and output of the command."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "millrace_router", "replay", str(journal)),
            *(f"--shard-addresses={address}", *flags),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=END_SECONDS,
        check=False,
        env=environment(),
    )
    return done.returncode, done.stdout


def serve_and_stop(journal: Path, *flags: str) -> None:
    with launch(*FLAGS, f"--journal={journal}", *flags) as server:
        asyncio.run(ask_and_kill(server))
        assert server.metrics()["millrace_journal_dropped_records_total"] == 0
        assert server.end() == 0


def reports(output: str) -> tuple[dict[str, Any], Sequence[dict[str, Any]]]:
    report: dict[str, Any] = json.loads(output)
    return report, report["epochs"]


def is_endless(body: dict[str, Any]) -> bool:
    """Whether nothing but its limit ends the answer."""
    parameters: dict[str, Any] = body["parameters"]
    return parameters.keys().isdisjoint({"stop", "grammar"})


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a shard that is started as the server's was."""
    address = f"unix:{tmp_path_factory.mktemp('shard')}/shard"
    with shard(address, *FLAGS):
        yield address


def test_an_incident_is_replayed_bit_for_bit(tmp_path: Path, address: str) -> None:
    journal = tmp_path / "journal"
    serve_and_stop(journal, "--journal-tokens")
    (file,) = journal_files(journal)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    status, output = replay(journal, address, "--json")
    report, epochs = reports(output)
    assert (status, report["equal"], report["compared"], report["notes"]) == (0, True, True, [])
    before, after = epochs[0], epochs[-1]
    assert before["failure"]["kind"] == "lost"
    assert before["failure"]["unanswered"]
    assert after["failure"] is None
    most = [body["parameters"]["max_new_tokens"] for body in BODIES if is_endless(body)]
    assert sum(epoch["tokens"] for epoch in epochs) >= sum(most)
    assert all(epoch["largest_gap"] == 0 for epoch in epochs)
    status, output = replay(journal, address, "--epoch=1")
    assert status == 0
    assert "the record ends with a failure (lost)" in output
    other = f"unix:{tmp_path}/shard"
    with shard(other, *FLAGS, "--dtype=float32"):
        status, output = replay(journal, other, "--json")
        report, epochs = reports(output)
    assert any("dtype" in note for note in report["notes"])
    gaps = [epoch["largest_gap"] for epoch in epochs]
    assert status == 1 or max(gaps) > 0, "another type of numbers is another result"


def test_without_token_ids_the_schedule_alone_is_replayed(tmp_path: Path, address: str) -> None:
    journal = tmp_path / "journal"
    serve_and_stop(journal)
    status, output = replay(journal, address, "--json")
    report, epochs = reports(output)
    assert (status, report["compared"]) == (0, False)
    assert all(epoch["steps"] > 10 and epoch["replayed_seconds"] > 0 for epoch in epochs)
