"""The command `fork-server`: loads the model once, and forks a shard whenever the launcher requests one.

A shard that died is back without imports and without weights to read, which are the memory of this process, shared
copy on write: no wild write of a shard reaches them. This process itself computes nothing, and has neither an object of
gRPC nor a second thread while it forks, since a fork has only the thread that made it.

The launcher sends a message with three descriptors for each shard: its stdout, its stderr, and a pipe to which the
shard writes a byte once it serves. In the message, a `kv` of `keep` says that the shard goes on with the KV of the one
before. Otherwise the memory of that is freed, and the KV of the new shard is kept (`new`) or not (`none`). This process
answers with JSON: `loaded` once, `forked` with the process id, and `ended` with the process id and `status`, negative
for a signal. Where forks are not possible it answers `alone`, and serves by itself once a shard is requested.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import select
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from millrace_proto.cores import usable_cores
from millrace_shard.commands.chosen_kernels import needs_group
from millrace_shard.commands.composition import (
    check_files,
    connect,
    load_parts,
    with_folders,
    with_grammars,
)
from millrace_shard.commands.device_settings import choose_device
from millrace_shard.commands.serve import (
    check_address,
    end_after,
    notices,
    run_command,
    serve,
    serve_loaded,
)
from millrace_shard.config import ShardConfig
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.engine.loaded_model import LoadedModel
from millrace_shard.kernels.kv_store import KVStore
from millrace_shard.logs import configure
from millrace_shard.process import Stages, die_with_parent
from millrace_shard.structured_output.vocabulary import Vocabulary
from millrace_shard.weights.packed_weights import KEEPING

COMMAND, SHARD_COMMAND = b"fork-server", b"serve"
DESCRIPTION = (
    "Load a model once, and fork shards of it when the launcher asks; for the launcher's use."
)
ARGUMENTS_FIELD = 45
"""The address of a process's arguments among the fields of /proc/PID/stat behind its name."""
MESSAGE_BYTES = 4096
NUM_DESCRIPTORS = 3

T = TypeVar("T")
logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Fork shards until the launcher closes its socket; end as `serve` does after an error of loading."""
    run_command(argv, _run, command=COMMAND.decode(), description=DESCRIPTION)


def _run(config: ShardConfig, stages: Stages) -> None:
    device, fd = choose_device(config), config.launcher_fd
    if fd is None or not _can_fork(config, device):
        _await_request(fd)
        serve(config, stages)
        return
    for notice in notices(config):
        logger.info("%s", notice)
    if _is_requested(fd):
        # Before that, the shard of another fork server may have the address.
        check_address(config)
    config = with_folders(config)
    check_files(config)
    group = ProcessGroup(config.rank, config.world_size, device)
    server = _ForkServer(
        config, *_in_thread(config, lambda: load_parts(config, device, group, stages))
    )
    if problem := unclean():
        logger.warning("shards are not forked, and each start loads the model: %s", problem)
        _await_request(fd)
        server.serve()
        return
    server.run(fd)


def _is_requested(fd: int, seconds: float | None = 0.0) -> bool:
    """Whether the launcher has requested a shard on the socket `fd`, or does within `seconds`; None: without limit."""
    return bool(select.select([fd], [], [], seconds)[0])


def _await_request(fd: int | None) -> None:
    """Report that this process does not fork, and wait until it is to serve."""
    if fd is not None:
        with socket.socket(fileno=os.dup(fd)) as control:
            _send(control, event="alone")
        _is_requested(fd, None)


def _can_fork(config: ShardConfig, device: torch.device) -> bool:
    """Whether forks of the loaded model can compute: no device's memory survives one, nor does a group that has met."""
    if device.type != "cpu" or sys.platform != "linux":
        return False
    # An unlisted class checks itself on all ranks.
    return config.world_size == 1 or not (config.allow_unlisted_model or needs_group(config))


