"""Access to a shard at a TCP address: a real server, and clients with all kinds of certificates."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
import trustme

from millrace_proto import generate_pb2 as pb
from millrace_proto import generate_pb2_grpc as pb_grpc
from millrace_shard.__main__ import main
from millrace_shard.config import ShardConfig
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.engine.engine import Engine
from millrace_shard.engine.loaded_model import LoadedModel
from millrace_shard.engine.warmup import MemoryLimits
from millrace_shard.server.address import (
    CredentialsError,
    SocketFile,
    SocketTaken,
    for_this_user_only,
    is_local,
    server_credentials,
)
from millrace_shard.server.service import ShardService, new_server
from millrace_testing.engines.fake_engine import BLOCK_SIZE, VOCAB_SIZE, FakeModel, fake_kernels
from millrace_testing.launcher.deployment import Certificate, certificate
from millrace_testing.shards.ranks import Forked

SECONDS = 60.0


def config(address: str | None, **other: Any) -> ShardConfig:
    return ShardConfig(model_folder=Path("model"), address=address, **other)


def with_tls(files: Certificate, address: str = "localhost:0") -> ShardConfig:
    return config(address, tls_cert=files.cert, tls_key=files.key, tls_ca=files.ca)


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def port(tmp_path: Path, authority: trustme.CA) -> Iterator[int]:
    """A shard with a certificate of `authority`."""
    engine = Engine(
        limits=MemoryLimits(kv_memory=64 * BLOCK_SIZE * 8),
        device=torch.device("cpu"),
        cpu_threads=1,
    )
    engine.attach(
        LoadedModel(
            model=FakeModel(),
            kernels=fake_kernels(),
            group=ProcessGroup.single(),
            device=torch.device("cpu"),
            dtype=torch.float32,
        )
    )
    engine.start()
    service = ShardService(engine, deterministic=True, prefill_logprobs=False, end=lambda: None)
    files = certificate(tmp_path, "shard", "localhost", authority=authority)
    credentials = server_credentials(with_tls(files))
    assert credentials is not None
    server = new_server(service, "localhost:0", credentials)
    # A second listener of the same server says which port is free.
    port = server.add_secure_port("localhost:0", credentials)
    server.start()
    yield port
    server.stop(grace=None).wait(SECONDS)
    engine.close()


def ask(target: str, credentials: grpc.ChannelCredentials | None) -> pb.InfoResponse:
    """Make one call with these certificates."""
    channel = (
        grpc.insecure_channel(target)
        if credentials is None
        else grpc.secure_channel(target, credentials)
    )
    with channel:
        answer: pb.InfoResponse = pb_grpc.ShardServiceStub(channel).Info(
            pb.InfoRequest(), timeout=SECONDS
        )
        return answer


def papers(files: Certificate) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        files.ca.read_bytes(), files.key.read_bytes(), files.cert.read_bytes()
    )


def test_a_client_of_the_same_authority_is_served(
    port: int, tmp_path: Path, authority: trustme.CA
) -> None:
    client = certificate(tmp_path, "router", authority=authority)
    assert ask(f"localhost:{port}", papers(client)).vocab_size == VOCAB_SIZE


@pytest.mark.parametrize(
    "wrong",
    [
        lambda folder, ca: None,
        lambda folder, ca: grpc.ssl_channel_credentials(ca.cert_pem.bytes()),
        lambda folder, ca: papers(certificate(folder, "stranger", trusts=ca)),
        lambda folder, ca: papers(
            certificate(folder, "doubter", authority=ca, trusts=trustme.CA())
        ),
    ],
    ids=["plain", "no certificate", "another authority", "does not trust the shard"],
)
def test_other_clients_are_refused(
    port: int,
    tmp_path: Path,
    authority: trustme.CA,
    wrong: Callable[[Path, trustme.CA], grpc.ChannelCredentials | None],
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        ask(f"localhost:{port}", wrong(tmp_path, authority))
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1:1", True),
        ("127.8.8.8:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("unix:/tmp/x", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.1:1", False),
        ("shard-0:1", False),
        ("localhost.example.com:1", False),
    ],
)
def test_only_addresses_of_this_host_need_no_tls(address: str, local: bool) -> None:
    assert is_local(address) is local
    if local:
        assert server_credentials(config(address)) is None
    else:
        with pytest.raises(CredentialsError, match="can be reached from other hosts"):
            server_credentials(config(address))
        assert server_credentials(config(address, allow_insecure_tcp=True)) is None


def test_a_unix_socket_needs_no_certificate() -> None:
    assert server_credentials(config(None)) is None


@pytest.mark.parametrize("given", ["tls_cert", "tls_key", "tls_ca"])
def test_tls_needs_all_three_files_or_none(given: str, tmp_path: Path) -> None:
    with pytest.raises(CredentialsError, match="--tls-") as refused:
        server_credentials(config("localhost:1", **{given: tmp_path / "x"}))
    assert "--" + given.replace("_", "-") not in str(refused.value)


def test_tls_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    one, other = certificate(tmp_path, "one"), certificate(tmp_path, "other")
    with pytest.raises(CredentialsError, match="cannot be used for TLS"):
        server_credentials(with_tls(Certificate(one.cert, other.key, one.ca)))
    with pytest.raises(CredentialsError, match="cannot be used for TLS"):
        server_credentials(with_tls(Certificate(one.cert, one.key, tmp_path / "absent")))


def test_the_program_refuses_before_it_loads_anything(tmp_path: Path) -> None:
    shard = Forked(main, ["serve", str(tmp_path / "absent"), "--address=0.0.0.0:0"])
    try:
        output = shard.communicate(SECONDS)
        assert shard.returncode == 1
    finally:
        shard.end()
    assert "--allow-insecure-tcp" in output
    assert "absent" not in output


@contextmanager
def listening(path: Path) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        yield


def test_a_socket_that_answers_is_kept_and_named(tmp_path: Path) -> None:
    path = tmp_path / "shard-0"
    mine = SocketFile(path)
    with listening(path), listening(mine.private):
        inode = path.stat().st_ino
        with pytest.raises(SocketTaken, match=rf"another process listens at {path}"):
            mine.check_free()
        with pytest.raises(SocketTaken):
            mine.publish()
        mine.remove()
        assert path.stat().st_ino == inode
        assert not mine.private.exists()


def test_a_socket_left_behind_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "shard-0"
    with listening(path):
        pass
    mine = SocketFile(path)
    mine.check_free()
    with listening(mine.private):
        mine.publish()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
        mine.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_successors_socket_is_kept_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "shard-0"
    mine = SocketFile(path)
    with listening(mine.private):
        mine.publish()
        successor = tmp_path / "new"
        with listening(successor):
            successor.rename(path)
            mine.remove()
            assert path.exists()


def test_a_file_that_is_not_a_socket_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "shard-0"
    path.write_text("mine")
    with pytest.raises(SocketTaken, match="is not a socket"):
        SocketFile(path).check_free()
    assert path.read_text() == "mine"


def test_no_other_user_reaches_a_shard_with_any_umask(tmp_path: Path) -> None:
    """gRPC creates the socket with the umask's mode."""
    mine = SocketFile(tmp_path / "shard-0")
    server = grpc.server(ThreadPoolExecutor(1))
    before = os.umask(0)
    try:
        with for_this_user_only():
            server.add_insecure_port(f"unix:{mine.private}")
        assert stat.S_IMODE(mine.private.stat().st_mode) == 0o600
        server.start()
        mine.publish()
        assert stat.S_IMODE(mine.path.stat().st_mode) == 0o600
        assert os.umask(0) == 0
    finally:
        os.umask(before)
        server.stop(grace=None).wait()
        mine.remove()
