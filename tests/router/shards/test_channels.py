"""Channels to real servers, with and without TLS."""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
import trustme

from millrace_proto import generate_pb2 as pb
from millrace_proto import generate_pb2_grpc as pb_grpc
from millrace_router.config import RouterConfig
from millrace_router.shards.channels import TlsError, is_exposed, tls_from
from millrace_router.shards.client import from_grpc
from millrace_router.shards.errors import ShardLost
from millrace_router.shards.group import ShardGroup
from millrace_router.shards.step_channel import StepChannel
from millrace_router.start.running import start
from millrace_router.start.shards import StartupError
from millrace_testing.launcher.deployment import Certificate, certificate
from millrace_testing.shards.fake_shard import FakeShard, FakeShardService
from millrace_testing.shards.hash_tokens import VOCAB_SIZE


def config(**given: Any) -> RouterConfig:
    return RouterConfig(**{"model_folder": Path("model")} | given)


def flags(files: Certificate) -> dict[str, Path]:
    return {
        "shard_tls_cert": files.cert,
        "shard_tls_key": files.key,
        "shard_tls_ca": files.ca,
    }


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def port(tmp_path: Path, authority: trustme.CA) -> Iterator[int]:
    """A shard that requires certificates of `authority`, and has one for localhost only."""
    files = certificate(tmp_path, "shard", "localhost", authority=authority)
    credentials = grpc.ssl_server_credentials(
        [(files.key.read_bytes(), files.cert.read_bytes())],
        root_certificates=files.ca.read_bytes(),
        require_client_auth=True,
    )
    server = grpc.server(ThreadPoolExecutor(2))
    pb_grpc.add_ShardServiceServicer_to_server(FakeShardService(FakeShard()), server)
    number = server.add_secure_port("localhost:0", credentials)
    server.start()
    yield number
    server.stop(grace=None).wait()


async def reaches(target: str, files: Certificate | None) -> bool:
    """Whether a router with this certificate gets an answer from the shard."""
    tls = tls_from(config(**flags(files))) if files else None
    shards = StepChannel(ShardGroup([target], tls))
    try:
        # Health fails with the connection; Info would wait for a shard that starts later.
        await shards.group.health()
        return (await shards.group.info()).vocab_size == VOCAB_SIZE
    except ShardLost:
        return False
    finally:
        await shards.close()


async def test_a_router_with_a_certificate_reaches_its_shard(
    port: int, tmp_path: Path, authority: trustme.CA
) -> None:
    mine = certificate(tmp_path, "router", authority=authority)
    assert await reaches(f"localhost:{port}", mine)


async def test_shards_are_not_reached_without_matching_certificates(
    port: int, tmp_path: Path, authority: trustme.CA
) -> None:
    stranger = certificate(tmp_path, "stranger", trusts=authority)
    assert not await reaches(f"localhost:{port}", None)
    assert not await reaches(f"localhost:{port}", stranger)


async def test_shards_of_another_authority_or_name_are_refused(
    port: int, tmp_path: Path, authority: trustme.CA
) -> None:
    doubter = certificate(tmp_path, "doubter", authority=authority, trusts=trustme.CA())
    mine = certificate(tmp_path, "router", authority=authority)
    assert not await reaches(f"localhost:{port}", doubter)
    assert not await reaches(f"127.0.0.1:{port}", mine)


async def test_unix_sockets_are_used_without_tls_for_any_configuration(tmp_path: Path) -> None:
    mine = certificate(tmp_path, "router")
    server = grpc.server(ThreadPoolExecutor(2))
    pb_grpc.add_ShardServiceServicer_to_server(FakeShardService(FakeShard()), server)
    target = f"unix:{tmp_path}/shard"
    server.add_insecure_port(target)
    server.start()
    try:
        assert await reaches(target, mine)
    finally:
        server.stop(grace=None).wait()


@pytest.mark.parametrize("given", ["shard_tls_cert", "shard_tls_key", "shard_tls_ca"])
def test_tls_needs_all_three_files_or_none(given: str, tmp_path: Path) -> None:
    with pytest.raises(TlsError, match="--shard-tls-") as refused:
        tls_from(config(**{given: tmp_path / "x"}))
    assert "--" + given.replace("_", "-") not in str(refused.value)
    assert tls_from(config()) is None


async def test_the_start_fails_with_files_that_do_not_belong_together(tmp_path: Path) -> None:
    one, other = certificate(tmp_path, "one"), certificate(tmp_path, "other")
    model = Path(__file__).parents[3] / "demo" / "model"
    wrong = flags(Certificate(one.cert, other.key, one.ca))
    with pytest.raises(StartupError, match="cannot be used for TLS"):
        await start(config(model_folder=model, **wrong))


async def test_a_router_that_is_refused_logs_it_while_it_waits(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace_router.start.shards.INFO_SECONDS", 0.01)
    model = Path(__file__).parents[3] / "demo" / "model"
    with structlog.testing.capture_logs() as logs:
        starting = asyncio.create_task(
            start(config(model_folder=model, shard_addresses=(f"localhost:{port}",)))
        )
        while not any(line["event"] == "Waiting for the shards" for line in logs):
            await asyncio.wait([starting], timeout=0.01)
            assert not starting.done()
        starting.cancel()
        await asyncio.wait([starting])
    assert next(line for line in logs if line["event"] == "Waiting for the shards")["error"]


@pytest.mark.parametrize(
    ("address", "exposed"),
    [
        ("unix:/tmp/x", False),
        ("127.0.0.1:1", False),
        ("[::1]:1", False),
        ("localhost:1", False),
        ("shard-0:1", True),
        ("10.1.1.1:1", True),
    ],
)
def test_only_plain_connections_to_other_hosts_are_exposed(address: str, exposed: bool) -> None:
    assert is_exposed(address, None) is exposed
    assert not is_exposed(address, grpc.ssl_channel_credentials())


PROGRAM = """
import os, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            print(os.environ.get("GRPC_ENABLE_FORK_SUPPORT"))
sys.meta_path.insert(0, Finder())
import millrace_router.serving
"""


def test_the_setting_is_there_when_grpc_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRPC_ENABLE_FORK_SUPPORT", raising=False)
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["0"]


class BreaksInWrites:
    """A call's core whose connection breaks while a message is sent."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    async def send_serialized_message(self, _: bytes) -> None:
        core: Any = importlib.import_module("grpc._cython.cygrpc")
        raise core.InternalError("a batch failed")


async def test_a_shard_is_lost_if_its_connection_breaks_while_a_message_is_sent() -> None:
    """`grpc.aio` has the code of a servicer's error for that; after one, no KV would be kept."""
    server = grpc.server(ThreadPoolExecutor(2))
    pb_grpc.add_ShardServiceServicer_to_server(FakeShardService(FakeShard()), server)
    number = server.add_insecure_port("localhost:0")
    server.start()
    async with grpc.aio.insecure_channel(f"localhost:{number}") as channel:
        call: Any = pb_grpc.ShardServiceStub(channel).Steps()
        await call.wait_for_connection()
        call._cython_call = BreaksInWrites(call._cython_call)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.write(pb.StepRequest())
    server.stop(None)
    assert caught.value.code() == grpc.StatusCode.INTERNAL
    assert isinstance(from_grpc(caught.value), ShardLost)
