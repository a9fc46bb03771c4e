"""The fetcher over programs in place of the fetching process: two at once, time, memory, kills, and its memory."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from millrace_router.adapters.cache import AdapterCache
from millrace_router.adapters.child import COMMAND
from millrace_router.adapters.fetch_request import FetchLimits, FetchSource
from millrace_router.adapters.fetcher import (
    MAX_PER_CALLER,
    MAX_WAITING,
    Fetcher,
)
from millrace_router.errors import (
    AdapterInvalid,
    AdapterNotFound,
    AdapterTooLarge,
    AdapterUnavailable,
)
from millrace_router.request.adapter import (
    AdapterSource,
    AdapterVersion,
    MergeRecipe,
    MergeStrategy,
)
from millrace_testing.adapters.peft_files import modules_of, save_adapter, tiny_llama

LLAMA = modules_of(tiny_llama())
LIMITS = FetchLimits(max_bytes=1 << 24, timeout_seconds=60)
PROGRAM = """
import json, os, sys, time
request = json.load(sys.stdin)
folder, id_ = {folder!r}, request["source"]["id"]
open(os.path.join(folder, "started-" + id_), "w").write(str(os.getpid()))
while not os.path.exists(os.path.join(folder, "go-" + id_)):
    time.sleep(0.005)