def _in_thread(config: ShardConfig, call: Callable[[], T]) -> T:
    """Run `call` in a thread that ends: libgomp hangs in a fork of the thread that ran a parallel region."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        torch.set_num_threads(config.cpu_threads or max(1, usable_cores() // config.world_size))
        try:
            with torch.inference_mode():
                results.append(call())
        except BaseException as error:  # noqa: BLE001 - it is raised again below
            errors.append(error)

    thread = threading.Thread(target=run, name="load")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def unclean() -> str | None:
    """Why a fork of this process would not work; None if it would."""
    # It writes files, and a fork needs nothing of it.
    others = [
        thread.name
        for thread in threading.enumerate()
        if thread is not threading.main_thread() and thread.name not in (KEEPING, "log")
    ]
    if others:
        return f"threads are running: {', '.join(others)}"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "CUDA is initialised"
    if dist.is_initialized():
        return "the process group is connected"
    if any(_is_of_grpc(type(each)) for each in gc.get_objects()):
        return "gRPC is in use"
    return None


def _is_of_grpc(kind: type) -> bool:
    """Whether objects of `kind` have threads of gRPC; `isinstance` would import what is loaded late."""
    # Of some types it is a property.
    module: object = kind.__module__
    is_grpc = isinstance(module, str) and module.startswith("grpc.")
    return is_grpc and kind.__name__ in ("Channel", "_Server")


class _ForkServer:
    """Forks of a loaded model."""

    def __init__(
        self, config: ShardConfig, loaded: LoadedModel, vocabulary: Vocabulary | None
    ) -> None:
        self._config = config
        self._loaded = loaded
        self._vocabulary = vocabulary
        self._pids: dict[int, int] = {}
        """Running shards, by the descriptors that report their end."""
        self._kv: int | None = None
        """The file in memory with the KV of the last shard."""

    def serve(self, when_serving: Callable[[], None] = lambda: None) -> None:
        """Serve in this process."""
        serve_loaded(self._config, self._loaded.device, self._connected, when_serving)

    def run(self, fd: int) -> None:
        """Fork at each message on the socket `fd` until it is closed."""
        gc.collect()
        # Forks share the memory of objects that are never collected.
        gc.freeze()
        poll = select.poll()
        with socket.socket(fileno=fd) as control:
            poll.register(control, select.POLLIN)
            _send(control, event="loaded")
            while True:
                for ready, _ in poll.poll():
                    if ready in self._pids:
                        poll.unregister(ready)
                        self._reap(control, ready)
                        continue
                    message, descriptors, _, _ = socket.recv_fds(
                        control, MESSAGE_BYTES, NUM_DESCRIPTORS
                    )
                    if not message:
                        return
                    kv = json.loads(message)["kv"]
                    if self._kv is None or kv != "keep":
                        self._renew_kv(keep=kv != "none")
                    poll.register(self._fork(control, descriptors), select.POLLIN)

    def _fork(self, control: socket.socket, descriptors: Sequence[int]) -> int:
        """Fork a shard; returns the descriptor that reports its end."""
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            control.close()
            for fd in self._pids:
                os.close(fd)
            self._live(parent, *descriptors)
        for fd in descriptors:
            os.close(fd)
        # The launcher may kill the group before the shard has made it.
        os.setpgid(pid, pid)
        watched = os.pidfd_open(pid)
        self._pids[watched] = pid
        _send(control, event="forked", pid=pid)
        return watched

    def _renew_kv(self, *, keep: bool) -> None:
        """Free the KV of the last shard; with `keep`, make an empty file, which the next one inherits."""
        if self._kv is not None:
            os.close(self._kv)
        self._kv = None
        try:
            if keep:
                self._kv = os.memfd_create("millrace-kv")
        except OSError as error:
            logger.warning("KV does not outlive its shard: %s", error)

    def _reap(self, control: socket.socket, watched: int) -> None:
        pid = self._pids.pop(watched)
        os.close(watched)
        _, status = os.waitpid(pid, 0)
        _send(control, event="ended", pid=pid, status=os.waitstatus_to_exitcode(status))

    def _live(self, parent: int, stdout: int, stderr: int, serves: int) -> NoReturn:
        """The life of a shard in the fork."""

        def report() -> None:
            os.write(serves, b".")
            os.close(serves)

        try:
            os.setpgid(0, 0)
            for source, target in ((stdout, 1), (stderr, 2)):
                os.dup2(source, target)
                os.close(source)
            # A handler of before may wait for a thread that the fork lacks.
            logging.getLogger().handlers.clear()
            configure(self._config.threshold, json_output=self._config.json_output)
            die_with_parent(parent)
            rename_command()
            end_after(self._config, lambda: self.serve(report))
        finally:
            # Nothing of the parent's runs here, whatever was raised.
            os._exit(1)

    def _connected(self) -> LoadedModel:
        connect(self._config, self._loaded.group)
        store = None
        if self._kv is not None:
            store = KVStore(self._kv, verifies=self._config.verify_kv)
        loaded = replace(self._loaded, kv_store=store)
        return with_grammars(self._config, loaded, self._vocabulary)


def _send(control: socket.socket, **event: Any) -> None:  # noqa: ANN401
    control.send(json.dumps(event).encode())


def rename_command() -> None:
    """Let `ps` and others see the command `serve`, where the arguments of this process can be written to."""
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start = Path("/proc/self/cmdline").read_bytes().find(b"\0" + COMMAND + b"\0")
    if start >= 0 and (address := int(stat[ARGUMENTS_FIELD])):
        ctypes.memmove(address + start + 1, SHARD_COMMAND.ljust(len(COMMAND), b"\0"), len(COMMAND))
