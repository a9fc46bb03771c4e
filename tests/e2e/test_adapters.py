"""Streams of adapters and of the base keep their bytes over killed shards and an overwritten folder."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoModelForCausalLM

from millrace.verify.adapter_files import linears, write_adapter
from millrace_launcher.demo import demo_folder
from millrace_testing.adapters.peft_files import save_adapter
from millrace_testing.launcher.e2e import Server, launch, until

WIDE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NEW_TOKENS = 80
SECONDS = 240
Asked = tuple[str, str]
"""Adapter and prompt of a stream; the base has no name."""
EACH = [
    (adapter, prompt)
    for adapter in ("", "a", "b")
    for prompt in ("What is decode?", "What is a shard?")
]
RANKS = (1, 4, 8, 16, 24)


def write(folder: Path, *, seed: int, targets: tuple[str, ...]) -> None:
    """Save an adapter of PEFT's for the demo model; a small alpha keeps random weights from overflow."""
    model = AutoModelForCausalLM.from_pretrained(demo_folder())
    save_adapter(folder, model=model, seed=seed, r=8, lora_alpha=0.02, target_modules=list(targets))


def write_many(folder: Path, count: int) -> dict[str, Path]:
    """Write adapters of different ranks and targets; their folders by name."""
    shapes = linears(demo_folder())
    narrow = {name: shape for name, shape in shapes.items() if name.endswith(("q_proj", "v_proj"))}
    return {
        path.name: path
        for path in (
            write_adapter(
                folder / f"adapter-{number}",
                narrow if number % 3 == 2 else shapes,
                rank=RANKS[number % len(RANKS)],
            )
            for number in range(count)
        )
    }


def flags_of(folders: dict[str, Path], cache: Path) -> list[str]:
    """Launcher flags that register adapters."""
    modules = [f"--lora-modules={name}={path}" for name, path in folders.items()]
    return ["--deterministic=on", f"--adapter-cache={cache}", *modules]