print(open(os.path.join(folder, "go-" + id_)).read())
"""
"""Writes its id to a file `started-<id>`, and answers with the file `go-<id>` when it is there."""


class Clock:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def answer_of(digest: str, num_bytes: int = 10, **other: Any) -> str:
    return json.dumps(
        {"digest": digest * 64, "num_bytes": num_bytes, "modules": [["m", 17, True]]} | other
    )


class Play:
    """A fetcher over programs that wait for their cue."""

    def __init__(self, folder: Path, *, max_bytes: int, needed: Collection[str]) -> None:
        self.folder = folder
        self.clock = Clock()
        self.cache = AdapterCache(folder / "cache", max_bytes=max_bytes, clock=self.clock)
        self.cache.open()
        program = PROGRAM.format(folder=str(folder))
        self.fetcher = Fetcher(
            self.cache,
            needed=lambda: needed,
            clock=self.clock,
            command=(sys.executable, "-S", "-c", program),
        )

    def fetch(
        self, id_: str, *, limits: FetchLimits = LIMITS, **fields: Any
    ) -> asyncio.Task[AdapterVersion]:
        source = FetchSource(kind=AdapterSource.LOCAL, id=id_, name=f"name of {id_}", **fields)
        return asyncio.create_task(self.fetcher.fetch(source, modules=LLAMA, limits=limits))

    def go(self, id_: str, answer: str) -> None:
        (self.folder / "new").write_text(answer)
        (self.folder / "new").rename(self.folder / f"go-{id_}")

    async def started(self, id_: str) -> int:
        """Wait for the program of a fetch, and return its process id."""
        while not (path := self.folder / f"started-{id_}").exists() or not path.read_text():
            await asyncio.sleep(0.001)
        return int(path.read_text())

    def running(self) -> set[str]:
        return {path.name.removeprefix("started-") for path in self.folder.glob("started-*")}


@asynccontextmanager
async def playing(
    folder: Path, *, max_bytes: int = 1000, needed: Collection[str] = ()
) -> AsyncIterator[Play]:
    play = Play(folder, max_bytes=max_bytes, needed=needed)
    try:
        yield play
    finally:
        await play.fetcher.close()


async def test_versions_count_slices_and_biases(tmp_path: Path) -> None:
    async with playing(tmp_path) as play:
        play.go("a", answer_of("a", note="a note"))
        with capture_logs() as logs:
            version = await play.fetch("a")
        assert version == AdapterVersion(
            digest="a" * 64, name="name of a", num_slices=(("m", 3),), num_bytes=10
        )
        assert logs[0]["note"] == "a note"


async def test_two_run_at_once(tmp_path: Path) -> None:
    async with playing(tmp_path) as play:
        tasks = {id_: play.fetch(id_) for id_ in "abc"}
        await play.started("a")
        await play.started("b")
        assert play.running() == {"a", "b"}
        play.go("b", answer_of("b"))
        await tasks["b"]
        await play.started("c")
        for id_ in "ac":
            play.go(id_, answer_of(id_))
        assert [(await tasks[id_]).digest[0] for id_ in "ac"] == ["a", "c"]


async def test_the_same_fetch_runs_once_and_outlives_who_leaves(tmp_path: Path) -> None:
    async with playing(tmp_path) as play:
        first, second = play.fetch("a"), play.fetch("a")
        await play.started("a")
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        third = play.fetch("a", caller="other")
        play.go("a", answer_of("a"))
        assert (await second).digest == (await third).digest
        # Another token is another question.
        (tmp_path / "started-a").unlink()
        assert (await play.fetch("a", token="x")).digest
        assert play.running() == {"a"}


async def test_no_caller_fills_the_line(tmp_path: Path) -> None:
    async with playing(tmp_path) as play:
        many = [play.fetch(str(number), caller="greedy") for number in range(MAX_PER_CALLER)]
        await play.started("0")
        with pytest.raises(AdapterUnavailable, match="too many adapters"):
            await play.fetch("x", caller="greedy")
        others = [play.fetch(f"y{n}", caller=str(n)) for n in range(MAX_WAITING + 2 - len(many))]
        await asyncio.sleep(0)
        with pytest.raises(AdapterUnavailable, match="too many adapters"):
            await play.fetch("z", caller="late")
        for task in (*many, *others):
            task.cancel()


async def test_a_fetch_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    async with playing(tmp_path) as play:
        limits = FetchLimits(timeout_seconds=0.5)
        with pytest.raises(AdapterUnavailable, match="took too long"):
            await play.fetch("a", limits=limits)
        if "a" in play.running():
            with pytest.raises(ProcessLookupError):
                os.kill(await play.started("a"), 0)


async def test_a_fetch_that_is_killed_may_be_repeated(tmp_path: Path) -> None:
    async with playing(tmp_path) as play:
        task = play.fetch("a")
        os.kill(await play.started("a"), signal.SIGKILL)
        with pytest.raises(AdapterUnavailable, match="was killed") as refusal:
            await task
        assert refusal.value.retry_after_seconds == 1
        play.clock.now = 1.0
        play.go("a", answer_of("a"))
        assert (await play.fetch("a")).digest == "a" * 64


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("", "did not answer"),
        ("nonsense", "did not answer"),
        ('{"error": "broken", "reason": "KeyError in line 3"}', "failed: KeyError in line 3"),
    ],
)
async def test_a_process_without_an_answer(answer: str, message: str, tmp_path: Path) -> None:
    async with playing(tmp_path) as play:
        play.go("a", answer)
        with pytest.raises(AdapterUnavailable, match=message):
            await play.fetch("a")


async def test_a_program_that_does_not_start(tmp_path: Path) -> None:
    cache = AdapterCache(tmp_path, max_bytes=1, clock=Clock())
    fetcher = Fetcher(cache, needed=set, command=("/nothing",))
    source = FetchSource(kind=AdapterSource.LOCAL, id="a", name="a")
    with pytest.raises(AdapterUnavailable, match="did not start"):
        await fetcher.fetch(source, modules=LLAMA, limits=LIMITS)


async def test_each_failure_doubles_the_wait_up_to_a_minute(tmp_path: Path) -> None:
    async with playing(tmp_path) as play:
        play.go("a", '{"error": "unavailable", "reason": "no"}')
        seconds = []
        for _ in range(8):
            with pytest.raises(AdapterUnavailable) as refusal:
                await play.fetch("a")
            after = refusal.value.retry_after_seconds
            assert after is not None
            seconds.append(after)
            play.clock.now += after
        assert seconds == [1, 2, 4, 8, 16, 32, 60, 60]
        play.clock.now += 1000
        with pytest.raises(AdapterUnavailable) as refusal:
            await play.fetch("a")
        assert refusal.value.retry_after_seconds == 1
        # Another adapter goes on.
        play.go("b", answer_of("b"))
        assert (await play.fetch("b")).digest


async def test_what_is_broken_is_remembered_by_its_files(tmp_path: Path) -> None:
    async with playing(tmp_path) as play:
        refusal = {"error": "invalid", "reason": "because", "source_digest": "d1"}
        play.go("a", json.dumps(refusal))
        with pytest.raises(AdapterInvalid, match="because"):
            await play.fetch("a")
        play.go("a", '{"error": "refused_before"}')
        with pytest.raises(AdapterInvalid, match="because"):
            await play.fetch("a")
        play.go("a", answer_of("a"))
        assert (await play.fetch("a")).digest
        play.go("a", '{"error": "not_found", "reason": ""}')
        with pytest.raises(AdapterNotFound, match="'name of a' does not exist"):
            await play.fetch("a")


async def test_the_cache_makes_room_but_not_of_what_is_needed(tmp_path: Path) -> None:
    async with playing(tmp_path, max_bytes=25, needed={"a" * 64}) as play:
        for id_ in "ab":
            (tmp_path / "cache" / (id_ * 64)).mkdir()
            play.go(id_, answer_of(id_))
            await play.fetch(id_)
        play.clock.now = 10.0
        play.go("c", answer_of("c"))
        await play.fetch("c")
        assert {path.name[0] for path in (tmp_path / "cache").iterdir()} == {"a"}
        assert ("a" * 64 in play.cache, "b" * 64 in play.cache) == (True, False)
        play.go("d", answer_of("d", 16))
        with pytest.raises(AdapterUnavailable, match="full of adapters in use"):
            await play.fetch("d")
        play.go("e", answer_of("e", 26))
        with pytest.raises(AdapterTooLarge) as refusal:
            await play.fetch("e")
        assert (refusal.value.num_bytes, refusal.value.limit) == (26, 25)


@asynccontextmanager
async def real(folder: Path, command: tuple[str, ...] = COMMAND) -> AsyncIterator[Fetcher]:
    cache = AdapterCache(folder / "cache", max_bytes=1 << 30, clock=time.monotonic)
    cache.open()
    fetcher = Fetcher(cache, needed=set, command=command)
    try:
        yield fetcher
    finally:
        await fetcher.close()


def local(path: Path | str, **fields: Any) -> FetchSource:
    return FetchSource(kind=AdapterSource.LOCAL, id=str(path), name="mine", **fields)


async def test_the_real_process_fetches_and_merges(tmp_path: Path) -> None:
    save_adapter(tmp_path / "root" / "a")
    save_adapter(tmp_path / "root" / "b", seed=1, target_modules=["q_proj"])
    async with real(tmp_path) as fetcher:
        versions = [
            await fetcher.fetch(local(id_, root=tmp_path / "root"), modules=LLAMA, limits=LIMITS)
            for id_ in "ab"
        ]
        recipe = MergeRecipe(ids=("a", "b"), weights=(0.5, 2.0), strategy=MergeStrategy.CAT)
        merged = await fetcher.merge(recipe, versions, limits=LIMITS, name="both")
        assert (tmp_path / "cache" / merged.digest / "adapter.safetensors").is_file()
        assert (merged.name, merged.num_bytes > versions[0].num_bytes) == ("both", True)
        with pytest.raises(AdapterNotFound):
            await fetcher.fetch(local("../x", root=tmp_path / "root"), modules=LLAMA, limits=LIMITS)


async def test_a_merge_is_computed_once(tmp_path: Path) -> None:
    save_adapter(tmp_path / "a")
    async with real(tmp_path) as fetcher:
        version = await fetcher.fetch(local(tmp_path / "a"), modules=LLAMA, limits=LIMITS)
        recipe = MergeRecipe(ids=("a",), weights=(0.5,), strategy=MergeStrategy.LINEAR)
        merged = await fetcher.merge(recipe, [version], limits=LIMITS, name="x")
        path = tmp_path / "cache" / merged.digest / "adapter.safetensors"
        before = path.stat()
        again = await fetcher.merge(recipe, [version], limits=LIMITS, name="y")
        assert (again.digest, again.name) == (merged.digest, "y")
        assert path.stat().st_ino == before.st_ino


async def test_a_pattern_that_never_ends_is_killed(tmp_path: Path) -> None:
    save_adapter(tmp_path / "a")
    path = tmp_path / "a" / "adapter_config.json"
    bomb = {"rank_pattern": {r"([a-z_.0-9]+)+!": 8}}
    path.write_text(json.dumps(json.loads(path.read_text()) | bomb))
    async with real(tmp_path) as fetcher:
        limits = FetchLimits(timeout_seconds=3.0)
        with pytest.raises(AdapterUnavailable, match="took too long"):
            await fetcher.fetch(local(tmp_path / "a"), modules=LLAMA, limits=limits)


async def test_memory_has_a_limit(tmp_path: Path) -> None:
    """A program that begins as the real one does, and then asks for more memory than it may have."""
    program = (
        "import millrace_router.adapters.fetching.__main__ as main\n"
        "main.answer = lambda request: bytearray(1 << 32)\n"
        "main.main()\n"
    )
    async with real(tmp_path, (sys.executable, "-c", program)) as fetcher:
        with pytest.raises(AdapterUnavailable, match="needs more memory"):
            await fetcher.fetch(local(tmp_path), modules=LLAMA, limits=LIMITS)


async def test_a_defect_is_told_without_the_values(tmp_path: Path) -> None:
    program = (
        "import millrace_router.adapters.fetching.__main__ as main\n"
        "def answer(request):\n"
        "    raise ValueError(request['source']['token'])\n"
        "main.answer = answer\n"
        "main.main()\n"
    )
    async with real(tmp_path, (sys.executable, "-c", program)) as fetcher:
        source = local(tmp_path, token="hf_secret")
        with pytest.raises(AdapterUnavailable, match="ValueError in line 3 of answer") as refusal:
            await fetcher.fetch(source, modules=LLAMA, limits=LIMITS)
        assert "hf_secret" not in str(refusal.value)
