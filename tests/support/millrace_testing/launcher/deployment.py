"""A launcher with fake children, under a test's control."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import trustme

from millrace_testing.launcher import fake_launcher


@contextmanager
def kept_port() -> Iterator[int]:
    """A port of 127.0.0.1 that the kernel gives to no other process during the block.

    A server can listen on it if it sets SO_REUSEADDR, as Millrace's do; until then connections are refused.
    """
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", 0))
        yield int(keeper.getsockname()[1])


LAUNCHER = str(Path(fake_launcher.__file__))
SERVED = "is served at"
GONE_SECONDS = 60


@dataclass
class Deployment:
    process: asyncio.subprocess.Process
    folder: Path
    port: int
    output: str = ""

    async def until(self, text: str, times: int = 1) -> None:
        """Read its log until it has `text` the given number of times."""
        assert self.process.stdout is not None
        async with asyncio.timeout(300.0):
            while self.output.count(text) < times:
                line = await self.process.stdout.readline()
                assert line, f"ended before {text!r}:\n{self.output}"
                self.output += line.decode()

    async def end(self) -> tuple[int, str]:
        """Exit code and stderr."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        rest, errors = await asyncio.gather(self.process.stdout.read(), self.process.stderr.read())
        self.output += rest.decode()
        return await self.process.wait(), errors.decode()

    def pid(self, name: str) -> int:
        return int((self.folder / f"{name}.pid").read_text())

    def lives(self, name: str) -> list[int]:
        """Process ids, oldest first."""
        return [int(line) for line in (self.folder / f"{name}.lives").read_text().split()]

    def heard(self) -> list[dict[str, object]]:
        """Events from the launcher to the routers."""
        marks = [event.partition("router heard ") for event in self.events()]
        return [json.loads(text) for _, mark, text in marks if mark]

    async def tell(self, text: str) -> None:
        """Let the router send `text` to the launcher."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(f"POST / HTTP/1.0\r\nContent-Length: {len(text) + 1}\r\n\r\n{text}\n".encode())
        assert b" 200 " in await reader.readline()
        writer.close()

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def events(self) -> list[str]:
        path = self.folder / "events"
        return path.read_text().splitlines() if path.exists() else []

    def sockets(self) -> list[Path]:
        return list(self.folder.glob("shard.sock-*"))

    async def assert_gone(self, family: list[psutil.Process]) -> None:
        _, alive = await asyncio.to_thread(psutil.wait_procs, family, GONE_SECONDS)
        assert alive == []
        assert self.sockets() == []


@asynccontextmanager
async def deploy(folder: Path, *flags: str, **environment: str) -> AsyncIterator[Deployment]:
    """The launcher in its own session during the block; `FAKE_TERMINAL` is the descriptor of its terminal."""
    with kept_port() as port:
        paths = os.pathsep.join(path for path in sys.path if path)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            LAUNCHER,
            "--model-id=some/model",
            "--hostname=127.0.0.1",
            f"--port={port}",
            f"--shard-uds-path={folder}/shard.sock",
            *flags,
            env={**os.environ, "PYTHONPATH": paths, "FAKE_DIR": str(folder), **environment},
            stdin=int(environment.get("FAKE_TERMINAL", asyncio.subprocess.DEVNULL)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        deployment = Deployment(process, folder, port)
        try:
            yield deployment
        finally:
            if process.returncode is None:
                process.kill()
                await deployment.end()


@dataclass(frozen=True, slots=True)
class Certificate:
    """One party's files: its certificate and key, and the authority it trusts."""

    cert: Path
    key: Path
    ca: Path


def certificate(
    folder: Path,
    name: str,
    *names: str,
    authority: trustme.CA | None = None,
    trusts: trustme.CA | None = None,
) -> Certificate:
    """A certificate for `names`, signed by `authority` or by a new one; it trusts the same authority."""
    authority = authority or trustme.CA()
    issued = authority.issue_cert(*names or ("localhost",))
    files = Certificate(*(folder / f"{name}-{part}.pem" for part in ("cert", "key", "ca")))
    files.cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    files.key.write_bytes(issued.private_key_pem.bytes())
    (trusts or authority).cert_pem.write_to_path(str(files.ca))
    return files
