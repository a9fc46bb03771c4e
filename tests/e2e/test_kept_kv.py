"""A shard of the demo model that is killed is back with its KV; one that may have damaged it is not."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
from bench.faults.chaos.scenes import save_random
from bench.faults.streams import Answer, Clients, differences, mixed_bodies
from bench.harness.paths import DEMO
from demo.train_head import HEAD

from millrace_shard.kernels.kv_store import DIRECTORY_AT, ENTRY, OPEN, SEALED
from millrace_testing.launcher.e2e import Server, launch, until
from millrace_testing.models.tiny_models import save_with_tokenizer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs memfd_create")

SHARDS = Path(__file__).parents[1] / "support" / "millrace_testing" / "shards"
TORN_LAUNCHER = (str(SHARDS / "shard_launcher.py"), str(SHARDS / "torn_shard.py"))
OOM_LAUNCHER = (str(SHARDS.parent / "launcher" / "oom_launcher.py"),)
NUM_KILLS = int(os.environ.get("MILLRACE_TEST_KILLS", "8"))
"""Kills in each place; 50 take a few minutes a place."""
STREAMS = mixed_bodies(8, longest=150)
SHORT = mixed_bodies(4, longest=70)
LONG = mixed_bodies(4, longest=400)
BLOCK_SIZE = 64
PLACES = ("hand-out", "clear", "forward", "answer", "seal", "nan")
ADAPTERS = ("pirate", "butler")
MOST_GROWN = 8 << 20
"""Bytes that a process may grow by in two hundred kills."""
LARGEST_NUMBER = 8192
"""Of blocks whose entries are read; the demo model's cache has fewer."""


class Torn(NamedTuple):
    """A server, and the file that names the place where its shard dies."""

    server: Server
    place: Path


@pytest.fixture(scope="module")
def torn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Torn]:
    place = tmp_path_factory.mktemp("torn") / "place"
    with launch(
        "--deterministic=on",
        "--max-restarts=1000",
        launcher=TORN_LAUNCHER,
        env={"MILLRACE_TEST_TORN": str(place)},
    ) as running:
        yield Torn(running, place)


@pytest.fixture(scope="module")
def server(torn: Torn) -> Server:
    return torn.server


class Run:
    """Streams on a server with faults, compared with those of the same server without."""

    def __init__(self, server: Server, streams: Sequence[dict[str, Any]] = STREAMS) -> None:
        self.server = server
        self._streams = streams
        self.undisturbed: list[Answer] = []

    async def over(self, fault: Callable[[psutil.Process], object]) -> dict[str, float]:
        """Let `fault` hit the stopped shard in the middle of all streams; what the counters have grown by."""
        server = self.server
        async with Clients(server.url) as clients:
            if not self.undisturbed:
                self.undisturbed = await clients.send_all(self._streams)
            before = counters(server)

            def send() -> Coroutine[Any, Any, list[Answer]]:
                clients.answers = []
                return clients.send_all(self._streams)

            middle = sum(len(answer.events) for answer in self.undisturbed) // 2
            task, shard = await server.caught(
                send, is_time=lambda: clients.num_tokens > middle, num_running=len(self._streams)
            )
            fault(shard)
            assert differences(self.undisturbed, await task) == []
        return grown(before, counters(server))


def counters(server: Server) -> dict[str, float]:
    names = (
        "millrace_tokens_recomputed_total",
        "millrace_kv_stores_dropped_total",
        "millrace_requests_quarantined_total",
        "millrace_recoveries_total",
    )
    return {name: v for name, v in server.metrics().items() if name.startswith(names)}


def grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    changes = {name: value - before.get(name, 0) for name, value in after.items()}
    return {name: change for name, change in changes.items() if change}


LOST = {'millrace_recoveries_total{reason="lost"}': 1.0}


def dropped(reason: str) -> str:
    return f'millrace_kv_stores_dropped_total{{reason="{reason}"}}'


@pytest.fixture(scope="module")
def run(server: Server) -> Run:
    return Run(server)


def fork_server(server: Server) -> psutil.Process:
    parent = server.shard.parent()
    assert parent is not None
    return parent


