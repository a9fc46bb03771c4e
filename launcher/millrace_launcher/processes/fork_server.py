"""Shards of one rank that are forks of a process which has loaded the model.

That process, the fork server, ends with the launcher, and its forks end with it. The launcher requests a fork with a
message that carries the shard's stdout, stderr and a pipe to which it writes once it serves, and says what becomes of
the KV of the shard before. A shard that cannot be forked, on a GPU for example, is the started process itself: it
answers no message, and ends by itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from millrace_launcher.logs import log
from millrace_launcher.processes.children import Children, error_log
from millrace_launcher.processes.process import READ_BYTES, ManagedProcess, kill_group
from millrace_launcher.settings.commands import Command

FORK_SECONDS = 2.0
"""Time for a server that has loaded its model to fork, or to report an end; one that needs longer is killed."""


KV = Literal["keep", "new", "none"]
"""A fork has the KV of the one before, or its KV is kept for the next one, or neither."""


class ForkServer:
    """The process that has loaded the model of a rank, or loads it."""

    def __init__(self, process: ManagedProcess, ours: socket.socket, children: Children) -> None:
        self.process = process
        self.has_loaded = False
        self.settled = asyncio.Event()
        """Set once it has loaded, or will not fork."""
        self._socket = ours
        self._children = children
        self._shard: ForkedProcess | None = None
        asyncio.get_running_loop().add_reader(ours, self._read)

    @classmethod
    async def start(cls, command_of: Callable[[int], Command], children: Children) -> ForkServer:
        """Start the command, which inherits a socket."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(0)
        with theirs:
            process = await children.start(command_of(theirs.fileno()))
        return cls(process, ours, children)

    async def fork(self, kv: KV) -> ForkedProcess:
        """Request a shard, which starts once the model is loaded; the last one has ended."""
        self._shard = shard = await ForkedProcess.request(self, self._socket, kv)
        return shard

    def _read(self) -> None:
        try:
            message = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self.settled.set()
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            return
        match json.loads(message):
            case {"event": "loaded"}:
                self.has_loaded = True
                self.settled.set()
            case {"event": "alone"}:
                self.settled.set()
            case {"event": "forked", "pid": int(pid)} if self._shard is not None:
                self._shard.forked(pid)
                self._children.adopt(self._shard)
            case {"event": "ended", "pid": int(pid), "status": int(status)}:
                kill_group(pid)
                if self._shard is not None:
                    self._shard.ended(pid, status)


