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

import httpx
import pytest
from bench.faults.streams import Answer, Clients, mixed_bodies
from tests.e2e.test_images import chat, picture, write_model

from millrace.verify.adapter_files import linears, write_adapter
from millrace_router.journal.reader import AdapterChanged, read_events
from millrace_router.journal.rotation import journal_files
from millrace_testing.launcher.e2e import END_SECONDS, ROOT, Server, launch

MODEL = ROOT / "demo" / "model"
SHARDS = ROOT / "tests" / "support" / "millrace_testing" / "shards"
POISONED = str(SHARDS / "poison_shard.py")
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
ADAPTERS = ("narrow", "wide", "wider")


async def ask_and_kill(server: Server, bodies: Sequence[dict[str, Any]]) -> None:
    """Streams in whose middle the shard is killed; each is whole."""
    async with Clients(server.url) as clients:

        def send() -> Coroutine[Any, Any, list[Answer]]:
            clients.answers = []
            return clients.send_all(bodies)

        streams, stopped = await server.caught(
            send, is_time=lambda: clients.num_tokens >= 60, num_running=NUM_LONG
        )
        stopped.kill()
        answers = await streams
    assert all(answer.is_whole and not answer.error for answer in answers)


@contextmanager
def shard(address: str, *flags: str, model: Path = MODEL) -> Iterator[None]:
    """A shard and nothing else."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "millrace_shard", "serve", str(model)),
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


def serve_and_stop(journal: Path, *flags: str, bodies: Sequence[dict[str, Any]] = BODIES) -> None:
    with launch(*FLAGS, f"--journal={journal}", *flags) as server:
        asyncio.run(ask_and_kill(server, bodies))
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


@pytest.mark.long
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


@pytest.mark.long
def test_epochs_that_began_with_kept_kv_are_replayed_bit_for_bit(
    tmp_path: Path, address: str
) -> None:
    """Steps of more than two rows run out of memory."""
    journal, poisoned = tmp_path / "journal", (str(SHARDS / "shard_launcher.py"), POISONED)
    flags = (*FLAGS, f"--journal={journal}", "--journal-tokens")
    with launch(*flags, launcher=poisoned, env={"MILLRACE_TEST_OOM_ROWS": "2"}) as server:

        async def send() -> list[Answer]:
            async with Clients(server.url) as clients:
                return await clients.send_all(BODIES)

        assert all(answer.is_whole and not answer.error for answer in asyncio.run(send()))
        assert server.metrics()["millrace_tokens_recomputed_total"] == 0
        assert server.end() == 0
    status, output = replay(journal, address, "--json")
    _, epochs = reports(output)
    assert (status, len(epochs) > 1) == (0, True), output
    assert all(epoch["largest_gap"] == 0 for epoch in epochs)
    status, output = replay(journal, address, "--json", f"--epoch={len(epochs)}")
    _, (last,) = reports(output)
    assert (status, last["largest_gap"]) == (0, 0), output
    assert last["tokens"] > 100


@pytest.mark.long
def test_without_token_ids_only_the_schedule_is_replayed(tmp_path: Path, address: str) -> None:
    journal = tmp_path / "journal"
    serve_and_stop(journal)
    status, output = replay(journal, address, "--json")
    report, epochs = reports(output)
    assert (status, report["compared"]) == (0, False)
    assert all(epoch["steps"] > 10 and epoch["replayed_seconds"] > 0 for epoch in epochs)


@pytest.mark.long
def test_requests_with_images_are_left_out_and_others_replayed_bit_for_bit(tmp_path: Path) -> None:
    folder, journal, address = tmp_path / "model", tmp_path / "journal", f"unix:{tmp_path}/shard"
    folder.mkdir()
    write_model(folder)
    flags = ("--dtype=float32", "--deterministic=on")

    async def send(url: str) -> None:
        plain = [
            {"inputs": f"number {number}", "parameters": {"seed": number}} for number in range(6)
        ]
        async with httpx.AsyncClient(base_url=url, timeout=END_SECONDS) as client:
            chats = [
                client.post("/v1/chat/completions", json=chat([picture(at)])) for at in range(3)
            ]
            texts = [client.post("/generate", json=body) for body in plain]
            assert {each.status_code for each in await asyncio.gather(*chats, *texts)} == {200}

    served = f"--model-id={folder}"
    with launch(*flags, served, f"--journal={journal}", "--journal-tokens") as server:
        asyncio.run(send(server.url))
        assert server.end() == 0
    with shard(address, *flags, model=folder):
        status, output = replay(journal, address, "--json")
        report, (epoch,) = reports(output)
        assert (status, report["equal"], epoch["left_out"], epoch["largest_gap"]) == (0, True, 3, 0)
        status, output = replay(journal, address)
    assert status == 0
    assert "3 requests with images are not compared" in output


def with_adapters(bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Requests of the base and of each adapter in turn."""
    names = (*ADAPTERS, "")
    return [
        {**body, "parameters": {**body["parameters"], "adapter_id": names[number % len(names)]}}
        for number, body in enumerate(bodies)
    ]


def write_adapters(folder: Path) -> list[str]:
    """Write adapters of different ranks, and return flags that register them; memory has room for two at a time."""
    shapes = linears(MODEL)
    folders = [
        write_adapter(folder / name, shapes, rank=rank)
        for name, rank in zip(ADAPTERS, (4, 16, 20), strict=True)
    ]
    modules = [f"--lora-modules={one.name}={one}" for one in folders]
    return [*modules, "--max-loras=2", "--adapter-cycle-time-s=0.2"]


def loads(journal: Path) -> list[str | None]:
    """Digests of the adapters that the shard loaded; None for a slot that was freed."""
    events = (event for _, event in read_events(journal))
    return [event.digest for event in events if isinstance(event, AdapterChanged)]


@pytest.mark.long
def test_an_incident_with_adapters_is_replayed_bit_for_bit(tmp_path: Path) -> None:
    journal, cache = tmp_path / "journal", f"--adapter-cache={tmp_path / 'cache'}"
    flags = write_adapters(tmp_path)
    bodies = with_adapters(BODIES)
    serve_and_stop(journal, "--journal-tokens", cache, *flags, bodies=bodies)
    loaded = loads(journal)
    assert len(set(loaded) - {None}) == len(ADAPTERS)
    assert None in loaded, "no adapter made room for another one"
    address = f"unix:{tmp_path}/shard"
    with shard(address, *FLAGS, "--enable-lora", cache):
        status, output = replay(journal, address, "--json")
    report, epochs = reports(output)
    assert (status, report["equal"], report["compared"], report["notes"]) == (0, True, True, [])
    assert epochs[0]["failure"]["kind"] == "lost"
    assert sum(epoch["tokens"] for epoch in epochs) >= 60