def store_of(process: psutil.Process) -> list[Path]:
    """The files in memory with KV that `process` holds."""
    paths = Path(f"/proc/{process.pid}/fd").iterdir()
    return [path for path in paths if "millrace-kv" in str(path.readlink())]


async def test_kills_cost_no_token_and_leave_no_descriptor(run: Run) -> None:
    holder, launcher = fork_server(run.server), psutil.Process(run.server.process.pid)
    # The launcher starts the second router some time after the server is ready, and holds its pipes.
    await until(lambda: "A second router waits" in run.server.log)
    before = holder.num_fds(), launcher.num_fds()
    for _ in range(5):
        assert await run.over(psutil.Process.kill) == LOST
        assert len(store_of(holder)) == 1
    # The launcher closes the pipes of a shard some time after its end.
    await until(lambda: holder.num_fds() <= before[0] and launcher.num_fds() <= before[1])
    assert fork_server(run.server) == holder


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT])
async def test_a_shard_that_may_have_damaged_its_kv_is_back_without_it(
    run: Run, number: signal.Signals
) -> None:
    holder = fork_server(run.server)

    def hit(shard: psutil.Process) -> None:
        shard.send_signal(number)
        shard.resume()

    changes = await run.over(hit)
    assert changes.pop("millrace_tokens_recomputed_total") > 0
    assert changes == {**LOST, dropped("empty"): 1.0}
    assert len(store_of(holder)) == 1


async def test_a_planned_restart_swaps_the_loaded_model(run: Run) -> None:
    server, before = run.server, fork_server(run.server)
    swapped, back = "Loading the model a second time", "The shards are back"
    num_back = sum(back in line for line in server.lines)

    def roll(shard: psutil.Process) -> None:
        shard.resume()
        server.process.send_signal(signal.SIGHUP)

    changes = await run.over(roll)
    await until(lambda: sum(back in line for line in server.lines) > num_back)
    assert not before.is_running()
    lines = [line for line in server.lines if swapped in line or "Restarting the shards" in line]
    assert swapped in lines[-2]
    # Streams that had ended before the new model was loaded have nothing to compute again.
    assert set(changes) <= {
        'millrace_recoveries_total{reason="planned"}',
        "millrace_tokens_recomputed_total",
        dropped("empty"),
    }