class ForkedProcess(ManagedProcess):
    """A shard: a fork of its server, or the server itself as long as that has not forked it."""

    def __init__(
        self,
        server: ForkServer,
        streams: tuple[asyncio.StreamReader, asyncio.StreamReader],
        serves: asyncio.StreamReader,
    ) -> None:
        self._server = server
        self._pid: int | None = None
        self._code: int | None = None
        name = server.process.name
        super().__init__(name, *streams, on_error_line=error_log(name))
        self._tasks = [asyncio.create_task(self._end_with_server())]
        self._tasks.append(asyncio.create_task(self._report(serves)))
        if server.has_loaded:
            self._tasks.append(asyncio.create_task(self._expect_fork()))

    @classmethod
    async def request(cls, server: ForkServer, control: socket.socket, kv: KV) -> ForkedProcess:
        """Ask `server` for a fork over `control`."""
        loop = asyncio.get_running_loop()
        readers, ends = [], []
        for _ in range(3):
            ours, theirs = os.pipe()
            ends.append(theirs)
            reader = asyncio.StreamReader(READ_BYTES)
            protocol = asyncio.StreamReaderProtocol(reader)
            await loop.connect_read_pipe(lambda: protocol, os.fdopen(ours, "rb", 0))  # noqa: B023
            readers.append(reader)
        # A server that has just died is reported as the shard's end.
        with suppress(OSError):
            message = json.dumps({"event": "fork", "kv": kv}).encode()
            socket.send_fds(control, [message], ends)
        for end in ends:
            os.close(end)
        stdout, stderr, serves = readers
        return cls(server, (stdout, stderr), serves)

    @property
    def pid(self) -> int:
        return self._server.process.pid if self._pid is None else self._pid

    @property
    def exit_code(self) -> int | None:
        return self._code

    def forked(self, pid: int) -> None:
        """Record that it lives as `pid`."""
        self._pid = pid

    def ended(self, pid: int, status: int) -> None:
        """Record the end of the fork `pid`."""
        if pid == self._pid:
            self._end(status)

    def kill(self) -> None:
        if not self.is_running:
            return
        if self._pid is None:
            self._server.process.kill()
        else:
            kill_group(self._pid)
            self._tasks.append(asyncio.create_task(self._expect_end()))

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def _end(self, code: int) -> None:
        if self._code is None:
            self._code = code
            self._exited.set()
            for task in self._tasks:
                if task is not asyncio.current_task():
                    task.cancel()

    async def _report(self, serves: asyncio.StreamReader) -> None:
        if await serves.read(1):
            self.serves.set()

    async def _expect_fork(self) -> None:
        await asyncio.sleep(FORK_SECONDS)
        if self._pid is None:
            log.warning("%s does not fork, and starts anew", self.name)
            self._server.process.kill()

    async def _expect_end(self) -> None:
        """A server that hangs does not report the end of its fork, and ends, too."""
        await asyncio.sleep(FORK_SECONDS)
        self._server.process.kill()

    async def _end_with_server(self) -> None:
        """A fork is killed with its server; a server that ends without a fork is the shard, with its last words."""
        process = self._server.process
        code = await process.wait()
        if self._pid is None:
            self.lines.drop()
            self.lines, self._tail = process.lines, process._tail  # noqa: SLF001 - one process
            self._end(code)
        else:
            log.warning("%s was killed with the process that it was forked of", self.name)
            self._end(-signal.SIGKILL)


class ShardStarts:
    """Starts the shards of a rank, in the way of `--fork-server`."""

    def __init__(self, children: Children, how: Literal["auto", "weights", "off"]) -> None:
        self._children = children
        self._how = how
        self._server: ForkServer | None = None
        self._next: ForkServer | None = None
        """Loads the model anew while shards of the first one serve."""

    @property
    def loaded_bytes(self) -> int | None:
        """Memory of the loaded model; None where no shards are forked."""
        if self._server is None or not self._server.has_loaded:
            return None
        return private_bytes(self._server.process.pid)

    async def load_anew(self, command_of: Callable[[int | None], Command]) -> bool:
        """Load the model a second time; return whether `swap` may let the next shards be forks of that."""
        self._next = await ForkServer.start(command_of, self._children)
        await self._next.settled.wait()
        return self._next.has_loaded

    async def swap(self) -> None:
        """End the first fork server, whose shard has ended, for the one that `load_anew` has started."""
        following, self._next = self._next, None
        await self.go_cold()
        self._server = following

    async def start(
        self, command_of: Callable[[int | None], Command], *, keep_kv: bool
    ) -> ManagedProcess:
        """Start a shard; `command_of` has the descriptor that a fork server inherits, or None for a plain shard.

        With `keep_kv` a fork may go on with the KV of the one before.
        """
        if self._how == "off":
            return await self._children.start(command_of(None))
        if self._server is None or not self._server.process.is_running:
            self._server = await ForkServer.start(command_of, self._children)
        kept: KV = "keep" if keep_kv else "new"
        return await self._server.fork("none" if self._how == "weights" else kept)

    async def go_cold(self) -> None:
        """End the fork server, so that the next shard loads the model."""
        servers, self._server, self._next = (self._server, self._next), None, None
        await asyncio.gather(*map(_end, servers))

    async def give_up_anew(self) -> None:
        """End the fork server that `load_anew` has started."""
        following, self._next = self._next, None
        await _end(following)


async def _end(server: ForkServer | None) -> None:
    if server is not None:
        server.process.kill()
        await server.process.wait()


def private_bytes(pid: int) -> int:
    """Return the memory of a process that is no file's; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields.get("RssAnon", "0 kB").split()[0]) << 10
