"""A shard and a router of their own processes, over TCP, as an operator starts them on two hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer

import grpc
import httpx
import pytest
import trustme

from millrace_proto import generate_pb2 as pb
from millrace_proto import generate_pb2_grpc as pb_grpc
from millrace_testing.launcher.deployment import Certificate, certificate, kept_port
from millrace_testing.launcher.e2e import ROOT

MODEL = ROOT / "demo" / "model"
SECONDS = 90.0


@contextmanager
def program(module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line_with(process: subprocess.Popen[str], words: str) -> str:
    """The next line of its output that has them; one that does not come ends the process."""
    assert process.stdout is not None
    seen = []
    timer = Timer(SECONDS, process.kill)
    timer.start()
    try:
        for line in process.stdout:
            seen.append(line)
            if words in line:
                return line
    finally:
        timer.cancel()
    raise AssertionError("".join(seen))


def flags(prefix: str, files: Certificate) -> tuple[str, ...]:
    return (f"{prefix}-cert={files.cert}", f"{prefix}-key={files.key}", f"{prefix}-ca={files.ca}")


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def address(tmp_path: Path, authority: trustme.CA) -> Iterator[str]:
    """The address of a shard that serves the demo model to routers of `authority`."""
    files = certificate(tmp_path, "shard", "localhost", authority=authority)
    with kept_port() as port:
        address = f"localhost:{port}"
        serve = ("serve", str(MODEL), f"--address={address}", "--device=cpu", "--cpu-threads=1")
        with program("millrace_shard", *serve, *flags("--tls", files)) as shard:
            line_with(shard, f"Server started at {address}")
            yield address


def test_a_shard_serves_only_its_router_over_tls(
    address: str, tmp_path: Path, authority: trustme.CA
) -> None:
    stranger = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    for channel in (grpc.insecure_channel(address), grpc.secure_channel(address, stranger)):
        with channel, pytest.raises(grpc.RpcError) as refused:
            pb_grpc.ShardServiceStub(channel).Info(pb.InfoRequest(), timeout=SECONDS)
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    files = certificate(tmp_path, "router", authority=authority)
    serve = ("--hostname=127.0.0.1", "--port=0", f"--shard-addresses={address}")
    with program(
        "millrace_router", f"--model-folder={MODEL}", *serve, *flags("--shard-tls", files)
    ) as router:
        url = line_with(router, "Connected").rpartition("url=")[2].strip()
        body = {"inputs": "The cat", "parameters": {"max_new_tokens": 3, "details": True}}
        answer = httpx.post(f"{url}/generate", json=body, timeout=SECONDS)
    assert answer.status_code == 200
    assert answer.json()["details"]["generated_tokens"] == 3