class Store:
    """The file of a shard that is dead."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDWR)
        raw = os.pread(self.fd, LARGEST_NUMBER * ENTRY.itemsize, DIRECTORY_AT)
        self.entries = np.frombuffer(raw, ENTRY).copy()
        open_blocks = np.flatnonzero(self.entries["state"] == OPEN)
        self.open = open_blocks[np.argsort(self.entries["generation"][open_blocks])]
        """Blocks of rows, which are not full, the latest last."""

    def write(self) -> None:
        os.pwrite(self.fd, self.entries.tobytes(), DIRECTORY_AT)


def flip_header(store: Store) -> None:
    (byte,) = os.pread(store.fd, 1, 20)
    os.pwrite(store.fd, bytes([byte ^ 1]), 20)


def truncate(store: Store) -> None:
    os.ftruncate(store.fd, os.fstat(store.fd).st_size // 2)


def swap(store: Store) -> None:
    # All open ones: a request that ends now may have left one of them, at which nobody looks.
    entries = [*store.open, np.flatnonzero(store.entries["state"] == SEALED)[0]]
    store.entries[entries] = store.entries[np.roll(entries, 1)]
    store.write()


def age(store: Store) -> None:
    store.entries["generation"][store.open] -= 1
    store.write()


def give_away(store: Store) -> None:
    store.entries["owner"][store.open] += 1
    store.write()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (flip_header, "empty"),
        (truncate, "empty"),
        (swap, "entry"),
        (age, "entry"),
        (give_away, "entry"),
    ],
)
async def test_a_store_with_a_fault_is_dropped_and_counted(
    run: Run, fault: Callable[[Store], None], reason: str
) -> None:
    changes = await run.over(lambda shard: between_lives(run.server, shard, fault))
    assert changes.pop("millrace_tokens_recomputed_total") > 0
    assert changes == {**LOST, dropped(reason): 1.0}


def between_lives(server: Server, shard: psutil.Process, fault: Callable[[Store], None]) -> None:
    """Let `fault` change the store after the end of `shard` and before the next one starts."""
    holder, launcher = fork_server(server), psutil.Process(server.process.pid)
    launcher.suspend()
    try:
        shard.kill()
        shard.wait(60)
        (path,) = store_of(holder)
        store = Store(path)
        fault(store)
        os.close(store.fd)
    finally:
        launcher.resume()


def arm(torn: Torn, place: str, shard: psutil.Process) -> None:
    """Let `shard` go on, and die as soon as it comes to `place`."""
    torn.place.write_text(place)
    shard.resume()


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(place, marks=[pytest.mark.long] * (place in ("clear", "seal", "nan")))
        for place in PLACES
    ],
)
async def test_a_kill_in_any_place_costs_no_token(torn: Torn, run: Run, place: str) -> None:
    for _ in range(3):
        assert await run.over(partial(arm, torn, place)) == LOST
        assert not torn.place.exists()


@pytest.mark.long
@pytest.mark.parametrize(
    "flags",
    [
        ["--num-shard=2"],
        pytest.param(["--kv-cache-dtype=int8"], marks=pytest.mark.long),
        pytest.param(["--kv-cache-dtype=fp8_e4m3fn"], marks=pytest.mark.long),
        pytest.param(["--prefix-caching=off"], marks=pytest.mark.long),
        pytest.param(["--speculate=3"], marks=pytest.mark.long),
        pytest.param(["--quantize=int4"], marks=pytest.mark.long),
        pytest.param(["--quantize=int8", "--num-shard=2"], marks=pytest.mark.long),
        pytest.param(["--dtype=float32", "--verify-kv"], marks=pytest.mark.long),
    ],
    ids=lambda flags: flags[0],
)
async def test_kept_kv_of_every_kind_costs_no_token(flags: list[str]) -> None:
    with launch("--deterministic=on", *flags) as server:
        run = Run(server)
        for _ in range(2):
            assert await run.over(psutil.Process.kill) == LOST


@pytest.mark.long
async def test_a_head_changes_no_answer_and_goes_on_after_kills(server: Server) -> None:
    async with Clients(server.url) as clients:
        plain = await clients.send_all(STREAMS)

    def damage(shard: psutil.Process) -> None:
        shard.send_signal(signal.SIGSEGV)
        shard.resume()

    with launch("--deterministic=on", f"--speculator={HEAD}") as other:
        run = Run(other)
        assert await run.over(psutil.Process.kill) == LOST
        changes = await run.over(damage)
        assert changes["millrace_tokens_recomputed_total"] > 0
        assert differences(plain, run.undisturbed) == []
        metrics = other.metrics()
        assert metrics["millrace_speculation_accepted_tokens_total"] > 0
        assert metrics["tgi_request_skipped_tokens_sum"] > 0


@pytest.mark.long
async def test_a_rank_that_ends_since_another_was_killed_keeps_its_kv() -> None:
    """It is dead, too, before the launcher hears of the kill."""
    with launch("--deterministic=on", "--num-shard=2") as server:
        launcher = psutil.Process(server.process.pid)

        def kill(shard: psutil.Process) -> None:
            ranks = [
                each for each in launcher.children(recursive=True) if "serve" in each.cmdline()
            ]
            launcher.suspend()
            shard.kill()
            psutil.wait_procs([rank for rank in ranks if rank != shard], timeout=60)
            launcher.resume()

        assert await Run(server).over(kill) == LOST


@pytest.mark.long
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
async def test_kept_kv_of_windows_and_sinks_costs_no_token(tmp_path: Path, name: str) -> None:
    folder = save_random(tmp_path / name, name)
    with launch("--deterministic=on", f"--model-id={folder}") as server:
        run = Run(server)
        for _ in range(3):
            assert await run.over(psutil.Process.kill) == LOST


@pytest.mark.long
async def test_kept_kv_of_grammars_and_adapters_costs_no_token() -> None:
    grammar = {"type": "regex", "value": "([a-z]{2,9} ){40,60}"}
    streams = mixed_bodies(8, longest=150)
    for number, body in enumerate(streams):
        if number % 2:
            body["adapter_id"] = ADAPTERS[number // 2 % len(ADAPTERS)]
        if number % 3 == 0:
            body["parameters"] |= {"grammar": grammar, "ignore_eos": False}
    modules = [f"--lora-modules={name}={DEMO.parent / 'adapters' / name}" for name in ADAPTERS]
    with launch("--deterministic=on", *modules) as server:
        run = Run(server, streams)
        for _ in range(3):
            assert await run.over(psutil.Process.kill) == LOST


@pytest.mark.long
@pytest.mark.parametrize("place", PLACES)
async def test_kills_in_a_place_cost_no_token(torn: Torn, run: Run, place: str) -> None:
    for _ in range(NUM_KILLS):
        assert await run.over(partial(arm, torn, place)) == LOST
        assert not torn.place.exists()


@pytest.mark.long
async def test_two_hundred_kills_leave_no_memory_and_no_descriptor(server: Server) -> None:
    run = Run(server, SHORT)
    holder, launcher = fork_server(server), psutil.Process(server.process.pid)
    for _ in range(20):
        await run.over(psutil.Process.kill)
    before = [(each.num_fds(), each.memory_full_info().uss) for each in (holder, launcher)]
    for _ in range(200):
        assert await run.over(psutil.Process.kill) == LOST, server.log[-8000:]
    after = [(each.num_fds(), each.memory_full_info().uss) for each in (holder, launcher)]
    assert [fds for fds, _ in after] == [fds for fds, _ in before]
    for (_, then), (_, now) in zip(before, after, strict=True):
        assert now - then < MOST_GROWN
    assert len(store_of(holder)) == 1


@pytest.mark.long
async def test_an_oom_kill_frees_the_kv(tmp_path: Path) -> None:
    counter = tmp_path / "oom_kills"
    counter.write_text("3")
    flags, env = ("--deterministic=on", "--max-restarts=100"), {"MILLRACE_TEST_OOM": str(counter)}
    with launch(*flags, launcher=OOM_LAUNCHER, env=env) as server:
        run, holder = Run(server), fork_server(server)

        def kill(shard: psutil.Process) -> None:
            counter.write_text(str(int(counter.read_text()) + 1))
            shard.kill()

        changes = await run.over(kill)
        assert changes.pop("millrace_tokens_recomputed_total") > 0
        assert changes == {**LOST, dropped("empty"): 1.0}
        assert fork_server(server) == holder
        assert await run.over(psutil.Process.kill) == LOST


@pytest.mark.long
async def test_latents_outlive_a_killed_shard(tmp_path: Path) -> None:
    save_with_tokenizer(tmp_path, "deepseek_v3", kv_lora_rank=64, qk_rope_head_dim=32)
    model = f"--model-id={tmp_path}", "--dtype=bfloat16", "--kv-memory=64MiB"
    with launch("--deterministic=on", *model) as server:
        run = Run(server)
        for _ in range(2):
            assert await run.over(psutil.Process.kill) == LOST


@pytest.mark.long
async def test_shards_without_kept_kv_compute_it_again() -> None:
    with launch("--deterministic=on", "--fork-server=weights") as server:
        changes = await Run(server).over(psutil.Process.kill)
    assert changes.pop("millrace_tokens_recomputed_total") > 0
    assert changes == LOST


@pytest.mark.long
async def test_sequences_with_states_go_on_from_copies_that_outlive_a_killed_shard(
    tmp_path: Path,
) -> None:
    save_with_tokenizer(tmp_path / "model", "qwen3_next")
    place = tmp_path / "place"
    with launch(
        "--deterministic=on",
        f"--model-id={tmp_path / 'model'}",
        "--max-restarts=1000",
        launcher=TORN_LAUNCHER,
        env={"MILLRACE_TEST_TORN": str(place)},
    ) as server:
        run, torn = Run(server, LONG), Torn(server, place)
        for each in ("forward", "answer", "hand-out", "seal", "forward"):
            changes = await run.over(partial(arm, torn, each))
            again = changes.pop("millrace_tokens_recomputed_total")
            assert changes == LOST
            # Each goes on from the last end of a block before what it had computed.
            assert again < len(LONG) * BLOCK_SIZE