class Streams:
    """Streams with adapters and of the base, with counts of their tokens."""

    def __init__(self, http: httpx.AsyncClient, each: Sequence[Asked] = EACH) -> None:
        self._http = http
        self._each = each
        self.num_tokens = Counter[Asked]()

    async def one(
        self, adapter: str, prompt: str, *, num_tokens: int = NEW_TOKENS
    ) -> list[tuple[int, float]]:
        """The tokens with their log probabilities."""
        parameters: dict[str, Any] = {"max_new_tokens": num_tokens, "ignore_eos": True}
        if adapter:
            parameters["adapter_id"] = adapter
        body, found = {"inputs": prompt, "parameters": parameters}, []
        async with self._http.stream("POST", "/generate_stream", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    event = json.loads(line[5:])
                    assert "error" not in event, event
                    found.append((event["token"]["id"], event["token"]["logprob"]))
                    self.num_tokens[adapter, prompt] += 1
        assert len(found) == num_tokens
        return found

    def all(self) -> Coroutine[Any, Any, list[list[tuple[int, float]]]]:
        """All of them at once, with new counts from the call on."""
        self.num_tokens.clear()
        return self._together()

    async def alone(self) -> list[list[tuple[int, float]]]:
        """One after the other; all are different."""
        # Two adapters at a time are fetched for requests that come together.
        await asyncio.gather(*(self.one(*each, num_tokens=1) for each in self._each))
        alone = [await self.one(*each) for each in self._each]
        assert len(set(map(tuple, alone))) == len(self._each)
        return alone

    def are_running(self) -> bool:
        """Whether each of them has tokens."""
        return len(self.num_tokens) == len(self._each)

    async def _together(self) -> list[list[tuple[int, float]]]:
        return await asyncio.gather(*(self.one(*each) for each in self._each))


@asynccontextmanager
async def client(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    """A client for the length of the block, which a deadline bounds."""
    # Answers come from a server on one or two cores.
    limits = httpx.Limits(max_connections=None)
    async with (
        asyncio.timeout(SECONDS),
        httpx.AsyncClient(base_url=server.url, timeout=None, limits=limits) as http,
    ):
        yield http


async def overwrite_and_kill(server: Server, folder: Path, new: Path) -> None:
    """Overwrite the folder and kill the shard while all streams run; compare with each stream alone."""
    async with client(server) as http:
        streams = Streams(http)
        alone = await streams.alone()
        mixed, shard = await server.caught(
            streams.all, is_time=streams.are_running, num_running=len(EACH)
        )
        shutil.copytree(new, folder, dirs_exist_ok=True)
        shard.kill()
        assert await mixed == alone
        again = [await streams.one(*each) for each in EACH]
        changed = [one != other for one, other in zip(alone, again, strict=True)]
        assert changed == [adapter == folder.name for adapter, _ in EACH]


async def kill(server: Server, adapters: Sequence[str], rank: int = 0) -> None:
    """Kill a rank while a stream of each adapter runs; compare with each stream alone."""
    each = [(adapter, "What is decode?") for adapter in adapters]
    async with client(server) as http:
        streams = Streams(http, each)
        alone = await streams.alone()
        mixed, stopped = await server.caught(
            streams.all, is_time=streams.are_running, num_running=len(each)
        )
        victim = server.find(f"shard-{rank}")
        assert victim is not None
        victim.kill()
        stopped.resume()
        assert await mixed == alone


async def kill_while_loading(server: Server) -> None:
    """Kill the shard while it should load the adapter `late`, and streams of others run."""
    late = ("late", "What is a shard?")
    async with client(server) as http:
        streams = Streams(http)
        alone = await streams.alone()
        mixed, shard = await server.caught(
            streams.all, is_time=streams.are_running, num_running=len(EACH)
        )
        loads = server.metrics()["millrace_adapter_loads_total"]
        coming = asyncio.create_task(streams.one(*late))
        # The router has asked the stopped shard to load it.
        await until(lambda: 'waiting_lora_adapters="late"' in " ".join(server.metrics()))
        shard.kill()
        assert await mixed == alone
        found = await coming
        assert server.metrics()["millrace_adapter_loads_total"] == loads + len({"a", "b", "late"})
        assert found == await streams.one(*late)
        assert found != await streams.one("", late[1])


@contextmanager
def one_recovery(server: Server) -> Iterator[None]:
    """Assert that the shards are lost and come back once in the block."""
    name = 'millrace_recoveries_total{reason="lost"}'
    before = server.metrics().get(name, 0)
    yield
    assert server.metrics()[name] == before + 1


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of 35 adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    write(folder / "a", seed=1, targets=WIDE)
    write(folder / "b", seed=2, targets=("q_proj", "v_proj"))
    many = write_many(folder, 33)
    late = many.popitem()[1]
    return {"a": folder / "a", "b": folder / "b", "late": late, **many}


@pytest.fixture(scope="module")
def server(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        with launch(*flags_of(folders, tmp_path_factory.mktemp("cache"))) as server:
            yield server


@pytest.mark.long
def test_a_load_is_repeated_when_its_shard_is_killed(server: Server) -> None:
    with one_recovery(server):
        asyncio.run(kill_while_loading(server))


def test_streams_keep_their_bytes_and_new_requests_get_the_new_version(
    server: Server, folders: dict[str, Path], tmp_path: Path
) -> None:
    write(tmp_path, seed=3, targets=WIDE)
    with one_recovery(server):
        asyncio.run(overwrite_and_kill(server, folders["a"], tmp_path))


@pytest.mark.long
def test_streams_of_32_adapters_outlive_their_shard(
    server: Server, folders: dict[str, Path]
) -> None:
    with one_recovery(server):
        asyncio.run(kill(server, [name for name in folders if name.startswith("adapter-")]))


@pytest.mark.long
def test_streams_of_two_ranks_outlive_one_of_them(tmp_path: Path) -> None:
    folders = write_many(tmp_path, 5)
    with (
        launch("--num-shard=2", *flags_of(folders, tmp_path / "cache")) as server,
        one_recovery(server),
    ):
        asyncio.run(kill(server, ["", *folders], rank=1))
