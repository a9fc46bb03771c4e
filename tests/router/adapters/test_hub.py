"""Fetches from a stub of the hub by the real process: access, sizes, redirects, failures, and no trace of tokens."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog

from millrace_router.adapters.cache import AdapterCache
from millrace_router.adapters.fetcher import Fetcher, FetchLimits
from millrace_router.adapters.fetching.errors import Forbidden, NotFound, Unavailable
from millrace_router.adapters.fetching.hub import Hub
from millrace_router.adapters.names import NamedSource
from millrace_router.errors import (
    AdapterForbidden,
    AdapterInvalid,
    AdapterNotFound,
    AdapterTooLarge,
    AdapterUnavailable,
    RouterError,
)
from millrace_router.request.adapter import AdapterReference, AdapterSource, AdapterVersion
from millrace_testing.adapters.hub_stub import HubStub, Repository, hub_stub
from millrace_testing.adapters.peft_files import modules_of, save_adapter, tiny_llama
from millrace_testing.clock import Clock

LLAMA = modules_of(tiny_llama())
LIMITS = FetchLimits(max_bytes=1 << 20, timeout_seconds=60)
TOKEN = "hf_SecretOfTheClient"
SERVER_TOKEN = "hf_ServersOwn"
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("saved")
    save_adapter(folder)
    return {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS, "README.md")}


class Fetching:
    """A fetcher and its hub."""

    def __init__(self, stub: HubStub, folder: Path) -> None:
        self.stub = stub
        self.clock = Clock()
        self.cache = AdapterCache(folder, max_bytes=1 << 30, clock=self.clock)
        self.cache.open()
        self.fetcher = Fetcher(
            self.cache,
            modules=LLAMA,
            num_pages=1000,
            limits=LIMITS,
            needed=set,
            endpoint=f"{stub.url}/",
            clock=self.clock,
        )

    async def fetch(
        self, id_: str = "org/a", *, token: str | None = None, **fields: Any
    ) -> AdapterVersion:
        source = NamedSource(kind=AdapterSource.HUB, location=id_, **fields)
        return await self.fetcher.fetch(source, name="mine", token=token, caller="")

    async def commit(self, *, token: str | None = None, revision: str | None = None) -> str:
        source = NamedSource(kind=AdapterSource.HUB, location="org/a", revision=revision)
        return await self.fetcher.commit_of(source, name="mine", token=token, caller="")

    async def refusal(self, id_: str = "org/a", **fields: Any) -> RouterError:
        with pytest.raises(RouterError) as refusal:
            await self.fetch(id_, **fields)
        assert TOKEN not in str(refusal.value)
        assert refusal.value.__cause__ is None
        return refusal.value


@asynccontextmanager
async def fetching(folder: Path, repository: Repository) -> AsyncIterator[Fetching]:
    async with hub_stub() as stub:
        stub.repositories["org/a"] = repository
        both = Fetching(stub, folder / "cache")
        try:
            yield both
        finally:
            await both.fetcher.close()


async def test_two_files_of_one_commit_are_fetched(files: dict[str, bytes], tmp_path: Path) -> None:
    async with fetching(tmp_path, Repository(files)) as hub:
        version = await hub.fetch(revision="v1/x")
        assert (tmp_path / "cache" / version.digest / "adapter.safetensors").is_file()
        assert version.name == "mine"
        assert dict(version.num_slices)["model.layers.0.self_attn.q_proj"] == 1
        assert hub.stub.paths() == ["x", CONFIG, WEIGHTS]
        # A branch that moves is another version, and a commit stays.
        config = files[CONFIG].replace(b'"lora_alpha": 8', b'"lora_alpha": 9')
        hub.stub.repositories["org/a"] = Repository({**files, CONFIG: config})
        assert (await hub.fetch()).digest != version.digest


async def test_clients_without_access_are_refused(files: dict[str, bytes], tmp_path: Path) -> None:
    async with fetching(tmp_path, Repository(files, tokens={TOKEN})) as hub:
        assert type(await hub.refusal()) is AdapterNotFound
        assert type(await hub.refusal(token="hf_other")) is AdapterForbidden
        assert type(await hub.refusal("org/nothing")) is AdapterNotFound
        assert type(await hub.refusal("org/nothing", token=TOKEN)) is AdapterNotFound
        assert type(await hub.refusal(revision="nothing")) is AdapterNotFound
        assert (await hub.fetch(token=TOKEN)).digest
        hub.stub.repositories["org/a"].tokens = set()
        assert type(await hub.refusal(token=TOKEN)) is AdapterForbidden
        assert type(await hub.refusal()) is AdapterNotFound


async def test_known_versions_are_not_downloaded_again(
    files: dict[str, bytes], tmp_path: Path
) -> None:
    """Another fetch asks the hub for the commit alone, with the token of its client."""
    async with fetching(tmp_path, Repository(files, tokens={TOKEN})) as hub:
        version = await hub.fetch(token=TOKEN)
        del hub.stub.asked[:]
        assert await hub.fetch(token=TOKEN) == version
        assert hub.stub.asked == [("/api/models/org/a/revision/main", f"Bearer {TOKEN}")]
        assert type(await hub.refusal()) is AdapterNotFound
        # A version that left the cache is fetched anew.
        shutil.rmtree(tmp_path / "cache" / version.digest)
        assert await hub.fetch(token=TOKEN) == version
        assert (tmp_path / "cache" / version.digest).is_dir()


async def test_access_is_checked_by_the_commit(files: dict[str, bytes], tmp_path: Path) -> None:
    repository = Repository(files, tokens={TOKEN})
    async with fetching(tmp_path, repository) as hub:
        assert await hub.commit(token=TOKEN) == repository.commit
        assert await hub.commit(token=TOKEN, revision="v1/x") == repository.commit
        assert hub.stub.paths() == ["main", "x"]
        with pytest.raises(AdapterNotFound):
            await hub.commit()
        repository.tokens = set()
        with pytest.raises(AdapterForbidden):
            await hub.commit(token=TOKEN)


@pytest.mark.parametrize("token", ["two words", "line\r\nx-evil: 1", "", "\u2603", "x" * 600])
def test_tokens_that_cannot_be_a_header_are_forbidden(token: str) -> None:
    with pytest.raises(Forbidden):
        Hub("http://127.0.0.1:1", token).commit_of("org/a", None)


@pytest.mark.parametrize(
    ("repository", "revision"),
    [
        ("../org", None),
        ("org/../a", None),
        ("org/a/b", None),
        ("org/a?x=1", None),
        ("org/a#x", None),
        ("org/a\n", None),
        ("org/a%2f", None),
        ("/etc", None),
        ("", None),
        ("http://evil/a", None),
        ("org/" + "a" * 97, None),
        ("org/a", "../../x"),
        ("org/a", "a b"),
        ("org/a", "a\n"),
        ("org/a", "x" * 200),
        ("org/a", "?"),
    ],
)
def test_invalid_names_send_no_request(repository: str, revision: str | None) -> None:
    with pytest.raises(NotFound):
        Hub("http://127.0.0.1:1").commit_of(repository, revision)


async def test_sizes_are_checked_before_the_download(
    files: dict[str, bytes], tmp_path: Path
) -> None:
    async with fetching(tmp_path, Repository(files, sizes={WEIGHTS: 1 << 40})) as hub:
        refusal = await hub.refusal()
        assert isinstance(refusal, AdapterTooLarge)
        assert (refusal.num_bytes, refusal.limit) == (1 << 40, 1 << 20)
        assert hub.stub.paths() == ["main"]


async def test_a_broken_adapter_is_downloaded_once(files: dict[str, bytes], tmp_path: Path) -> None:
    broken = {**files, CONFIG: files[CONFIG].replace(b'"use_dora": false', b'"use_dora": true')}
    async with fetching(tmp_path, Repository(broken)) as hub:
        first, second = await hub.refusal(), await hub.refusal()
        assert isinstance(first, AdapterInvalid)
        assert "use_dora" in str(first)
        assert str(first) == str(second)
        assert hub.stub.paths() == ["main", CONFIG, WEIGHTS, "main"]
        hub.stub.repositories["org/a"] = Repository(files)
        assert (await hub.fetch()).digest


async def test_a_pickle_is_not_downloaded(files: dict[str, bytes], tmp_path: Path) -> None:
    pickle = {CONFIG: files[CONFIG], "adapter_model.bin": b"x"}
    async with fetching(tmp_path, Repository(pickle)) as hub:
        assert "is a pickle" in str(await hub.refusal())
        assert hub.stub.paths() == ["main"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": {WEIGHTS: 100_000}}, f"the download of {WEIGHTS} was cut short"),
        ({"sizes": {WEIGHTS: 10}}, f"{WEIGHTS} is longer than"),
        ({"hash_suffix": "0"}, f"the download of {WEIGHTS} is damaged"),
        ({"status": 500}, "the hub answers 500"),
        ({"status": 429, "headers": {"retry-after": "17"}}, "the hub answers 429"),
        ({"listing": b"<html>"}, "cannot be read"),
        ({"listing": b"[]"}, "cannot be read"),
        ({"listing": b'{"sha": "../x", "siblings": []}'}, "cannot be read"),
        ({"listing": b'{"sha": 5, "siblings": 7}'}, "cannot be read"),
        ({"listing": b"[" * 200_000}, "cannot be read"),
        ({"redirects": {WEIGHTS: "http://127.0.0.2:9/x"}}, "redirects to another host"),
        ({"redirects": {WEIGHTS: "https://evil.example/x"}}, "redirects to another host"),
        ({"redirects": {WEIGHTS: "file:///etc/passwd"}}, "redirects to another host"),
        ({"redirects": {WEIGHTS: "http://[x"}}, "redirects to no address"),
        ({"redirects": {WEIGHTS: WEIGHTS}}, "redirects too often"),
    ],
    ids=lambda one: str(one)[:60],
)
async def test_failures_may_be_repeated_later(
    files: dict[str, bytes], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    async with fetching(tmp_path, Repository(files, **change)) as hub:
        refusal = await hub.refusal(token=TOKEN)
        assert isinstance(refusal, AdapterUnavailable)
        assert message in str(refusal)
        seconds = 17 if "429" in message else 1
        assert refusal.retry_after_seconds == seconds
        hub.stub.repositories["org/a"] = Repository(files)
        count = len(hub.stub.asked)
        assert str(await hub.refusal(token=TOKEN)) == str(refusal)
        assert len(hub.stub.asked) == count
        hub.clock.now += seconds
        assert (await hub.fetch(token=TOKEN)).digest


async def test_a_redirect_within_the_hub_is_followed(
    files: dict[str, bytes], tmp_path: Path
) -> None:
    repository = Repository({**files, "other": files[WEIGHTS]}, redirects={WEIGHTS: "other"})
    async with fetching(tmp_path, repository) as hub:
        assert (await hub.fetch(token=TOKEN)).digest
        assert {token for _, token in hub.stub.asked} == {f"Bearer {TOKEN}"}


@pytest.mark.parametrize(
    ("endpoint", "location", "gets_token"),
    [
        ("https://huggingface.co", "/x", True),
        ("https://huggingface.co", "https://huggingface.co:443/x", True),
        ("https://huggingface.co", "https://cdn-lfs.hf.co/x", False),
        ("https://huggingface.co", "https://cas-bridge.xethub.hf.co/x", False),
        ("https://huggingface.co", "https://cdn-lfs-us-1.huggingface.co/x", False),
        ("https://mirror.example", "https://files.mirror.example/x", False),
        ("https://huggingface.co", "http://huggingface.co/x", None),
        ("https://huggingface.co", "http://cdn-lfs.hf.co/x", None),
        ("https://huggingface.co", "https://cdn-lfs.hf.co:8443/x", None),
        ("https://huggingface.co", "https://hf.co.evil.example/x", None),
        ("https://huggingface.co", "https://evilhf.co/x", None),
        ("https://huggingface.co", "https://huggingface.co@evil.example/x", None),
        ("https://huggingface.co", "//evil.example/x", None),
        ("https://huggingface.co", "https://169.254.169.254/latest", None),
        ("https://huggingface.co", "https://localhost/x", None),
        ("http://127.0.0.1:80", "http://127.0.0.1:81/x", None),
        ("https://huggingface.co", "ftp://huggingface.co/x", None),
        ("https://huggingface.co", "https://huggingface.co:99999/x", None),
    ],
)
def test_redirects_keep_the_token_only_within_the_hub(
    endpoint: str, location: str, *, gets_token: bool | None
) -> None:
    hub = Hub(endpoint, TOKEN)
    if gets_token is None:
        with pytest.raises(Unavailable):
            hub.redirect(f"{endpoint}/y", location)
        return
    target = hub.redirect(f"{endpoint}/y", location)
    assert ("authorization" in hub.headers_for(target)) == gets_token


def test_a_hub_that_does_not_answer_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="does not answer"):
        Hub("http://127.0.0.1:1").commit_of("org/a", None)


def children() -> list[Path]:
    """Processes that this one started."""
    processes = []
    for task in Path("/proc/self/task").iterdir():
        processes += [Path("/proc") / pid for pid in (task / "children").read_text().split()]
    return processes


async def test_no_token_is_left_anywhere(
    files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's token is in no argument, variable, log line or error, and the server's never reaches the process."""
    monkeypatch.setenv("HF_TOKEN", SERVER_TOKEN)
    monkeypatch.setenv("HUGGING_FACE_HUB_TOKEN", SERVER_TOKEN)
    repository = Repository(files, tokens={TOKEN}, status=500)
    with structlog.testing.capture_logs() as logs:
        async with fetching(tmp_path, repository) as hub:
            hub.stub.gate.clear()
            running = asyncio.create_task(hub.refusal(token=TOKEN))
            await hub.stub.arrived.wait()
            (child,) = [one for one in children() if b"fetching" in (one / "cmdline").read_bytes()]
            for name in ("cmdline", "environ"):
                text = (child / name).read_bytes()
                assert TOKEN.encode() not in text
                assert SERVER_TOKEN.encode() not in text
            hub.stub.gate.set()
            await running
            assert hub.stub.asked == [("/api/models/org/a/revision/main", f"Bearer {TOKEN}")]
            hub.clock.now += 60
            repository.status = 200
            await hub.fetch(token=TOKEN)
    assert logs
    assert TOKEN not in repr(AdapterReference(name="org/a", token=TOKEN))
    assert TOKEN not in repr(logs)
    for folder, _, names in os.walk(tmp_path):
        for name in names:
            assert TOKEN.encode() not in (Path(folder) / name).read_bytes()
